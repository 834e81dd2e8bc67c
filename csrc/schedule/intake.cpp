// SPDX-License-Identifier: Apache-2.0
// Requests come in: validated as a batch, ordered when the next plan sees them.
#include <stdexcept>
#include <unordered_set>

#include "schedule/scheduler.h"

namespace moorage {
namespace {

constexpr std::int64_t kMaxPriority = 1000;
constexpr std::int32_t kMaxDraftTokens = 64;

[[noreturn]] void reject(std::size_t index, const std::string& field, const std::string& why) {
  throw std::invalid_argument("specs[" + std::to_string(index) + "]." + field + ": " + why);
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config)
    : config_((config.validate(), std::move(config))),
      pool_(config_.num_pages),
      slots_(config_.max_slots),
      tree_(pool_,
            {config_.page_size, config_.model_fingerprint,
             config_.eviction == "lru" ? EvictionPolicy::kLru : EvictionPolicy::kValue,
             config_.attention_len},
            kv_log_),
      leases_(config_, tree_),
      waiting_(config_.token_budget) {}

Request* Scheduler::find_request(RequestId id) const {
  const auto found = requests_.find(id.value);
  return found == requests_.end() ? nullptr : found->second.get();
}

void Scheduler::validate(std::span<const RequestSpec* const> specs) const {
  std::unordered_set<std::int64_t> seen;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const RequestSpec& spec = *specs[i];
    const std::string id = std::to_string(spec.request_id.value);
    if (!spec.request_id.is_valid()) reject(i, "request_id", id + " is negative");
    if (find_request(spec.request_id) != nullptr) reject(i, "request_id", id + " is in use");
    if (!seen.insert(spec.request_id.value).second) {
      reject(i, "request_id", id + " appears twice in the batch");
    }
    if (spec.token_ids.empty()) reject(i, "token_ids", "is empty; at least 1 token is needed");
    for (std::size_t t = 0; t < spec.token_ids.size(); ++t) {
      if (spec.token_ids[t] >= 0) continue;
      reject(i, "token_ids[" + std::to_string(t) + "]",
             std::to_string(spec.token_ids[t]) + " is negative");
    }
    if (spec.max_new_tokens < 1) {
      reject(i, "max_new_tokens", std::to_string(spec.max_new_tokens) + " is not >= 1");
    }
    if (spec.return_permille < 0 || spec.return_permille > 1000) {
      reject(i, "expected_return", "is not in [0, 1]");
    }
    if (spec.num_draft_tokens < 0 || spec.num_draft_tokens > kMaxDraftTokens) {
      reject(i, "num_draft_tokens", std::to_string(spec.num_draft_tokens) + " is not in [0, 64]");
    }
    if (spec.priority < -kMaxPriority || spec.priority > kMaxPriority) {
      reject(i, "priority", std::to_string(spec.priority) + " is not in [-1000, 1000]");
    }
    const auto prompt_len = static_cast<std::int64_t>(spec.token_ids.size());
    if (spec.max_new_tokens > config_.max_context_len - prompt_len) {
      reject(i, "max_new_tokens",
             std::to_string(spec.max_new_tokens) + " + " + std::to_string(prompt_len) +
                 " prompt tokens exceed max_context_len " + std::to_string(config_.max_context_len));
    }
    // The last token sampled needs no KV.
    if (config_.pages_of(prompt_len + spec.max_new_tokens - 1) > config_.num_pages) {
      reject(i, "max_new_tokens",
             std::to_string(spec.max_new_tokens) + " + " + std::to_string(prompt_len) +
                 " prompt tokens can never fit in num_pages " + std::to_string(config_.num_pages) +
                 " of " + std::to_string(config_.page_size) + " tokens");
    }
  }
}

void Scheduler::submit(std::span<const RequestSpec* const> specs) {
  validate(specs);
  for (const RequestSpec* spec_ptr : specs) {
    const RequestSpec& spec = *spec_ptr;
    auto request = std::make_unique<Request>();
    request->id = spec.request_id;
    request->sequence = next_sequence_++;
    request->priority = spec.priority;
    request->tenant_name = spec.tenant;
    request->salt = spec.salt;
    request->return_permille = spec.return_permille;
    request->num_draft_tokens = spec.num_draft_tokens;
    request->prompt_len = static_cast<std::int32_t>(spec.token_ids.size());
    request->max_new_tokens = static_cast<std::int32_t>(spec.max_new_tokens);
    request->tokens.reserve(spec.token_ids.size() +
                            static_cast<std::size_t>(std::min<std::int64_t>(spec.max_new_tokens, 4096)));
    request->tokens = spec.token_ids;
    waiting_.join(*request);
    arrivals_.push_back(request.get());
    requests_.emplace(spec.request_id.value, std::move(request));
  }
  stats_.num_submitted += static_cast<std::int64_t>(specs.size());
}

// A fixed key ages every class alike: a request of class p that came p * ageing_ms earlier ties
// with one of class 0. Uncached tokens count as lateness, so short work goes first, but boundedly.
void Scheduler::take_in_arrivals() {
  for (Request* request : arrivals_) {
    const std::int64_t uncached = request->len() - tree_.find(request->salt, request->tokens).len();
    request->order_key_us = now_ms_ * 1000 + request->priority * config_.ageing_ms * 1000 +
                            uncached * config_.suffix_us_per_token;
    waiting_.insert(*request);
  }
  arrivals_.clear();
}

}  // namespace moorage
