// SPDX-License-Identifier: Apache-2.0
// A promise to evict a prefix last, until a deadline. Who may have one is decided in leases.h.
#pragma once

#include <string>
#include <vector>

#include "core/ids.h"
#include "events/kv_events.h"

namespace moorage {

struct Node;

struct Lease {
  std::int64_t id = -1;
  std::string tenant;
  TimeMs until_ms = 0;
  Tier tier = Tier::kL1;
  Node* node = nullptr;         // l1: where the prefix ends; null once all of it was evicted
  std::vector<PageHash> names;  // of its full pages; l2 and l3: the pages it covers
  std::int32_t num_tokens = 0;
  bool was_cut = false;  // l1: by eviction, and not yet reported
};

}  // namespace moorage
