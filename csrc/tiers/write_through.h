// SPDX-License-Identifier: Apache-2.0
// Copies of a path's full pages in L2. Knows the tree and the tiers, no request.
#pragma once

#include "prefix/radix_tree.h"
#include "tiers/lower_tiers.h"

namespace moorage {

class WriteThrough {
 public:
  static constexpr TimeMs kRetryMs = 50;

  WriteThrough(PagePool& l1, RadixTree& tree, LowerTiers& tiers, std::int32_t page_size)
      : l1_(l1), tree_(tree), tiers_(tiers), page_size_(page_size) {}

  // Sends the full pages of a path, from a token on, to L2, and remembers where there was no room.
  // Returns whether all are or will be there.
  bool send(const Node& end, std::int32_t from_tokens);

  // Tries one node again for which L2 had no room; so many pages in one step, so often.
  void retry(TimeMs now_ms);

 private:
  bool send_node(const Node& node, std::int32_t from_tokens);

  PagePool& l1_;
  RadixTree& tree_;
  LowerTiers& tiers_;
  const std::int32_t page_size_;
  NodeId last_retried_;
  TimeMs not_before_ms_ = 0;
};

}  // namespace moorage
