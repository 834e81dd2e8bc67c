// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include "bindings/bind_types.h"

namespace moorage {
namespace {

template <class T>
void require_rows(const char* field, const T& array, std::size_t num_rows) {
  if (array.shape(0) == num_rows) return;
  throw std::invalid_argument(std::string(field) + ": has " + std::to_string(array.shape(0)) +
                              " rows, num_accepted has " + std::to_string(num_rows));
}

template <class T, class Array>
std::vector<T> copy(const Array& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

}  // namespace

std::int32_t as_permille(const char* field, double share) {
  if (share >= 0.0 && share <= 1.0) return static_cast<std::int32_t>(share * 1000.0 + 0.5);
  throw std::invalid_argument(std::string(field) + ": " + std::to_string(share) +
                              " is not in [0, 1]");
}

namespace {

void make_step_done(StepDone* self, std::int64_t step_id, const InArray1<std::int32_t>& num_accepted,
                    const InArray2<std::int32_t>& token_ids, const InArray1<std::uint8_t>& finished,
                    const InArray1<std::uint8_t>& failed) {
  const std::size_t num_rows = num_accepted.shape(0);
  require_rows("token_ids", token_ids, num_rows);
  require_rows("finished", finished, num_rows);
  require_rows("failed", failed, num_rows);
  new (self) StepDone{step_id,
                      static_cast<std::int32_t>(token_ids.shape(1)),
                      copy<std::int32_t>(num_accepted),
                      copy<std::int32_t>(token_ids),
                      copy<std::uint8_t>(finished),
                      copy<std::uint8_t>(failed)};
}

void make_spec(RequestSpec* self, std::int64_t request_id, const InArray1<TokenId>& token_ids,
               std::int64_t max_new_tokens, std::int64_t priority, std::string tenant,
               std::string salt, double expected_return, std::int32_t num_draft_tokens,
               bool remote_prefill, std::int64_t l3_wait_ms, bool send_kv) {
  SharedTokens tokens(as_tokens(token_ids), std::make_shared<InArray1<TokenId>>(token_ids));
  new (self) RequestSpec{RequestId{request_id}, std::move(tokens),
                         max_new_tokens,        priority,
                         std::move(tenant),     std::move(salt),
                         as_permille("expected_return", expected_return),
                         num_draft_tokens,      remote_prefill,
                         l3_wait_ms,            send_kv};
}

void bind_config(nb::module_& module) {
  const SchedulerConfig defaults;
  nb::class_<SchedulerConfig>(module, "SchedulerConfig")
      .def(
          "__init__",
          [](SchedulerConfig* self, std::int32_t page_size, std::int32_t num_pages,
             std::int32_t max_slots, std::int32_t max_context_len, std::int32_t token_budget,
             std::int32_t lone_token_budget, std::string model_fingerprint, std::int64_t ageing_ms,
             std::int64_t suffix_us_per_token, std::int32_t spare_percent, std::string eviction,
             std::int32_t attention_len, std::int32_t lease_percent,
             std::int32_t tenant_lease_percent,
             std::int32_t num_l2_pages, bool use_l3, std::int32_t num_l3_pages, bool probe_l3,
             std::int64_t l3_wait_ms, bool overlap_loads, std::int32_t max_preemptions) {
            SchedulerConfig config{page_size,           num_pages,     max_slots,
                                   max_context_len,     token_budget,  lone_token_budget,
                                   std::move(model_fingerprint),       ageing_ms,
                                   suffix_us_per_token, spare_percent, std::move(eviction),
                                   attention_len,       lease_percent, tenant_lease_percent,
                                   num_l2_pages,        use_l3,        num_l3_pages,
                                   probe_l3,            l3_wait_ms,    overlap_loads,
                                   max_preemptions};
            config.validate();
            new (self) SchedulerConfig(std::move(config));
          },
          nb::kw_only(), nb::arg("page_size") = defaults.page_size, nb::arg("num_pages"),
          nb::arg("max_slots"), nb::arg("max_context_len"),
          nb::arg("token_budget") = defaults.token_budget,
          nb::arg("lone_token_budget") = defaults.lone_token_budget,
          nb::arg("model_fingerprint") = "",
          nb::arg("ageing_ms") = defaults.ageing_ms,
          nb::arg("suffix_us_per_token") = defaults.suffix_us_per_token,
          nb::arg("spare_percent") = defaults.spare_percent,
          nb::arg("eviction") = defaults.eviction,
          nb::arg("attention_len") = defaults.attention_len,
          nb::arg("lease_percent") = defaults.lease_percent,
          nb::arg("tenant_lease_percent") = defaults.tenant_lease_percent,
          nb::arg("num_l2_pages") = defaults.num_l2_pages, nb::arg("use_l3") = defaults.use_l3,
          nb::arg("num_l3_pages") = defaults.num_l3_pages,
          nb::arg("probe_l3") = defaults.probe_l3, nb::arg("l3_wait_ms") = defaults.l3_wait_ms,
          nb::arg("overlap_loads") = defaults.overlap_loads,
          nb::arg("max_preemptions") = defaults.max_preemptions)
      .def_ro("page_size", &SchedulerConfig::page_size)
      .def_ro("num_pages", &SchedulerConfig::num_pages)
      .def_ro("max_slots", &SchedulerConfig::max_slots)
      .def_ro("max_context_len", &SchedulerConfig::max_context_len)
      .def_ro("token_budget", &SchedulerConfig::token_budget)
      .def_ro("lone_token_budget", &SchedulerConfig::lone_token_budget)
      .def_ro("model_fingerprint", &SchedulerConfig::model_fingerprint)
      .def_ro("ageing_ms", &SchedulerConfig::ageing_ms)
      .def_ro("suffix_us_per_token", &SchedulerConfig::suffix_us_per_token)
      .def_ro("spare_percent", &SchedulerConfig::spare_percent)
      .def_ro("eviction", &SchedulerConfig::eviction)
      .def_ro("attention_len", &SchedulerConfig::attention_len)
      .def_ro("lease_percent", &SchedulerConfig::lease_percent)
      .def_ro("tenant_lease_percent", &SchedulerConfig::tenant_lease_percent)
      .def_ro("num_l2_pages", &SchedulerConfig::num_l2_pages)
      .def_ro("use_l3", &SchedulerConfig::use_l3)
      .def_ro("num_l3_pages", &SchedulerConfig::num_l3_pages)
      .def_ro("probe_l3", &SchedulerConfig::probe_l3)
      .def_ro("l3_wait_ms", &SchedulerConfig::l3_wait_ms)
      .def_ro("overlap_loads", &SchedulerConfig::overlap_loads)
      .def_ro("max_preemptions", &SchedulerConfig::max_preemptions);
}

}  // namespace

void bind_inputs(nb::module_& module) {
  bind_config(module);
  nb::class_<RequestSpec>(module, "RequestSpec")
      .def("__init__", &make_spec, nb::kw_only(), nb::arg("request_id"),
           nb::arg("token_ids").noconvert(), nb::arg("max_new_tokens"), nb::arg("priority") = 0,
           nb::arg("tenant") = "default", nb::arg("salt") = "", nb::arg("expected_return") = 0.5,
           nb::arg("num_draft_tokens") = 0, nb::arg("remote_prefill") = false,
           nb::arg("l3_wait_ms") = -1, nb::arg("send_kv") = false)
      .def_prop_ro("request_id", [](const RequestSpec& self) { return self.request_id.value; })
      .def_prop_ro("token_ids",
                   [](nb::handle_t<RequestSpec> self) {
                     return view(self, nb::cast<const RequestSpec&>(self).token_ids.view());
                   })
      .def_ro("max_new_tokens", &RequestSpec::max_new_tokens)
      .def_ro("priority", &RequestSpec::priority)
      .def_ro("tenant", &RequestSpec::tenant)
      .def_ro("salt", &RequestSpec::salt)
      .def_prop_ro("expected_return",
                   [](const RequestSpec& self) { return self.return_permille / 1000.0; })
      .def_ro("num_draft_tokens", &RequestSpec::num_draft_tokens)
      .def_ro("remote_prefill", &RequestSpec::remote_prefill)
      .def_ro("l3_wait_ms", &RequestSpec::l3_wait_ms)
      .def_ro("send_kv", &RequestSpec::send_kv);
  nb::class_<StepDone>(module, "StepDone")
      .def("__init__", &make_step_done, nb::kw_only(), nb::arg("step_id"),
           nb::arg("num_accepted").noconvert(), nb::arg("token_ids").noconvert(),
           nb::arg("finished").noconvert(), nb::arg("failed").noconvert())
      .def_ro("step_id", &StepDone::step_id)
      .def_prop_ro("num_accepted",
                   [](nb::handle_t<StepDone> self) {
                     return view(self, nb::cast<const StepDone&>(self).num_accepted);
                   })
      .def_prop_ro("token_ids",
                   [](nb::handle_t<StepDone> self) {
                     const auto& done = nb::cast<const StepDone&>(self);
                     const std::size_t shape[] = {done.num_accepted.size(),
                                                  static_cast<std::size_t>(done.num_columns)};
                     return OutArray<std::int32_t>(done.token_ids.data(), 2, shape, self);
                   })
      .def_prop_ro("finished",
                   [](nb::handle_t<StepDone> self) {
                     return view(self, nb::cast<const StepDone&>(self).finished);
                   })
      .def_prop_ro("failed", [](nb::handle_t<StepDone> self) {
        return view(self, nb::cast<const StepDone&>(self).failed);
      });
  nb::class_<AbortInput>(module, "Abort")
      .def(
          "__init__",
          [](AbortInput* self, std::int64_t request_id) {
            new (self) AbortInput{RequestId{request_id}};
          },
          nb::kw_only(), nb::arg("request_id"))
      .def_prop_ro("request_id", [](const AbortInput& self) { return self.request_id.value; });
  nb::class_<TransferAckInput>(module, "TransferAck")
      .def(
          "__init__",
          [](TransferAckInput* self, std::int64_t ticket, bool ok) {
            new (self) TransferAckInput{ticket, ok};
          },
          nb::kw_only(), nb::arg("ticket"), nb::arg("ok"))
      .def_ro("ticket", &TransferAckInput::ticket)
      .def_ro("ok", &TransferAckInput::ok);
  nb::class_<RemotePrefillInput>(module, "RemotePrefill")
      .def(
          "__init__",
          [](RemotePrefillInput* self, std::int64_t request_id, bool ok) {
            new (self) RemotePrefillInput{RequestId{request_id}, ok};
          },
          nb::kw_only(), nb::arg("request_id"), nb::arg("ok"))
      .def_prop_ro("request_id",
                   [](const RemotePrefillInput& self) { return self.request_id.value; })
      .def_ro("ok", &RemotePrefillInput::ok);
  nb::class_<ProbeDoneInput>(module, "ProbeDone")
      .def(
          "__init__",
          [](ProbeDoneInput* self, std::int64_t probe_id, std::int64_t num_pages) {
            new (self) ProbeDoneInput{probe_id, num_pages};
          },
          nb::kw_only(), nb::arg("probe_id"), nb::arg("num_pages"))
      .def_ro("probe_id", &ProbeDoneInput::probe_id)
      .def_ro("num_pages", &ProbeDoneInput::num_pages);
  nb::class_<SendDoneInput>(module, "SendDone")
      .def(
          "__init__",
          [](SendDoneInput* self, std::int64_t request_id, bool ok) {
            new (self) SendDoneInput{RequestId{request_id}, ok};
          },
          nb::kw_only(), nb::arg("request_id"), nb::arg("ok"))
      .def_prop_ro("request_id", [](const SendDoneInput& self) { return self.request_id.value; })
      .def_ro("ok", &SendDoneInput::ok);
}

}  // namespace moorage
