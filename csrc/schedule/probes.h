// SPDX-License-Identifier: Apache-2.0
// What the scheduler asks of the store, and what it knows of speeds. Knows no request.
#pragma once

#include <vector>

#include "tiers/lower_tiers.h"

namespace moorage {

// Pages that may lie in L3 though nobody said so: told in one plan, answered by ProbeDone.
struct Probe {
  std::vector<PageName> pages;
  bool is_told = false;
};

// Measured by the caller; 0: not known. Inputs, so that a replay decides the same.
struct Costs {
  std::int64_t l2_ns_per_page = 0;        // L2 -> L1
  std::int64_t l3_ns_per_page = 0;        // L3 -> L2
  std::int64_t prefill_ns_per_token = 0;  // at the start of a context
};

}  // namespace moorage
