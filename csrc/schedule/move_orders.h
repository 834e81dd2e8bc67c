// SPDX-License-Identifier: Apache-2.0
// A standing order to bring a prefix to a tier: it goes on from step to step until all of the prefix
// is there, or nothing of it has moved for a while. Knows no request.
#pragma once

#include <string>
#include <vector>

#include "requests/request.h"

namespace moorage {

enum class MoveTarget : std::uint8_t { kL1, kL2, kL3, kNone };

// Where the full pages of the prefix stand. there + pending + missing == all of them.
struct MoveResult {
  std::int32_t tokens_there = 0;    // in the target tier
  std::int32_t tokens_pending = 0;  // on their way, or waiting for room there
  std::int32_t tokens_missing = 0;  // in no tier they could come from
  std::int32_t num_pages = 0;       // this call set moving (l1), or freed above the target
};

struct MoveOrder {
  static constexpr std::size_t kMaxOrders = 256;  // the oldest gives way
  static constexpr std::int32_t kMaxStalls = 20;
  static constexpr TimeMs kAskAgainMs = 1000;  // the store, by another order for the same prefix
  static constexpr TimeMs kRetryMs = 50;  // where nothing of it moves, or what moves is lost

  MoveTarget target = MoveTarget::kNone;
  std::string salt;
  std::vector<TokenId> tokens;
  PageNames names;               // of all full pages
  std::int64_t waits_for = -1;   // ticket: it is looked at again when that and all before are over
  bool has_asked = false;        // the store, for what nobody knows of
  std::int64_t probe_id = -1;    // and under which number; its answer may be out
  TimeMs not_before_ms = 0;
  std::int32_t best = -1;        // most tokens that were there
  std::int32_t num_stalls = 0;   // rounds without a better one
  std::int64_t num_lost = 0;     // transfers of anybody that were lost till the last round
  MoveResult last;
};

}  // namespace moorage
