// SPDX-License-Identifier: Apache-2.0
// Reading the tree: paths, what a pin would cost, snapshots, the walk over all invariants.
#include <algorithm>

#include "prefix/radix_tree.h"

namespace moorage {

TreePages RadixTree::pages_on_path(const PrefixMatch& match) const {
  TreePages pages;
  for (const Node* node = match.node; node != nullptr; node = node->parent) {
    const std::int32_t end = std::min(node->end(), match.full_len);
    const std::int32_t num_pages = (end - node->start) / page_size_;
    pages.evictable += node->num_users == 0 ? num_pages : 0;
    pages.leased += node->num_leases > 0 ? num_pages : 0;
    pages.idle_leased += node->num_users == 0 && node->num_leases > 0 ? num_pages : 0;
  }
  return pages;
}

std::int32_t RadixTree::num_evictable_beside(const PrefixMatch& match) const {
  const Node* node = match.partial_node;
  if (node == nullptr || node->num_users > 0) return 0;
  const std::int32_t on_path = node == match.node ? (match.full_len - node->start) / page_size_ : 0;
  return node->pages.size() - on_path;
}

std::vector<RadixTree::NamedPage> RadixTree::full_pages(const PrefixMatch& match) const {
  std::vector<NamedPage> pages(static_cast<std::size_t>(match.full_len / page_size_));
  for (const Node* at = match.node; at != nullptr; at = at->parent) {
    const std::int32_t first = at->start / page_size_;
    for (std::size_t i = 0; i < at->hashes.size(); ++i) {
      const std::size_t index = static_cast<std::size_t>(first) + i;
      if (index >= pages.size()) break;
      pages[index] = {at->pages[static_cast<std::int32_t>(i)], at->hashes[i]};
    }
  }
  return pages;
}

std::vector<PageId> RadixTree::pages_of(const Node& node) const {
  std::vector<PageId> pages(static_cast<std::size_t>((node.end() + page_size_ - 1) / page_size_));
  for (const Node* at = &node; at != nullptr; at = at->parent) {
    std::ranges::copy(at->pages.view(), pages.begin() + at->start / page_size_);
  }
  return pages;
}

std::vector<PageHash> RadixTree::hashes_of(const Node& node) const {
  std::vector<PageHash> hashes(static_cast<std::size_t>(node.end() / page_size_));
  for (const Node* at = &node; at != nullptr; at = at->parent) {
    std::ranges::copy(at->hashes, hashes.begin() + at->start / page_size_);
  }
  return hashes;
}

std::vector<const Node*> RadixTree::snapshot(std::int32_t max_nodes) const {
  std::vector<const Node*> nodes;
  for (const auto& [salt, space] : spaces_) nodes.push_back(space->root.get());
  std::ranges::sort(nodes, {}, [](const Node* node) { return node->id; });
  const auto limit = static_cast<std::size_t>(max_nodes);
  for (std::size_t i = 0; i < nodes.size() && nodes.size() < limit; ++i) {
    for (const auto& child : nodes[i]->children) nodes.push_back(child.get());
  }
  if (nodes.size() > limit) nodes.resize(limit);
  return nodes;
}

std::string RadixTree::check_node(const Node& node, TreePages& counts, std::size_t& leaves) const {
  const std::string name = "node " + std::to_string(node.id.value);
  if (!node.is_root() && node.tokens.empty()) return name + " is empty";
  if (!node.is_leaf() && node.len() % page_size_ != 0) return name + " has children off a page end";
  if (node.pages.size() != (node.len() + page_size_ - 1) / page_size_) return name + " lacks pages";
  if (static_cast<std::int32_t>(node.hashes.size()) != node.len() / page_size_) {
    return name + " has the wrong number of hashes";
  }
  PageHash parent_hash = node.is_root() ? kRootHash : last_hash(*node.parent);
  for (std::size_t i = 0; i < node.hashes.size(); ++i) {
    const TokenSpan page = TokenSpan(node.tokens).subspan(i * page_size_, page_size_);
    if (hash_page(node.space->hash, parent_hash, page) != node.hashes[i]) return name + " misnamed";
    parent_hash = node.hashes[i];
  }
  const bool is_queued = evictable_.contains(const_cast<Node*>(&node));
  if (is_queued != is_evictable_leaf(node)) {
    return name + " is wrongly in or out of the eviction queue";
  }
  leaves += is_queued ? 1 : 0;
  if (node.is_unbacked != unbacked_.contains(node.id)) return name + " is lost to write-through";
  if ((node.hold_until_ms > 0) != held_.contains(node.id) ||
      (node.hold_until_ms > 0) != deadlines_.contains({node.hold_until_ms, node.id})) {
    return name + " has a deadline nobody watches";
  }
  counts.evictable += node.num_users == 0 ? node.pages.size() : 0;
  counts.leased += node.num_leases > 0 ? node.pages.size() : 0;
  counts.idle_leased += node.num_users == 0 && node.num_leases > 0 ? node.pages.size() : 0;
  for (const Lease* lease : node.leases) {
    if (lease->node != &node || lease->num_tokens != node.end()) return name + " has a stray lease";
  }
  std::int32_t users_below = 0;
  auto leases_below = static_cast<std::int32_t>(node.leases.size());
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    const Node& child = *node.children[i];
    users_below += child.num_users;
    leases_below += child.num_leases;
    if (child.parent != &node || child.start != node.end()) return name + " has a stray child";
    if (i > 0 && compare_tokens(first_page(*node.children[i - 1]), first_page(child)) >= 0) {
      return name + " has children out of order";
    }
    std::string broken = check_node(child, counts, leaves);
    if (!broken.empty()) return broken;
  }
  if (leases_below != node.num_leases) return name + " counts other leases than there are";
  return users_below > node.num_users ? name + " counts fewer users than its children" : "";
}

std::string RadixTree::find_broken_invariant() const {
  TreePages counts;
  std::size_t leaves = 0;
  for (const auto& [salt, space] : spaces_) {
    std::string broken = check_node(*space->root, counts, leaves);
    if (!broken.empty()) return broken;
  }
  if (leaves != evictable_.size()) return "the eviction queue holds a node outside the tree";
  if (counts.evictable != counts_.evictable || counts.leased != counts_.leased ||
      counts.idle_leased != counts_.idle_leased) {
    return "a count of tree pages is off";
  }
  return "";
}

}  // namespace moorage
