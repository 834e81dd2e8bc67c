// SPDX-License-Identifier: Apache-2.0
// Giving pages back, and what decides who gives them first: hints and leases.
#include <algorithm>

#include "prefix/radix_tree.h"

namespace moorage {

// A partly filled page whose tokens begin a newer page is of no more use.
void RadixTree::drop_covered_partial(Node& parent, TokenSpan tokens) {
  const std::size_t at = child_position(parent, tokens);
  if (at == 0) return;
  Node& before = *parent.children[at - 1];
  if (before.len() >= static_cast<std::int32_t>(tokens.size()) || before.num_users > 0 ||
      before.num_leases > 0 ||
      compare_tokens(before.tokens, tokens.first(before.tokens.size())) != 0) {
    return;
  }
  cut_pages(before, 0);
  remove_leaf(before);
}

void RadixTree::cut_pages(Node& node, std::int32_t num_pages, bool is_evicted) {
  const Edit edit(*this, node);
  while (static_cast<std::int32_t>(node.hashes.size()) > num_pages) {
    const PageHash hash = node.hashes.back();
    node.hashes.pop_back();
    if (is_evicted) reuse_.lose(hash, node.used_at);
    const bool has_moved = lower_ != nullptr && lower_->is_in_l2(hash);
    log_.add({has_moved ? KvEventKind::kMoved : KvEventKind::kRemoved,
              has_moved ? Tier::kL2 : Tier::kL1, hash, last_hash(node), page_size_});
  }
  node.tokens.resize(std::min<std::size_t>(node.tokens.size(),
                                           static_cast<std::size_t>(num_pages) * page_size_));
  node.pages.free_back(node.pages.size() - num_pages);
  for (Lease* lease : node.leases) {
    lease->num_tokens = node.end();
    lease->was_cut = true;
  }
}

Node* RadixTree::remove_leaf(Node& node) {
  Node* parent = node.parent;
  if (!node.leases.empty()) move_leases(node, *parent);
  const Edit edit(*this, *parent);
  const auto at = std::ranges::find_if(
      parent->children, [&node](const auto& child) { return child.get() == &node; });
  forget(node);
  parent->children.erase(at);
  --num_nodes_;
  return parent;
}

// A lease that lost its end keeps what is left before it.
void RadixTree::move_leases(Node& from, Node& to) {
  for (Lease* lease : from.leases) {
    lease->node = to.is_root() ? nullptr : &to;
    lease->num_tokens = to.end();
    lease->was_cut = true;
  }
  if (to.is_root()) {
    const Edit edit(*this, to);
    to.num_leases -= static_cast<std::int32_t>(from.leases.size());
  } else {
    to.leases.insert(to.leases.end(), from.leases.begin(), from.leases.end());
  }
}

void RadixTree::drop_root_if_unused(Node& root) {
  if (!root.is_root() || !root.is_leaf() || root.num_users > 0) return;
  const std::string salt = root.space->salt;
  spaces_.erase(salt);
}

std::int32_t RadixTree::evict(std::int32_t num_pages) {
  std::int32_t freed = 0;
  while (freed < num_pages && !evictable_.empty()) {
    Node& leaf = **evictable_.begin();
    const std::int32_t cut = std::min(num_pages - freed, leaf.pages.size());
    if (leaf.num_leases == 0) value_.evicted(leaf.keep_value);
    cut_pages(leaf, leaf.pages.size() - cut, uses_value_);
    freed += cut;
    if (leaf.pages.is_empty()) drop_root_if_unused(*remove_leaf(leaf));
  }
  num_evicted_pages_ += freed;
  return freed;
}

std::int32_t RadixTree::drop(const std::string& salt, TokenSpan tokens, std::int32_t keep_tokens) {
  const PrefixMatch match = find(salt, tokens);
  Node* node = match.partial_node != nullptr ? match.partial_node : match.node;
  if (node == nullptr || node->end() != match.len()) return 0;  // a longer prefix shares the end
  std::int32_t freed = 0;
  while (is_evictable_leaf(*node) && node->num_leases == 0) {
    const std::int32_t kept_tokens = std::clamp(keep_tokens - node->start, 0, node->len());
    const std::int32_t kept = (kept_tokens + page_size_ - 1) / page_size_;
    freed += node->pages.size() - kept;
    cut_pages(*node, kept);
    if (kept > 0) return freed;
    node = remove_leaf(*node);
  }
  drop_root_if_unused(*node);
  return freed;
}

std::int32_t RadixTree::drop_unwanted(Node& leaf) {
  Node* node = &leaf;
  std::int32_t freed = 0;
  while (is_evictable_leaf(*node) && node->num_leases == 0 && node->return_permille == 0) {
    freed += node->pages.size();
    cut_pages(*node, 0);
    node = remove_leaf(*node);
  }
  drop_root_if_unused(*node);
  return freed;
}

// ---- hints -------------------------------------------------------------------------------------

std::int32_t RadixTree::hint(const std::string& salt, TokenSpan tokens,
                             std::int32_t return_permille, TimeMs hold_until_ms) {
  const PrefixMatch match = find(salt, tokens);
  Node* node = match.partial_node != nullptr ? match.partial_node : match.node;
  if (node == nullptr || node->end() != match.len()) return 0;  // a longer prefix shares the end
  hint_upwards(node, return_permille, hold_until_ms);
  return match.len();
}

void RadixTree::hint(const NodeRef& ref, std::int32_t return_permille) {
  hint_upwards(ref.node_, return_permille, 0);
}

// Up to the first fork: what lies above it others may come back to.
void RadixTree::hint_upwards(Node* node, std::int32_t return_permille, TimeMs hold_until_ms) {
  while (!node->is_root() && node->children.size() <= 1) {
    const Edit edit(*this, *node);
    node->return_permille = return_permille;
    node->hold_until_ms = hold_until_ms;
    if (node->num_users == 0) node->keep_value = value_.of(*node);
    node = node->parent;
  }
}

std::vector<Node*> RadixTree::end_holds() {
  std::vector<Node*> leaves;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now_ms_) {
    Node& node = *held_.at(deadlines_.begin()->second);
    const Edit edit(*this, node);
    node.hold_until_ms = 0;
    node.return_permille = 0;
    if (node.num_users == 0) node.keep_value = value_.of(node);
    if (is_evictable_leaf(node)) leaves.push_back(&node);
  }
  return leaves;
}

