// SPDX-License-Identifier: Apache-2.0
// One node of the radix tree and the move-only reference that keeps it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "pages/owned_pages.h"
#include "prefix/page_hash.h"

namespace moorage {

inline constexpr std::int32_t kDefaultReturnPermille = 500;

// A namespace: prefixes are shared only within one (model fingerprint, salt).
struct PrefixSpace {
  std::string salt;
  PageHash hash;
};

struct Lease;

// Token ranges of a node, [start, end): every page but the last of a leaf is full.
struct Node {
  Node(NodeId node_id, PagePool& pool) : id(node_id), pages(pool, PageOwner::kTree) {}

  NodeId id;
  Node* parent = nullptr;              // null: the root of a namespace, which holds no tokens
  const PrefixSpace* space = nullptr;  // lives as long as the root
  std::int32_t start = 0;              // tokens before this node
  std::vector<TokenId> tokens;
  OwnedPages pages;
  std::vector<PageHash> hashes;                 // one per full page
  std::vector<std::unique_ptr<Node>> children;  // in order of their first page's tokens
  std::int32_t num_users = 0;                   // references to this node or below it
  std::vector<Lease*> leases;    // that end where this node ends
  std::int32_t num_leases = 0;   // of this node and below
  TimeMs last_used_ms = 0;
  std::int32_t return_permille = kDefaultReturnPermille;  // chance that somebody comes back to it
  std::int64_t keep_value = 0;   // what eviction.h orders by; set when the last user leaves
  TimeMs hold_until_ms = 0;      // its owner would like it here until then; 0: no such wish
  bool is_unbacked = false;      // L2 had no room for some of its pages
  std::int64_t used_at = 0;      // in pages used since the start, as reuse.h counts time
  bool is_on_probation = false;  // was lost before, and goes before what was not
  bool is_awaited = false;       // brought from below for somebody who has not used it yet

  bool is_root() const { return parent == nullptr; }
  bool is_leaf() const { return children.empty(); }
  std::int32_t len() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t end() const { return start + len(); }
};

class RadixTree;

// Keeps the whole path from the root to a node's end. Lifetime: the tree outlives its references.
class NodeRef {
 public:
  NodeRef(NodeRef&& other) noexcept
      : tree_(other.tree_), node_(std::exchange(other.node_, nullptr)) {}
  NodeRef& operator=(NodeRef&& other) noexcept {
    std::swap(tree_, other.tree_);
    std::swap(node_, other.node_);
    return *this;
  }
  NodeRef(const NodeRef&) = delete;
  NodeRef& operator=(const NodeRef&) = delete;
  ~NodeRef();

  NodeRef share() const;  // a second reference to the same prefix
  const Node& node() const { return *node_; }

 private:
  friend class RadixTree;
  NodeRef(RadixTree& tree, Node& node) : tree_(&tree), node_(&node) {}

  RadixTree* tree_;
  Node* node_;
};

}  // namespace moorage
