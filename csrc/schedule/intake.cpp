// SPDX-License-Identifier: Apache-2.0
// Requests come in: validated as a batch, ordered when the next plan sees them.
#include <algorithm>
#include <stdexcept>
#include <unordered_set>

#include "schedule/scheduler.h"

namespace moorage {
namespace {

constexpr std::int64_t kMaxPriority = 1000;
constexpr std::int64_t kMaxDraftTokens = 64;
constexpr std::int64_t kMaxNewTokens = 1 << 30;
// Room for tokens made at once, so that no step reallocates.
constexpr std::int64_t kReservedOutputs = 4096;
constexpr std::size_t kMaxSpareBuffers = 8;

[[noreturn]] void reject(std::size_t index, const std::string& field, const std::string& why) {
  throw std::invalid_argument("specs[" + std::to_string(index) + "]." + field + ": " + why);
}

void require_range(std::size_t index, const char* field, std::int64_t value, std::int64_t low,
                   std::int64_t high) {
  if (value >= low && value <= high) return;
  reject(index, field,
         std::to_string(value) + " is not in [" + std::to_string(low) + ", " +
             std::to_string(high) + "]");
}

void validate_tokens(std::size_t index, TokenSpan tokens) {
  if (tokens.empty()) reject(index, "token_ids", "is empty; at least 1 token is needed");
  const auto negative = std::ranges::find_if(tokens, [](TokenId token) { return token < 0; });
  if (negative == tokens.end()) return;
  reject(index, "token_ids[" + std::to_string(negative - tokens.begin()) + "]",
         std::to_string(*negative) + " is negative");
}

// What could never run must not wait for ever.
void validate_length(std::size_t index, const RequestSpec& spec, const SchedulerConfig& config) {
  const auto prompt_len = static_cast<std::int64_t>(spec.token_ids.view().size());
  const std::string sum = std::to_string(spec.max_new_tokens) + " + " +
                          std::to_string(prompt_len) + " prompt tokens ";
  if (spec.max_new_tokens > config.max_context_len - prompt_len) {
    reject(index, "max_new_tokens",
           sum + "exceed max_context_len " + std::to_string(config.max_context_len));
  }
  // The last token sampled needs no KV.
  if (config.pages_of(prompt_len + spec.max_new_tokens - 1) > config.num_pages) {
    reject(index, "max_new_tokens",
           sum + "can never fit in num_pages " + std::to_string(config.num_pages) + " of " +
               std::to_string(config.page_size) + " tokens");
  }
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config)
    : config_((config.validate(), std::move(config))),
      pool_(config_.num_pages),
      tiers_({config_.num_l2_pages, config_.use_l3, config_.num_l3_pages, config_.page_size,
              config_.eviction == "lru" ? EvictionPolicy::kLru : EvictionPolicy::kValue,
              config_.attention_len},
             kv_log_),
      slots_(config_.max_slots),
      tree_(pool_,
            {config_.page_size, config_.model_fingerprint,
             config_.eviction == "lru" ? EvictionPolicy::kLru : EvictionPolicy::kValue,
             config_.attention_len},
            kv_log_, &tiers_),
      write_through_(pool_, tree_, tiers_, config_.page_size),
      leases_(config_, tree_, tiers_, write_through_),
      waiting_(config_.token_budget) {}

Request* Scheduler::find_request(RequestId id) const {
  const auto found = requests_.find(id.value);
  return found == requests_.end() ? nullptr : found->second.get();
}

void Scheduler::validate(std::span<const RequestSpec* const> specs) const {
  std::unordered_set<std::int64_t> seen;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const RequestId id = specs[i]->request_id;
    const std::string name = std::to_string(id.value);
    if (!id.is_valid()) reject(i, "request_id", name + " is negative");
    if (find_request(id) != nullptr) reject(i, "request_id", name + " is in use");
    if (!seen.insert(id.value).second) {
      reject(i, "request_id", name + " appears twice in the batch");
    }
    validate_tokens(i, specs[i]->token_ids.view());
    require_range(i, "max_new_tokens", specs[i]->max_new_tokens, 1, kMaxNewTokens);
    require_range(i, "priority", specs[i]->priority, -kMaxPriority, kMaxPriority);
    require_range(i, "expected_return", specs[i]->return_permille, 0, 1000);
    require_range(i, "num_draft_tokens", specs[i]->num_draft_tokens, 0, kMaxDraftTokens);
    require_range(i, "l3_wait_ms", specs[i]->l3_wait_ms, -1, kMaxWaitMs);
    if (specs[i]->send_kv && specs[i]->remote_prefill) {
      reject(i, "send_kv", "true with remote_prefill: one engine computes the prompt, one goes on");
    }
    validate_length(i, *specs[i], config_);
  }
}

void Scheduler::set_num_draft_tokens(RequestId id, std::int64_t num_draft_tokens) {
  Request* request = find_request(id);
  if (request == nullptr) {
    throw std::invalid_argument("request_id: " + std::to_string(id.value) + " is unknown");
  }
  if (num_draft_tokens < 0 || num_draft_tokens > kMaxDraftTokens) {
    throw std::invalid_argument("num_draft_tokens: " + std::to_string(num_draft_tokens) +
                                " is not in [0, " + std::to_string(kMaxDraftTokens) + "]");
  }
  request->num_draft_tokens = static_cast<std::int32_t>(num_draft_tokens);
}

// Memory for a long context comes page by page from the kernel, which costs more than to copy the
// tokens: buffers of requests that ended are used again.
std::vector<TokenId> Scheduler::take_buffer(std::size_t num_tokens) {
  std::vector<TokenId> buffer;
  const auto fits = std::ranges::find_if(
      spare_buffers_, [=](const auto& spare) { return spare.capacity() >= num_tokens; });
  if (fits != spare_buffers_.end()) {
    buffer.swap(*fits);
    spare_buffers_.erase(fits);
  }
  buffer.reserve(num_tokens);
  return buffer;
}

void Scheduler::keep_buffer(std::vector<TokenId> buffer) {
  if (buffer.capacity() < kReservedOutputs) return;
  if (spare_buffers_.size() >= kMaxSpareBuffers) spare_buffers_.erase(spare_buffers_.begin());
  buffer.clear();
  spare_buffers_.push_back(std::move(buffer));
}

void Scheduler::submit(std::span<const RequestSpec* const> specs) {
  validate(specs);
  for (const RequestSpec* spec_ptr : specs) {
    const RequestSpec& spec = *spec_ptr;
    const TokenSpan tokens = spec.token_ids.view();
    auto request = std::make_unique<Request>();
    request->id = spec.request_id;
    request->sequence = next_sequence_++;
    request->priority = spec.priority;
    request->tenant_name = spec.tenant;
    request->salt = spec.salt;
    request->return_permille = spec.return_permille;
    request->num_draft_tokens = spec.num_draft_tokens;
    request->remote_prefill = spec.remote_prefill;
    request->send_kv = spec.send_kv;
    request->l3_wait_ms = spec.l3_wait_ms < 0 ? config_.l3_wait_ms : spec.l3_wait_ms;
    request->prompt_len = static_cast<std::int32_t>(tokens.size());
    request->max_new_tokens = static_cast<std::int32_t>(spec.max_new_tokens);
    request->tokens = take_buffer(
        tokens.size() + static_cast<std::size_t>(std::min(spec.max_new_tokens, kReservedOutputs)));
    request->tokens.assign(tokens.begin(), tokens.end());
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
    request->num_uncached = count_uncached(*request);
    request->order_key_us = now_ms_ * 1000 + request->priority * config_.ageing_ms * 1000 +
                            request->num_uncached * config_.suffix_us_per_token;
    waiting_.insert(*request);
    if (config_.probe_l3) start_probe(*request);
  }
  arrivals_.clear();
}

// To bring a token from a lower tier costs little beside computing it.
std::int32_t Scheduler::count_uncached(Request& request) const {
  const PrefixMatch match = tree_.find(request.salt, request.tokens);
  const std::int32_t num_uncached = request.len() - match.len();
  if (!tiers_.is_enabled()) return num_uncached;
  const auto num_below =
      static_cast<std::int32_t>(pages_below(request, request.tokens, match).size());
  const std::int32_t reached = match.full_len + num_below * config_.page_size;
  return std::min(num_uncached, request.len() - reached);
}

}  // namespace moorage