// ---- copies below ------------------------------------------------------------------------------

void RadixTree::mark_unbacked(const Node& node, bool is_unbacked) {
  if (node.is_unbacked == is_unbacked) return;
  Node& own = const_cast<Node&>(node);  // every node is the tree's
  const Edit edit(*this, own);
  own.is_unbacked = is_unbacked;
}

const Node* RadixTree::next_unbacked(NodeId after) const {
  if (unbacked_.empty()) return nullptr;
  const auto next = unbacked_.upper_bound(after);
  return next == unbacked_.end() ? unbacked_.begin()->second : next->second;
}

// ---- leases ------------------------------------------------------------------------------------

// A lease ends where a node ends or can be split: at a page boundary, or at a leaf's own end.
Node* RadixTree::leasable_node(const PrefixMatch& match) const {
  const Node* node = match.partial_node;
  const bool is_own_end =
      node != nullptr && node->len() == match.partial_index * page_size_ + match.partial_len;
  return is_own_end ? match.partial_node : nullptr;
}

RadixTree::Leasable RadixTree::leasable(const std::string& salt, TokenSpan tokens) const {
  const PrefixMatch match = find(salt, tokens);
  Leasable result;
  const Node* node = leasable_node(match);
  result.num_tokens = node != nullptr ? match.len() : match.full_len;
  result.num_pages = (result.num_tokens + page_size_ - 1) / page_size_;
  if (node == nullptr) node = match.node;
  for (; node != nullptr && !node->is_root(); node = node->parent) {
    if (node->num_leases > 0) continue;
    const std::int32_t end = std::min(node->end(), result.num_tokens);
    result.num_new_pages += (end - node->start + page_size_ - 1) / page_size_;
  }
  return result;
}

void RadixTree::attach(Lease& lease, const std::string& salt, TokenSpan tokens) {
  PrefixMatch match = find(salt, tokens);
  Node* node = leasable_node(match);
  if (node == nullptr) {
    node = match.node;
    if (match.full_len < node->end()) node = &split(*node, match.full_len - node->start);
  }
  lease.node = node;
  lease.num_tokens = node->end();
  node->leases.push_back(&lease);
  for (Node* at = node; at != nullptr; at = at->parent) {
    const Edit edit(*this, *at);
    at->num_leases += 1;
  }
}

void RadixTree::detach(Lease& lease) {
  if (lease.node == nullptr) return;
  std::erase(lease.node->leases, &lease);
  for (Node* at = std::exchange(lease.node, nullptr); at != nullptr; at = at->parent) {
    const Edit edit(*this, *at);
    at->num_leases -= 1;
  }
}

}  // namespace moorage
