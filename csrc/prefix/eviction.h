// SPDX-License-Identifier: Apache-2.0
// The order in which unreferenced leaves give up their pages. Total and deterministic: least
// recently used first, then construction order; never a pointer, never a clock read here.
#pragma once

#include <set>

#include "prefix/node.h"

namespace moorage {

struct EvictedEarlier {
  bool operator()(const Node* a, const Node* b) const {
    if (a->last_used_ms != b->last_used_ms) return a->last_used_ms < b->last_used_ms;
    return a->id < b->id;
  }
};

// Invariant: a node's key does not change while it is in the queue.
using EvictionQueue = std::set<Node*, EvictedEarlier>;

}  // namespace moorage
