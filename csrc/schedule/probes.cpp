// SPDX-License-Identifier: Apache-2.0
// What L3 may hold though nobody said so, and whether what a lower tier holds is worth fetching.
#include <algorithm>

#include "schedule/scheduler.h"

namespace moorage {

// Asks for the pages of a prompt behind what is known of it. The request waits for the answer, but
// no longer than it said; the answer counts for whoever comes later, too.
void Scheduler::start_probe(Request& request) {
  const TokenSpan wanted = TokenSpan(request.tokens).first(request.len() - 1);
  const auto num_full = static_cast<std::int32_t>(wanted.size()) / config_.page_size;
  if (num_full == 0) return;
  const PrefixMatch match = tree_.find(request.salt, wanted);
  const auto num_known = match.full_len / config_.page_size +
                         static_cast<std::int32_t>(pages_below(request, wanted, match).size());
  if (num_known >= num_full) return;
  request.probe_until_ms = now_ms_ + request.l3_wait_ms;
  page_hash(request.names, wanted, num_full - 1);
  request.probe_id = ask_store(request.names.pages, static_cast<std::size_t>(num_known));
}

// Names of a prefix, of which nobody knows the one at `first`. What is known behind it is not asked
// for. Returns the probe, a running one where that asks for the same page first.
std::int64_t Scheduler::ask_store(std::span<const PageHash> names, std::size_t first) {
  const auto same = probing_.find(names[first]);
  if (same != probing_.end()) return same->second;
  Probe probe;
  for (std::size_t i = first; i < names.size(); ++i) {
    if (tiers_.is_in_l2(names[i]) || tiers_.is_in_l3(names[i])) continue;
    probe.pages.push_back({names[i], i > 0 ? names[i - 1] : kRootHash,
                           static_cast<std::int32_t>(i + 1) * config_.page_size});
  }
  probing_[names[first]] = next_probe_;
  new_probes_.push_back(next_probe_);
  probes_.emplace(next_probe_, std::move(probe));
  stats_.num_probes += 1;
  return next_probe_++;
}

bool Scheduler::is_waiting_for_probe(const Request& request) const {
  return request.probe_id >= 0 && now_ms_ < request.probe_until_ms &&
         probes_.contains(request.probe_id);
}

void Scheduler::apply_probe(const ProbeDoneInput& input) {
  const auto node = probes_.extract(input.probe_id);
  const std::vector<PageName>& pages = node.mapped().pages;
  probing_.erase(pages[0].hash);
  stats_.num_probe_hits += input.num_pages;
  for (std::int64_t i = 0; i < input.num_pages; ++i) {
    tiers_.adopt_l3(pages[static_cast<std::size_t>(i)]);
  }
  note_answer(input.probe_id);
}

std::int32_t Scheduler::lose_l3(std::span<const PageHash> hashes) {
  std::int32_t num_lost = 0;
  for (const PageHash& hash : hashes) num_lost += tiers_.lose_l3(hash) ? 1 : 0;
  return num_lost;
}

void Scheduler::emit_probes(Plan& plan) {
  if (new_probes_.empty()) return;
  plan.probe_indptr.push_back(0);
  for (const std::int64_t id : new_probes_) {
    Probe& probe = probes_.at(id);
    probe.is_told = true;
    plan.probe_ids.push_back(id);
    for (const PageName& page : probe.pages) plan.probe_hashes.push_back(page.hash);
    plan.probe_indptr.push_back(static_cast<std::int32_t>(plan.probe_hashes.size()));
  }
  new_probes_.clear();
}

// ---- fetch or recompute ------------------------------------------------------------------------

// Of tokens [from, end); 0: the speed is not known. Capped, so that no input overflows.
std::int64_t Scheduler::prefill_ns(std::int32_t from, std::int32_t end) const {
  constexpr std::int64_t kUnit = 1024, kMostTimes = 64;
  const std::int64_t base = costs_.prefill_ns_per_token * (end - from);
  const std::int64_t middle = from + (end - from) / 2;
  const std::int64_t times = std::min(kUnit * middle / config_.attention_len, kUnit * kMostTimes);
  return base + base / kUnit * times;
}

// How many of these pages, which follow the first `from` tokens, to bring nearer so that the prompt
// is there soonest. Recomputing grows dearer with depth, so a far end may be worth what the first
// pages alone are not.
std::size_t Scheduler::num_worth_loading(const std::vector<PageHash>& hashes,
                                         std::int32_t from) const {
  if (costs_.prefill_ns_per_token == 0) return hashes.size();
  std::int64_t gain = 0, best_gain = 0;
  std::size_t best = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::int32_t start = from + static_cast<std::int32_t>(i) * config_.page_size;
    gain += prefill_ns(start, start + config_.page_size) - costs_.l2_ns_per_page;
    if (!tiers_.is_in_l2(hashes[i])) gain -= costs_.l3_ns_per_page;
    if (gain >= best_gain) best_gain = gain, best = i + 1;
  }
  return best;
}

}  // namespace moorage
