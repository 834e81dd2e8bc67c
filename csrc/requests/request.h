// SPDX-License-Identifier: Apache-2.0
// One request: what was asked, what is known of its tokens, and its state.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/token_span.h"
#include "requests/states.h"

namespace moorage {

struct Tenant;

// Tokens somebody else keeps for as long as this is there: a long prompt is not copied twice.
class SharedTokens {
 public:
  SharedTokens(std::vector<TokenId> tokens) {  // NOLINT: as good as the vector itself
    const auto own = std::make_shared<const std::vector<TokenId>>(std::move(tokens));
    view_ = *own;
    owner_ = own;
  }
  SharedTokens(TokenSpan view, std::shared_ptr<const void> owner)
      : view_(view), owner_(std::move(owner)) {}

  TokenSpan view() const { return view_; }

 private:
  TokenSpan view_;
  std::shared_ptr<const void> owner_;
};

struct RequestSpec {
  RequestId request_id;
  SharedTokens token_ids;  // read by submit
  std::int64_t max_new_tokens = 0;
  std::int64_t priority = 0;  // lower runs first
  std::string tenant;
  std::string salt;
  std::int32_t return_permille = kDefaultReturnPermille;  // chance that its end is continued
  std::int32_t num_draft_tokens = 0;                      // speculated with each decode row
  bool remote_prefill = false;                            // another engine computes the prompt
  std::int64_t l3_wait_ms = -1;  // how long it waits for what L3 may hold; -1: as configured
  bool send_kv = false;          // another engine goes on: keep the KV until it has it
};

// Names of the first full pages of a token sequence, as far as anybody asked.
struct PageNames {
  PageHash space{};
  std::vector<PageHash> pages;
};

// Transfers a request may start before it computes what is still missing: progress, whatever fails.
inline constexpr std::int32_t kMaxLoads = 3;

// Token positions of a request, all in one sequence of prompt and output:
//   [0, num_computed)             KV written by steps whose results are in
//   [num_computed, num_planned)   KV being written by steps in flight, or first by its load
//   [num_planned, tokens.size())  known, to be prefilled (or the one token to decode from)
struct Request {
  RequestId id;
  std::int64_t sequence = 0;  // order of arrival
  std::int64_t order_key_us = 0;  // who goes first: smaller first, then `sequence`
  std::int64_t priority = 0;
  std::int32_t num_uncached = 0;  // tokens that no tier had when it came
  std::string tenant_name;
  Tenant* tenant = nullptr;  // set while the request belongs to a WaitQueue
  std::string salt;
  std::vector<TokenId> tokens;
  std::int32_t prompt_len = 0;
  std::int32_t max_new_tokens = 0;

  std::int32_t num_computed = 0;
  std::int32_t num_planned = 0;
  std::int32_t num_trusted = 0;       // KV found in the tree at admission: sound even after a NaN
  std::int32_t prefill_end = 0;       // the prompt, and after a retraction the output so far
  std::int32_t num_steps_in_flight = 0;
  std::int32_t num_samples_in_flight = 0;
  bool was_retracted = false;
  std::int32_t num_retractions = 0;   // each makes it dearer as a victim
  std::int32_t num_preemptions = 0;   // of those, how often a better class took its place
  std::int32_t return_permille = kDefaultReturnPermille;
  std::int32_t num_draft_tokens = 0;
  bool has_drafts_in_flight = false;

  RequestId leader;                   // computes the prefix this request waits for
  std::int32_t leader_len = 0;        // wait until that much of it is published

  PageNames names;                    // kept, so that a request that waits is never hashed again
  std::int64_t waits_for = -1;        // the transfer that brings some of its prefix
  std::int32_t loads_left = kMaxLoads;
  std::int32_t loaded_from = 0;       // tokens [loaded_from, + num_loaded) came from L2,
  std::int32_t num_loaded = 0;
  std::int32_t num_fetched = 0;       // and these many of them from L3
  std::int64_t load = -1;             // transfer that fills pages of its tail; counts as a step in
                                      // flight: it writes to them, whatever becomes of the request

  bool remote_prefill = false;  // until it was tried once
  bool awaits_remote = false;   // counts as a step in flight: the other engine may still write
  bool send_kv = false;
  bool awaits_send = false;     // counts as a step in flight: the other engine may still read

  std::int64_t l3_wait_ms = 0;
  std::int64_t probe_id = -1;   // what it asked of L3
  TimeMs probe_until_ms = 0;    // it waits for that answer no longer
  TimeMs fetch_until_ms = 0;    // nor for pages: computing would take no longer; 0: no limit

  State state = Waiting{};

  std::int32_t len() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t num_outputs() const { return len() - prompt_len; }
  bool runs_before(const Request& other) const {
    if (order_key_us != other.order_key_us) return order_key_us < other.order_key_us;
    return sequence < other.sequence;
  }

  // The memory it holds; null where its state holds none.
  Holdings* holdings() {
    return std::visit(
        [](auto& state) -> Holdings* {
          if constexpr (requires { state.kv; }) return &state.kv;
          return nullptr;
        },
        state);
  }
  const Holdings* holdings() const { return const_cast<Request*>(this)->holdings(); }
  template <class S>
  bool is() const {
    return std::holds_alternative<S>(state);
  }
};

}  // namespace moorage
