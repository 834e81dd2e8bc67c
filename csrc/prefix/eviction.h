// SPDX-License-Identifier: Apache-2.0
// The order in which unreferenced leaves give up their pages. Total and deterministic; never a
// pointer, never a clock read here.
//
// By value: a node is worth (chance that somebody comes back) x (cost to recompute a page of it,
// which grows with its depth, as attention does) above the pressure at its last use. Pressure is
// the value of the last page evicted, so whatever is not used again ages as others come and go.
// What stands on probation (reuse.h) goes before all that does not, in the same order.
// Source: Cao and Irani, Cost-Aware WWW Proxy Caching Algorithms (GreedyDual-Size), 1997. Sizes
// are equal here, so cost per byte is cost per page.
#pragma once

#include <algorithm>
#include <set>

#include "prefix/node.h"

namespace moorage {

// What is leased goes last; then the least value, the least recent use, the oldest node.
struct EvictedEarlier {
  bool operator()(const Node* a, const Node* b) const {
    const bool a_leased = a->num_leases > 0, b_leased = b->num_leases > 0;
    if (a_leased != b_leased) return b_leased;
    if (a->keep_value != b->keep_value) return a->keep_value < b->keep_value;
    if (a->last_used_ms != b->last_used_ms) return a->last_used_ms < b->last_used_ms;
    return a->id < b->id;
  }
};

// Invariant: a node's key does not change while it is in the queue.
using EvictionQueue = std::set<Node*, EvictedEarlier>;

enum class EvictionPolicy : std::uint8_t { kValue, kLru };

class EvictionValue {
 public:
  EvictionValue(EvictionPolicy policy, std::int32_t attention_len)
      : policy_(policy), attention_len_(attention_len) {}

  // Of a page that ends a prefix of `end` tokens. While somebody asked to have it kept it is worth
  // more than without. Under LRU every value is 0, which leaves recency to decide.
  std::int64_t of(std::int32_t end, std::int32_t return_permille, bool is_held) const {
    if (policy_ == EvictionPolicy::kLru) return 0;
    return pressure_ + cost(end) * (return_permille + (is_held ? kHeldPermille : 0)) / 1000;
  }
  std::int64_t of(const Node& node) const {
    const std::int64_t value = of(node.end(), node.return_permille, node.hold_until_ms > 0);
    return node.is_on_probation && !node.is_awaited ? on_probation(value) : value;
  }
  // Below every other value, and below 0; pressure is not felt there.
  std::int64_t on_probation(std::int64_t value) const { return value - pressure_ - kFarBelow; }
  void evicted(std::int64_t keep_value) { pressure_ = std::max(pressure_, keep_value); }

  // Of recomputing a page at that depth.
  std::int64_t cost(std::int64_t depth) const { return kUnit + kUnit * depth / attention_len_; }

 private:
  static constexpr std::int64_t kUnit = 1'000'000;  // cost of a page at the start of a context
  static constexpr std::int64_t kHeldPermille = 1000;
  static constexpr std::int64_t kFarBelow = std::int64_t{1} << 60;

  const EvictionPolicy policy_;
  const std::int64_t attention_len_;  // context at which a page costs twice as much
  std::int64_t pressure_ = 0;
};

}  // namespace moorage
