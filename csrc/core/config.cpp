// SPDX-License-Identifier: Apache-2.0
#include "core/config.h"

#include <limits>
#include <stdexcept>

namespace moorage {
namespace {

void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string(field) + ": " + std::to_string(value) +
                              " is not in [" + std::to_string(low) + ", " +
                              std::to_string(high) + "]");
}

}  // namespace

void SchedulerConfig::validate() const {
  constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
  require_range("page_size", page_size, 1, 4096);
  // A slot mapping entry is page * page_size + offset and must fit in int32.
  require_range("num_pages", num_pages, 1, kMaxInt / page_size);
  require_range("max_slots", max_slots, 1, 65536);
  require_range("max_context_len", max_context_len, 2, kMaxInt / 2);
  require_range("token_budget", token_budget, 1, 1 << 24);
  require_range("lone_token_budget", lone_token_budget, 0, 1 << 24);
  require_range("ageing_ms", ageing_ms, 1, 1'000'000'000);
  require_range("suffix_us_per_token", suffix_us_per_token, 0, 1'000'000);
  require_range("spare_percent", spare_percent, 0, 100);
  require_range("attention_len", attention_len, 1, kMaxInt);
  require_range("lease_percent", lease_percent, 0, 100);
  require_range("tenant_lease_percent", tenant_lease_percent, 0, 100);
  require_range("num_l2_pages", num_l2_pages, 0, kMaxInt / page_size);
  require_range("num_l3_pages", num_l3_pages, 1, kMaxInt);
  require_range("l3_wait_ms", l3_wait_ms, 0, kMaxWaitMs);
  require_range("max_preemptions", max_preemptions, 0, 1000);
  if (probe_l3 && !use_l3) {
    throw std::invalid_argument("probe_l3: true needs use_l3: there is no store to ask");
  }
  if (use_l3 && num_l2_pages == 0) {
    throw std::invalid_argument("use_l3: true needs num_l2_pages > 0: L3 is reached through L2");
  }
  if (eviction != "value" && eviction != "lru") {
    throw std::invalid_argument("eviction: '" + eviction + "' is not in [value, lru]");
  }
}

}  // namespace moorage
