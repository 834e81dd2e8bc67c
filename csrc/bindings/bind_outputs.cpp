// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind_types.h"

namespace moorage {
namespace {

OutArray<std::int32_t> view(nb::handle self,
                            const std::vector<std::array<std::int32_t, 3>>& values) {
  const std::size_t shape[] = {values.size(), 3};
  return OutArray<std::int32_t>(values.empty() ? nullptr : values[0].data(), 2, shape, self);
}

template <auto Field>
void def_array(nb::class_<PlanView>& plan, const char* name) {
  plan.def_prop_ro(name, [](nb::handle_t<PlanView> self) {
    return view(self, (*nb::cast<const PlanView&>(self).plan).*Field);
  });
}

template <auto Field>
void def_hashes(nb::class_<PlanView>& plan, const char* name) {
  plan.def_prop_ro(name, [](nb::handle_t<PlanView> self) {
    const auto& hashes = (*nb::cast<const PlanView&>(self).plan).*Field;
    const std::size_t shape[] = {hashes.size(), sizeof(PageHash)};
    return OutArray<std::uint8_t>(hashes.empty() ? nullptr : hashes[0].data(), 2, shape, self);
  });
}

void bind_plan(nb::module_& module) {
  nb::class_<Admission>(module, "Admission")
      .def_ro("request_id", &Admission::request_id)
      .def_ro("slot", &Admission::slot)
      .def_ro("prompt_len", &Admission::prompt_len)
      .def_ro("cached_l1", &Admission::cached_l1)
      .def_ro("cached_l2", &Admission::cached_l2)
      .def_ro("cached_l3", &Admission::cached_l3)
      .def_ro("readmitted", &Admission::readmitted)
      .def_ro("remote", &Admission::remote);
  nb::class_<PlanView> plan(module, "Plan");
  plan.def_prop_ro("step_id", [](const PlanView& self) { return self.plan->step_id; })
      .def_prop_ro("admissions", [](const PlanView& self) { return self.plan->admissions; })
      .def_prop_ro("retracted", [](const PlanView& self) { return self.plan->retracted; });
  def_array<&Plan::row_request_ids>(plan, "row_request_ids");
  def_array<&Plan::row_slots>(plan, "row_slots");
  def_array<&Plan::row_starts>(plan, "row_starts");
  def_array<&Plan::row_lens>(plan, "row_lens");
  def_array<&Plan::row_samples>(plan, "row_samples");
  def_array<&Plan::input_ids>(plan, "input_ids");
  def_array<&Plan::slot_mapping>(plan, "slot_mapping");
  def_array<&Plan::page_deltas>(plan, "page_deltas");
  def_array<&Plan::page_copies>(plan, "page_copies");
  def_array<&Plan::probe_ids>(plan, "probe_ids");
  def_array<&Plan::probe_indptr>(plan, "probe_indptr");
  plan.def_prop_ro("row_loads", [](nb::handle_t<PlanView> self) {
    const auto& loads = nb::cast<const PlanView&>(self).plan->row_loads;
    const std::size_t shape[] = {loads.size(), 2};
    return OutArray<std::int64_t>(loads.empty() ? nullptr : loads[0].data(), 2, shape, self);
  });
  plan.def_prop_ro("moves", [](nb::handle_t<PlanView> self) {
    const auto& moves = nb::cast<const PlanView&>(self).plan->moves;
    const std::size_t shape[] = {moves.size(), 6};
    return OutArray<std::int64_t>(moves.empty() ? nullptr : moves[0].data(), 2, shape, self);
  });
  def_hashes<&Plan::move_hashes>(plan, "move_hashes");
  def_hashes<&Plan::probe_hashes>(plan, "probe_hashes");
}

nb::bytes joined(const std::vector<PageHash>& hashes) {
  return nb::bytes(reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(PageHash));
}

void bind_send(nb::module_& module) {
  nb::class_<Send>(module, "Send")
      .def_ro("request_id", &Send::request_id)
      .def_ro("slot", &Send::slot)
      .def_ro("num_tokens", &Send::num_tokens)
      .def_prop_ro("pages",
                   [](nb::handle_t<Send> self) {
                     const auto& pages = nb::cast<const Send&>(self).pages;
                     const std::size_t shape[] = {pages.size()};
                     return OutArray<std::int32_t>(pages.empty() ? nullptr : &pages[0].value, 1,
                                                   shape, self);
                   })
      .def_prop_ro("page_hashes", [](const Send& self) { return joined(self.page_hashes); });
}

void bind_move_result(nb::module_& module) {
  nb::class_<MoveResult>(module, "MoveResult")
      .def_ro("tokens_there", &MoveResult::tokens_there)
      .def_ro("tokens_pending", &MoveResult::tokens_pending)
      .def_ro("tokens_missing", &MoveResult::tokens_missing)
      .def_ro("num_pages", &MoveResult::num_pages);
}

void bind_ended(nb::module_& module) {
  nb::class_<EndedRequest>(module, "Ended")
      .def_ro("request_id", &EndedRequest::request_id)
      .def_prop_ro("status", [](const EndedRequest& self) { return name_of(self.status); })
      .def_ro("message", &EndedRequest::message)
      .def_ro("num_cached_tokens", &EndedRequest::num_cached_tokens)
      .def_prop_ro("page_hashes",
                   [](const EndedRequest& self) { return joined(self.page_hashes); });
}

void bind_leases(nb::module_& module) {
  nb::class_<LeaseGrant>(module, "LeaseGrant")
      .def_prop_ro("state", [](const LeaseGrant& self) { return name_of(self.state); })
      .def_ro("tokens_requested", &LeaseGrant::tokens_requested)
      .def_ro("tokens_granted", &LeaseGrant::tokens_granted)
      .def_ro("reason", &LeaseGrant::reason);
  nb::class_<LeaseEvent>(module, "LeaseEvent")
      .def_ro("lease_id", &LeaseEvent::lease_id)
      .def_prop_ro("kind", [](const LeaseEvent& self) { return name_of(self.kind); })
      .def_ro("num_tokens", &LeaseEvent::num_tokens);
}

void bind_cache_views(nb::module_& module) {
  nb::class_<KvEvent>(module, "KvEvent")
      .def_prop_ro("kind", [](const KvEvent& self) { return name_of(self.kind); })
      .def_prop_ro("tier", [](const KvEvent& self) { return name_of(self.tier); })
      .def_prop_ro("page_hash", [](const KvEvent& self) { return as_bytes(self.page_hash); })
      .def_prop_ro("parent_hash", [](const KvEvent& self) { return as_bytes(self.parent_hash); })
      .def_ro("num_tokens", &KvEvent::num_tokens);
  nb::class_<PrefixDepth>(module, "PrefixHit")
      .def_ro("l1", &PrefixDepth::l1)
      .def_ro("l2", &PrefixDepth::l2)
      .def_ro("l3", &PrefixDepth::l3)
      .def_ro("pending", &PrefixDepth::pending);
  nb::class_<TreeNodeView>(module, "TreeNode")
      .def_ro("node_id", &TreeNodeView::node_id)
      .def_ro("parent_id", &TreeNodeView::parent_id)
      .def_ro("num_tokens", &TreeNodeView::num_tokens)
      .def_ro("num_pages", &TreeNodeView::num_pages)
      .def_ro("num_l2_pages", &TreeNodeView::num_l2_pages)
      .def_ro("num_l3_pages", &TreeNodeView::num_l3_pages)
      .def_ro("num_children", &TreeNodeView::num_children)
      .def_ro("num_users", &TreeNodeView::num_users)
      .def_ro("last_used_ms", &TreeNodeView::last_used_ms)
      .def_prop_ro("page_hash",
                   [](const TreeNodeView& self) {
                     return nb::bytes(self.page_hash.data(), self.page_hash.size());
                   })
      .def_prop_ro("first_token_ids", [](nb::handle_t<TreeNodeView> self) {
        return view(self, nb::cast<const TreeNodeView&>(self).first_token_ids);
      });
  nb::class_<LowerPageView>(module, "LowerPage")
      .def_prop_ro("page_hash",
                   [](const LowerPageView& self) {
                     return nb::bytes(self.page_hash.data(), self.page_hash.size());
                   })
      .def_prop_ro("parent_hash",
                   [](const LowerPageView& self) {
                     return nb::bytes(self.parent_hash.data(), self.parent_hash.size());
                   })
      .def_ro("in_l2", &LowerPageView::in_l2)
      .def_ro("in_l3", &LowerPageView::in_l3);
}

}  // namespace

const char* name_of(EndStatus status) {
  switch (status) {
    case EndStatus::kFinished: return "finished";
    case EndStatus::kAborted: return "aborted";
    case EndStatus::kFailed: return "failed";
  }
  return "";
}

const char* name_of(LeaseState state) {
  switch (state) {
    case LeaseState::kGranted: return "granted";
    case LeaseState::kClipped: return "clipped";
    case LeaseState::kQueued: return "queued";
    case LeaseState::kDenied: return "denied";
  }
  return "";
}

const char* name_of(LeaseEventKind kind) {
  switch (kind) {
    case LeaseEventKind::kGranted: return "granted";
    case LeaseEventKind::kClipped: return "clipped";
    case LeaseEventKind::kDemoted: return "demoted";
    case LeaseEventKind::kRevoked: return "revoked";
    case LeaseEventKind::kExpired: return "expired";
    case LeaseEventKind::kDenied: return "denied";
  }
  return "";
}

const char* name_of(KvEventKind kind) {
  switch (kind) {
    case KvEventKind::kStored: return "stored";
    case KvEventKind::kMoved: return "moved";
    case KvEventKind::kRemoved: return "removed";
  }
  return "";
}

const char* name_of(Tier tier) {
  switch (tier) {
    case Tier::kL1: return "l1";
    case Tier::kL2: return "l2";
    case Tier::kL3: return "l3";
  }
  return "";
}

void bind_outputs(nb::module_& module) {
  bind_plan(module);
  bind_ended(module);
  bind_send(module);
  bind_move_result(module);
  bind_leases(module);
  bind_cache_views(module);
}

}  // namespace moorage
