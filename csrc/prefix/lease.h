// SPDX-License-Identifier: Apache-2.0
// A promise to evict a prefix last, until a deadline. Who may have one is decided in leases.h.
#pragma once

#include <string>

#include "core/ids.h"

namespace moorage {

struct Node;

struct Lease {
  std::int64_t id = -1;
  std::string tenant;
  TimeMs until_ms = 0;
  Node* node = nullptr;  // where the leased prefix ends; null once all of it was evicted
  std::int32_t num_tokens = 0;
  bool was_cut = false;  // by eviction, and not yet reported
};

}  // namespace moorage
