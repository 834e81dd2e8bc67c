// SPDX-License-Identifier: Apache-2.0
#include "tiers/write_through.h"

#include <algorithm>

namespace moorage {

bool WriteThrough::send_node(const Node& node, std::int32_t from_tokens) {
  const std::int32_t skipped = std::max(0, from_tokens - node.start) / page_size_;
  for (auto i = static_cast<std::size_t>(skipped); i < node.hashes.size(); ++i) {
    const Node& parent = *node.parent;
    const PageHash& before =
        i > 0 ? node.hashes[i - 1] : parent.is_root() ? kRootHash : parent.hashes.back();
    const PageName name{node.hashes[i], before,
                        node.start + static_cast<std::int32_t>(i + 1) * page_size_};
    if (!tiers_.write_back(l1_, node.pages[static_cast<std::int32_t>(i)], name)) return false;
  }
  return true;
}

bool WriteThrough::send(const Node& end, std::int32_t from_tokens) {
  if (!tiers_.is_enabled()) return false;
  bool is_whole = true;
  std::vector<const Node*> path;
  for (const Node* at = &end; !at->is_root() && at->end() > from_tokens; at = at->parent) {
    path.push_back(at);
  }
  std::ranges::reverse(path);  // parents first
  for (const Node* node : path) {
    if (is_whole && send_node(*node, from_tokens)) continue;
    is_whole = false;
    tree_.mark_unbacked(*node, true);
  }
  return is_whole;
}

void WriteThrough::retry(TimeMs now_ms) {
  if (now_ms < not_before_ms_ || !tiers_.may_take_page()) return;
  const Node* node = tree_.next_unbacked(last_retried_);
  if (node == nullptr) return;
  last_retried_ = node->id;
  // What is longer than L2 would put others out for ever, and never be whole.
  const bool never_fits = node->end() / page_size_ > tiers_.pool().num_pages();
  if (send_node(*node, 0) || never_fits) return tree_.mark_unbacked(*node, false);
  not_before_ms_ = now_ms + kRetryMs;
}

}  // namespace moorage
