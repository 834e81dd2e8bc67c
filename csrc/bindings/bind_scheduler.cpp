// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <set>

#include "bindings/bind_types.h"
#include "requests/transitions.h"

namespace moorage {
namespace {

// The scheduler and the plans it lends. A plan that Python still holds is left alone and another
// one is filled, so the steady state allocates nothing and no view ever dangles.
struct BoundScheduler {
  // The first plans are made, and their memory touched, before the first step asks for them.
  explicit BoundScheduler(const SchedulerConfig& config) : scheduler(config) {
    constexpr std::int32_t kMostTokens = 1 << 18;
    const auto num_tokens =
        static_cast<std::size_t>(std::min(config.most_step_tokens(), kMostTokens));
    for (int i = 0; i < Scheduler::kMaxStepsInFlight; ++i) {
      plans.push_back(std::make_shared<Plan>());
      plans.back()->input_ids.resize(num_tokens);
      plans.back()->slot_mapping.resize(num_tokens);
      plans.back()->clear();
    }
  }

  Scheduler scheduler;
  std::vector<std::shared_ptr<Plan>> plans;
  std::vector<InputEvent> events;

  PlanView next_plan(TimeMs now_ms) {
    std::shared_ptr<Plan> free_plan;
    for (const auto& plan : plans) {
      if (plan.use_count() == 1) free_plan = plan;
    }
    if (free_plan == nullptr) {
      free_plan = std::make_shared<Plan>();
      if (plans.size() < 4) plans.push_back(free_plan);
    }
    scheduler.next_plan(now_ms, *free_plan);
    return PlanView{std::move(free_plan)};
  }

