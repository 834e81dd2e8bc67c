// SPDX-License-Identifier: Apache-2.0
// What the scheduler is built from, and the single place that validates it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace moorage {

inline constexpr std::int64_t kMaxWaitMs = 3'600'000;

struct SchedulerConfig {
  std::int32_t page_size = 64;        // tokens
  std::int32_t num_pages = 0;         // of the device pool
  std::int32_t max_slots = 0;         // rows that may run at once
  std::int32_t max_context_len = 0;   // tokens of prompt + output
  std::int32_t token_budget = 512;    // prefill + decode tokens of one step
  // Of a step that one prompt has alone, where nobody waits; no more than token_budget: as many.
  std::int32_t lone_token_budget = 0;
  std::string model_fingerprint;      // part of every namespace

  std::int64_t ageing_ms = 10'000;    // waiting this long is worth one priority class
  // An uncached token delays its request by this much: turns pass cold prompts while those queue.
  std::int64_t suffix_us_per_token = 800;
  // Of the pool: while less could be had, long prompts leave most steps to streams; 0: never.
  std::int32_t spare_percent = 25;

  std::string eviction = "value";         // value | lru
  std::int32_t attention_len = 32768;     // context at which recomputing a token costs twice
  std::int32_t lease_percent = 50;        // of the pool, for all leases
  std::int32_t tenant_lease_percent = 25; // of the pool, where several tenants hold leases

  std::int32_t num_l2_pages = 0;  // of the host pool; 0: one tier only
  bool use_l3 = false;            // full pages go on to the store, and are fetched from it
  std::int32_t num_l3_pages = 1 << 22;  // of the store: names remembered, the pool its leases share
  bool probe_l3 = false;          // ask the store for what lies behind a waiting prompt's known hit
  std::int64_t l3_wait_ms = 0;    // a request waits for L3 no longer; 0: never for an answer

  // A request runs at once behind pages that still come from L2; its rows say what they wait for.
  bool overlap_loads = false;

  std::int32_t max_preemptions = 2;  // times a request gives its place to a better class; 0: never

  std::int32_t most_step_tokens() const { return std::max(token_budget, lone_token_budget); }
  std::int32_t pages_of(std::int64_t num_tokens) const {
    return static_cast<std::int32_t>((num_tokens + page_size - 1) / page_size);
  }

  // Throws std::invalid_argument naming the field, its value and what is allowed.
  void validate() const;
};

}  // namespace moorage