  std::vector<EndedRequest> advance(nb::sequence sequence) {
    events.clear();
    for (nb::handle event : sequence) {
      if (nb::isinstance<StepDone>(event)) {
        events.push_back(nb::cast<const StepDone&>(event).view());
      } else if (nb::isinstance<AbortInput>(event)) {
        events.push_back(nb::cast<const AbortInput&>(event));
      } else if (nb::isinstance<RemotePrefillInput>(event)) {
        events.push_back(nb::cast<const RemotePrefillInput&>(event));
      } else if (nb::isinstance<TransferAckInput>(event)) {
        events.push_back(nb::cast<const TransferAckInput&>(event));
      } else if (nb::isinstance<ProbeDoneInput>(event)) {
        events.push_back(nb::cast<const ProbeDoneInput&>(event));
      } else if (nb::isinstance<SendDoneInput>(event)) {
        events.push_back(nb::cast<const SendDoneInput&>(event));
      } else {
        throw nb::type_error(
            "advance: an event is a StepDone, an Abort, a TransferAck, a RemotePrefill, a "
            "ProbeDone or a SendDone");
      }
    }
    return scheduler.advance(events);
  }
};

void submit(BoundScheduler& self, nb::sequence sequence) {
  std::vector<const RequestSpec*> specs;  // the sequence keeps them while it is held
  for (nb::handle spec : sequence) specs.push_back(&nb::cast<const RequestSpec&>(spec));
  self.scheduler.submit(specs);
}

std::int64_t require_count(const char* field, std::int64_t value, std::int64_t low) {
  if (value >= low) return value;
  throw std::invalid_argument(std::string(field) + ": " + std::to_string(value) + " is not >= " +
                              std::to_string(low));
}

nb::dict stats(const BoundScheduler& self) {
  const Scheduler& scheduler = self.scheduler;
  const PagePool& pool = scheduler.pool();
  const Stats& counts = scheduler.stats();
  nb::dict out;
  out["num_pages"] = pool.num_pages();
  out["free_pages"] = pool.count(PageOwner::kFree);
  out["owned_pages"] = pool.count(PageOwner::kRequest);
  out["cached_pages"] = pool.count(PageOwner::kTree);
  out["in_flight_pages"] = pool.count(PageOwner::kInFlight);
  out["evictable_pages"] = scheduler.tree().pages().evictable;
  out["leased_pages"] = scheduler.tree().pages().leased;
  out["leases"] = scheduler.leases().num_leases();
  out["leases_queued"] = scheduler.leases().num_queued();
  out["running"] = scheduler.num_running();
  out["waiting"] = scheduler.num_waiting();
  out["leaving"] = scheduler.num_leaving();
  out["steps_in_flight"] = scheduler.num_steps_in_flight();
  out["tree_nodes"] = scheduler.tree().num_nodes();
  out["steps"] = counts.num_steps;
  out["submitted"] = counts.num_submitted;
  out["finished"] = counts.num_finished;
  out["aborted"] = counts.num_aborted;
  out["failed"] = counts.num_failed;
  out["retractions"] = counts.num_retractions;
  out["prompt_tokens"] = counts.num_prompt_tokens;
  out["cached_prompt_tokens"] = counts.num_cached_tokens;
  out["page_copies"] = counts.num_page_copies;
  out["duplicate_pages"] = counts.num_duplicate_pages;
  out["evicted_pages"] = scheduler.tree().num_evicted_pages();
  const LowerTiers& tiers = scheduler.tiers();
  out["held_pages"] = pool.num_held();
  out["num_l2_pages"] = tiers.pool().num_pages();
  out["free_l2_pages"] = tiers.pool().num_free();
  out["cached_l2_pages"] = tiers.pool().count(PageOwner::kTree);
  out["in_flight_l2_pages"] = tiers.pool().count(PageOwner::kInFlight);
  out["cached_l3_pages"] = tiers.num_l3_pages();
  out["transfers_in_flight"] = tiers.num_in_flight();
  out["transfers_lost"] = tiers.num_lost();
  out["loaded_pages"] = counts.num_loaded_pages;
  out["l2_cached_prompt_tokens"] = counts.num_l2_cached_tokens;
  out["l3_cached_prompt_tokens"] = counts.num_l3_cached_tokens;
  out["sending"] = scheduler.num_sending();
  out["preemptions"] = counts.num_preemptions;
  out["evicted_l2_pages"] = tiers.num_evicted();
  out["leased_l2_pages"] = tiers.num_leased(Tier::kL2);
  out["leased_l3_pages"] = tiers.num_leased(Tier::kL3);
  out["move_orders"] = scheduler.num_orders();
  out["probes"] = counts.num_probes;
  out["probes_open"] = scheduler.num_probes_open();
  out["probe_hit_pages"] = counts.num_probe_hits;
  out["declined_pages"] = counts.num_declined_pages;
  out["kv_events_dropped"] = scheduler.kv_log().num_dropped();
  return out;
}

std::vector<TreeNodeView> tree(const BoundScheduler& self, std::int64_t max_nodes) {
  require_count("max_nodes", max_nodes, 0);
  const auto limit = static_cast<std::int32_t>(std::min<std::int64_t>(max_nodes, 1 << 20));
  const LowerTiers& lower = self.scheduler.tiers();
  std::vector<TreeNodeView> views;
  for (const Node* node : self.scheduler.tree().snapshot(limit)) {
    TreeNodeView view{node->id.value,
                      node->is_root() ? -1 : node->parent->id.value,
                      node->len(),
                      node->pages.size(),
                      0,
                      0,
                      static_cast<std::int32_t>(node->children.size()),
                      node->num_users,
                      node->last_used_ms,
                      {},
                      {}};
    for (const PageHash& hash : node->hashes) {
      view.num_l2_pages += lower.is_in_l2(hash) ? 1 : 0;
      view.num_l3_pages += lower.is_in_l3(hash) ? 1 : 0;
    }
    if (!node->hashes.empty()) {
      view.page_hash.assign(node->hashes.back().begin(), node->hashes.back().end());
    }
    const auto shown = std::min<std::size_t>(node->tokens.size(), 16);
    view.first_token_ids.assign(node->tokens.begin(),
                                node->tokens.begin() + static_cast<std::ptrdiff_t>(shown));
    views.push_back(std::move(view));
  }
  return views;
}

std::vector<LowerPageView> lower_pages(const BoundScheduler& self, std::int64_t max_pages) {
  require_count("max_pages", max_pages, 0);
  std::set<PageHash> in_l1;
  constexpr auto kAll = std::numeric_limits<std::int32_t>::max();
  for (const Node* node : self.scheduler.tree().snapshot(kAll)) {
    in_l1.insert(node->hashes.begin(), node->hashes.end());
  }
  const LowerTiers& lower = self.scheduler.tiers();
  std::vector<LowerPageView> views;
  for (const PageName& name : lower.names()) {
    if (static_cast<std::int64_t>(views.size()) >= max_pages) break;
    if (in_l1.contains(name.hash)) continue;
    views.push_back({{name.hash.begin(), name.hash.end()},
                     {name.parent.begin(), name.parent.end()},
                     lower.is_in_l2(name.hash),
                     lower.is_in_l3(name.hash)});
  }
  return views;
}

std::int64_t drop_prefix(BoundScheduler& self, const InArray1<TokenId>& token_ids,
                         std::int64_t keep_tokens, const std::string& salt) {
  require_count("keep_tokens", keep_tokens, 0);
  const std::int64_t most = self.scheduler.config().max_context_len;
  return self.scheduler.drop_prefix(as_tokens(token_ids),
                                    static_cast<std::int32_t>(std::min(keep_tokens, most)), salt);
}

std::int32_t hint_prefix(BoundScheduler& self, const InArray1<TokenId>& token_ids,
                         double expected_return, const std::string& salt,
                         std::int64_t l1_until_ms, std::int64_t l2_until_ms,
                         std::int64_t l3_until_ms) {
  HoldTimes hold{require_count("l1_until_ms", l1_until_ms, 0),
                 require_count("l2_until_ms", l2_until_ms, 0),
                 require_count("l3_until_ms", l3_until_ms, 0)};
  return self.scheduler.hint_prefix(
      as_tokens(token_ids), as_permille("expected_return", expected_return), salt, hold);
}

MoveResult move_prefix(BoundScheduler& self, const InArray1<TokenId>& token_ids,
                       const std::string& tier, const std::string& salt) {
  constexpr std::pair<const char*, MoveTarget> kTargets[] = {{"l1", MoveTarget::kL1},
                                                             {"l2", MoveTarget::kL2},
                                                             {"l3", MoveTarget::kL3},
                                                             {"none", MoveTarget::kNone}};
  for (const auto& [name, target] : kTargets) {
    if (tier == name) return self.scheduler.move(as_tokens(token_ids), target, salt);
  }
  throw std::invalid_argument("tier: '" + tier + "' is not in [l1, l2, l3, none]");
}

std::int64_t as_ns(const char* field, double us, double most_us) {
  if (us >= 0.0 && us <= most_us) return static_cast<std::int64_t>(us * 1000.0 + 0.5);
  throw std::invalid_argument(std::string(field) + ": " + std::to_string(us) + " is not in [0, " +
                              std::to_string(static_cast<std::int64_t>(most_us)) + "]");
}

void set_costs(BoundScheduler& self, double l2_us_per_page, double l3_us_per_page,
               double prefill_us_per_token) {
  self.scheduler.set_costs({as_ns("l2_us_per_page", l2_us_per_page, 1e9),
                            as_ns("l3_us_per_page", l3_us_per_page, 1e9),
                            as_ns("prefill_us_per_token", prefill_us_per_token, 1e4)});
}

// None: the page that stands before a prefix's first one.
PageHash as_name(const char* field, const nb::bytes& name) {
  PageHash hash = kRootHash;
  if (name.size() == hash.size()) {
    std::memcpy(hash.data(), name.c_str(), hash.size());
  } else if (name.size() != 0) {
    throw std::invalid_argument(std::string(field) + ": " + std::to_string(name.size()) +
                                " bytes are neither a name (16) nor none");
  }
  return hash;
}

std::vector<PageHash> as_names(const nb::bytes& page_hashes) {
  if (page_hashes.size() % sizeof(PageHash) != 0) {
    throw std::invalid_argument("page_hashes: " + std::to_string(page_hashes.size()) +
                                " bytes are not 16 a page");
  }
  std::vector<PageHash> hashes(page_hashes.size() / sizeof(PageHash));
  if (!hashes.empty()) std::memcpy(hashes.data(), page_hashes.c_str(), page_hashes.size());
  return hashes;
}

std::int32_t adopt(BoundScheduler& self, const std::string& tier,
                   const InArray1<TokenId>& token_ids, const nb::bytes& page_hashes,
                   const InArray1<std::int32_t>& pages, const std::string& salt,
                   const nb::bytes& before, std::int64_t start) {
  if (tier != "l2" && tier != "l3") {
    throw std::invalid_argument("tier: '" + tier + "' is not in [l2, l3]");
  }
  const std::vector<PageHash> hashes = as_names(page_hashes);
  std::vector<PageId> ids;
  for (std::size_t i = 0; i < pages.shape(0); ++i) ids.push_back(PageId{pages.data()[i]});
  return self.scheduler.adopt(tier == "l2" ? Tier::kL2 : Tier::kL3, as_tokens(token_ids), hashes,
                              ids, salt, {as_name("before", before), start});
}

LeaseGrant lease(BoundScheduler& self, std::int64_t lease_id, const InArray1<TokenId>& token_ids,
                 std::int64_t until_ms, std::string tenant, std::string salt,
                 const std::string& tier) {
  require_count("lease_id", lease_id, 0);
  if (token_ids.size() == 0) throw std::invalid_argument("token_ids: is empty");
  if (tier != "l1" && tier != "l2" && tier != "l3") {
    throw std::invalid_argument("tier: '" + tier + "' is not in [l1, l2, l3]");
  }
  const Tier where = tier == "l1" ? Tier::kL1 : tier == "l2" ? Tier::kL2 : Tier::kL3;
  const SchedulerConfig& config = self.scheduler.config();
  if (where != Tier::kL1 && config.num_l2_pages == 0) {
    throw std::invalid_argument("tier: '" + tier + "' needs num_l2_pages > 0");
  }
  if (where == Tier::kL3 && !config.use_l3) {
    throw std::invalid_argument("tier: 'l3' needs use_l3");
  }
  const TokenSpan tokens = as_tokens(token_ids);
  return self.scheduler.lease({lease_id,
                               {tokens.begin(), tokens.end()},
                               until_ms,
                               std::move(tenant),
                               std::move(salt),
                               where});
}

void check_integrity(const BoundScheduler& self) {
  const std::string broken = self.scheduler.find_broken_invariant();
  if (!broken.empty()) throw std::runtime_error("broken invariant: " + broken);
}

nb::bytes name_pages(const InArray1<TokenId>& token_ids, std::int64_t page_size,
                     const std::string& model_fingerprint, const std::string& salt,
                     const nb::bytes& parent) {
  require_count("page_size", page_size, 1);
  PageHash hash = as_name("parent", parent);
  const PageHash space = hash_namespace(model_fingerprint, salt);
  const auto length = static_cast<std::size_t>(page_size);
  std::string names;
  for (TokenSpan rest = as_tokens(token_ids); rest.size() >= length; rest = rest.subspan(length)) {
    hash = hash_page(space, hash, rest.first(length));
    names.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  }
  return nb::bytes(names.data(), names.size());
}

nb::list fsm_rows() {
  nb::list rows;
  for (const FsmRow& row : fsm_table()) {
    rows.append(nb::make_tuple(nb::str(row.state.data(), row.state.size()),
                               nb::str(row.event.data(), row.event.size()),
                               nb::str(row.next.data(), row.next.size())));
  }
  return rows;
}

}  // namespace

void bind_scheduler(nb::module_& module) {
  nb::class_<BoundScheduler>(module, "Scheduler")
      .def(nb::init<const SchedulerConfig&>(), nb::arg("config"))
      .def("submit", &submit, nb::arg("specs"))
      .def("next_plan", &BoundScheduler::next_plan, nb::arg("now_ms"))
      .def("advance", &BoundScheduler::advance, nb::arg("events"))
      .def(
          "query_prefix",
          [](const BoundScheduler& self, const InArray1<TokenId>& token_ids,
             const std::string& salt) {
            return self.scheduler.query_prefix(as_tokens(token_ids), salt);
          },
          nb::arg("token_ids").noconvert(), nb::arg("salt") = "")
      .def("drop_prefix", &drop_prefix, nb::arg("token_ids").noconvert(),
           nb::arg("keep_tokens") = 0, nb::arg("salt") = "")
      .def("hint_prefix", &hint_prefix, nb::arg("token_ids").noconvert(),
           nb::arg("expected_return"), nb::arg("salt") = "", nb::kw_only(),
           nb::arg("l1_until_ms") = 0, nb::arg("l2_until_ms") = 0, nb::arg("l3_until_ms") = 0)
      .def("set_costs", &set_costs, nb::kw_only(), nb::arg("l2_us_per_page") = 0.0,
           nb::arg("l3_us_per_page") = 0.0, nb::arg("prefill_us_per_token") = 0.0)
      .def(
          "set_num_draft_tokens",
          [](BoundScheduler& self, std::int64_t request_id, std::int64_t num_draft_tokens) {
            self.scheduler.set_num_draft_tokens(RequestId{request_id}, num_draft_tokens);
          },
          nb::arg("request_id"), nb::arg("num_draft_tokens"))
      .def("move", &move_prefix, nb::arg("token_ids").noconvert(), nb::arg("tier"),
           nb::arg("salt") = "")
      .def("adopt", &adopt, nb::arg("tier"), nb::arg("token_ids").noconvert(),
           nb::arg("page_hashes"), nb::arg("pages").noconvert(), nb::arg("salt") = "",
           nb::kw_only(), nb::arg("before") = nb::bytes("", 0), nb::arg("start") = 0)
      .def(
          "lose_l3",
          [](BoundScheduler& self, const nb::bytes& page_hashes) {
            return self.scheduler.lose_l3(as_names(page_hashes));
          },
          nb::arg("page_hashes"))
      .def("lease", &lease, nb::kw_only(), nb::arg("lease_id"), nb::arg("token_ids").noconvert(),
           nb::arg("until_ms"), nb::arg("tenant") = "default", nb::arg("salt") = "",
           nb::arg("tier") = "l1")
      .def(
          "release",
          [](BoundScheduler& self, std::int64_t lease_id) {
            return self.scheduler.release(lease_id);
          },
          nb::arg("lease_id"))
      .def("drain_sends", [](BoundScheduler& self) { return self.scheduler.drain_sends(); })
      .def("drain_lease_events",
           [](BoundScheduler& self) { return self.scheduler.drain_lease_events(); })
      .def("drain_kv_events",
           [](BoundScheduler& self) { return self.scheduler.drain_kv_events(); })
      .def("stats", &stats)
      .def("tree", &tree, nb::arg("max_nodes") = 256)
      .def("lower_pages", &lower_pages, nb::arg("max_pages") = 4096)
      .def("check_integrity", &check_integrity);
  module.def("fsm_table", &fsm_rows);
  module.def("name_pages", &name_pages, nb::arg("token_ids").noconvert(), nb::kw_only(),
             nb::arg("page_size"), nb::arg("model_fingerprint") = "", nb::arg("salt") = "",
             nb::arg("parent") = nb::bytes("", 0));
}

}  // namespace moorage

NB_MODULE(_scheduler, module) {
  moorage::bind_inputs(module);
  moorage::bind_outputs(module);
  moorage::bind_scheduler(module);
}
