// SPDX-License-Identifier: Apache-2.0
#include "prefix/radix_tree.h"

#include <algorithm>

namespace moorage {

NodeRef::~NodeRef() {
  if (node_ != nullptr) tree_->release(*node_);
}

NodeRef NodeRef::share() const {
  tree_->acquire(*node_);
  return NodeRef(*tree_, *node_);
}

RadixTree::RadixTree(PagePool& pool, std::int32_t page_size, std::string model_fingerprint,
                     KvEventLog& log)
    : pool_(pool),
      page_size_(page_size),
      model_fingerprint_(std::move(model_fingerprint)),
      log_(log) {}

RadixTree::~RadixTree() {
  for (const auto& [salt, space] : spaces_) {
    MOORAGE_CHECK(space->root->num_users == 0, "a prefix reference outlived the tree");
  }
}

// ---- references ---------------------------------------------------------------------------

void RadixTree::add_user(Node& node) {
  if (node.num_users++ == 0) {
    if (node.is_leaf() && !node.is_root()) evictable_.erase(&node);
    num_evictable_pages_ -= node.pages.size();
  }
  node.last_used_ms = now_ms_;
}

void RadixTree::acquire(Node& node) {
  for (Node* at = &node; at != nullptr; at = at->parent) add_user(*at);
}

void RadixTree::release(Node& node) {
  Node* root = &node;
  for (Node* at = &node; at != nullptr; at = at->parent) {
    MOORAGE_CHECK(at->num_users > 0, "a prefix was released twice");
    at->last_used_ms = now_ms_;
    if (--at->num_users == 0) {
      num_evictable_pages_ += at->pages.size();
      if (at->is_leaf() && !at->is_root()) evictable_.insert(at);
    }
    root = at;
  }
  merge_upwards(&node);
  drop_root_if_unused(*root);
}

void RadixTree::move_down(NodeRef& ref, Node& child) {
  add_user(child);
  ref.node_ = &child;
}

// Splits leave chains of nodes behind; where nothing tells parent and child apart, join them.
void RadixTree::merge_upwards(Node* node) {
  while (!node->is_root() && node->num_users == 0) {
    Node* parent = node->parent;
    if (node->children.size() == 1 && node->children[0]->num_users == 0 &&
        node->children[0]->last_used_ms == node->last_used_ms) {
      merge_only_child(*node);
    }
    node = parent;
  }
}

void RadixTree::merge_only_child(Node& node) {
  const std::unique_ptr<Node> child = std::move(node.children[0]);
  node.children = std::move(child->children);
  for (const auto& grandchild : node.children) grandchild->parent = &node;
  node.tokens.insert(node.tokens.end(), child->tokens.begin(), child->tokens.end());
  node.hashes.insert(node.hashes.end(), child->hashes.begin(), child->hashes.end());
  node.pages.append(std::move(child->pages));
  --num_nodes_;
  if (node.is_leaf()) {
    evictable_.erase(child.get());
    evictable_.insert(&node);
  }
}

// ---- matching -----------------------------------------------------------------------------

TokenSpan RadixTree::first_page(const Node& node) const {
  return TokenSpan(node.tokens).first(std::min<std::size_t>(node.tokens.size(), page_size_));
}

std::size_t RadixTree::child_position(const Node& parent, TokenSpan page) const {
  const auto at = std::lower_bound(
      parent.children.begin(), parent.children.end(), page,
      [this](const auto& child, TokenSpan key) { return compare_tokens(first_page(*child), key) < 0; });
  return static_cast<std::size_t>(at - parent.children.begin());
}

Node* RadixTree::full_child(const Node& parent, TokenSpan tokens) const {
  if (tokens.size() < static_cast<std::size_t>(page_size_) || parent.is_leaf()) return nullptr;
  const TokenSpan page = tokens.first(page_size_);
  const std::size_t at = child_position(parent, page);
  if (at == parent.children.size()) return nullptr;
  Node* child = parent.children[at].get();
  return compare_tokens(first_page(*child), page) == 0 ? child : nullptr;
}

// In a sorted list the longest common prefix with a key is held by one of its two neighbours.
void RadixTree::find_partial(const Node& parent, TokenSpan rest, PrefixMatch& match) const {
  if (parent.is_leaf() || rest.empty()) return;
  const TokenSpan key = rest.first(std::min<std::size_t>(rest.size(), page_size_));
  const std::size_t at = child_position(parent, key);
  for (const std::size_t index : {at - 1, at}) {
    if (index >= parent.children.size()) continue;  // at - 1 wraps where at is 0
    Node* child = parent.children[index].get();
    const std::int32_t shared = common_prefix_len(first_page(*child), key);
    if (shared <= match.partial_len) continue;
    match.partial_node = child;
    match.partial_index = 0;
    match.partial_len = shared;
  }
}

PrefixMatch RadixTree::find(const std::string& salt, TokenSpan tokens) const {
  PrefixMatch match;
  const auto space = spaces_.find(salt);
  if (space == spaces_.end()) return match;
  match.node = space->second->root.get();
  while (true) {
    const TokenSpan rest = tokens.subspan(match.full_len);
    Node* child = full_child(*match.node, rest);
    if (child == nullptr) {
      find_partial(*match.node, rest, match);
      return match;
    }
    const std::int32_t shared = common_prefix_len(child->tokens, rest);
    match.node = child;
    match.full_len += shared - shared % page_size_;
    if (shared < child->len() || shared % page_size_ != 0) {
      match.partial_len = shared % page_size_;
      match.partial_index = shared / page_size_;
      match.partial_node = match.partial_len > 0 ? child : nullptr;
      return match;
    }
  }
}

// ---- growing ------------------------------------------------------------------------------

Node& RadixTree::make_root(const std::string& salt) {
  auto& space = spaces_[salt];
  if (space == nullptr) {
    space = std::make_unique<Space>();
    space->names = PrefixSpace{salt, hash_namespace(model_fingerprint_, salt)};
    space->root = std::make_unique<Node>(NodeId{next_node_id_++}, pool_);
    space->root->space = &space->names;
  }
  return *space->root;
}

NodeRef RadixTree::pin(const std::string& salt, PrefixMatch& match) {
  if (match.node == nullptr) match.node = &make_root(salt);
  Node* node = match.node;
  if (match.full_len < node->end()) {
    const std::int32_t front = match.full_len - node->start;
    if (match.partial_node == node) match.partial_index -= front / page_size_;
    match.node = &split(*node, front);
  }
  acquire(*match.node);
  return NodeRef(*this, *match.node);
}

NodeRef RadixTree::pin_partial(const PrefixMatch& match) {
  acquire(*match.partial_node);
  return NodeRef(*this, *match.partial_node);
}

bool RadixTree::can_take_partial(const PrefixMatch& match) const {
  const Node* node = match.partial_node;
  return node != nullptr && node->num_users == 0 &&
         node->len() == match.partial_index * page_size_ + match.partial_len;
}

OwnedPages RadixTree::take_partial(const PrefixMatch& match) {
  Node& node = *match.partial_node;
  OwnedPages page = node.pages.split_back(1);
  node.tokens.resize(node.tokens.size() - match.partial_len);
  --num_evictable_pages_;
  if (node.tokens.empty()) remove_leaf(node);
  return page;
}

// The new node takes the front, so that references to `node` still mean all of its path.
Node& RadixTree::split(Node& node, std::int32_t num_tokens) {
  const std::int32_t num_pages = num_tokens / page_size_;
  const std::size_t at = child_position(*node.parent, first_page(node));
  auto front = std::make_unique<Node>(NodeId{next_node_id_++}, pool_);
  ++num_nodes_;
  OwnedPages back_pages = node.pages.split_back(node.pages.size() - num_pages);
  std::vector<TokenId> back_tokens(node.tokens.begin() + num_tokens, node.tokens.end());
  std::vector<PageHash> back_hashes(node.hashes.begin() + num_pages, node.hashes.end());
  front->parent = node.parent;
  front->space = node.space;
  front->start = node.start;
  front->num_users = node.num_users;
  front->last_used_ms = node.last_used_ms;
  front->tokens = std::move(node.tokens);
  front->tokens.resize(static_cast<std::size_t>(num_tokens));
  front->hashes = std::move(node.hashes);
  front->hashes.resize(static_cast<std::size_t>(num_pages));
  front->pages = std::move(node.pages);
  node.pages = std::move(back_pages);
  node.tokens = std::move(back_tokens);
  node.hashes = std::move(back_hashes);
  node.start += num_tokens;

  Node& result = *front;
  std::unique_ptr<Node>& link = result.parent->children[at];
  front->children.push_back(std::move(link));
  link = std::move(front);
  node.parent = &result;
  return result;
}

// The caller's reference moves from `parent` to the new node.
Node& RadixTree::add_child(Node& parent, std::size_t at) {
  auto child = std::make_unique<Node>(NodeId{next_node_id_++}, pool_);
  ++num_nodes_;
  child->parent = &parent;
  child->space = parent.space;
  child->start = parent.end();
  child->last_used_ms = now_ms_;
  child->num_users = 1;
  Node& result = *child;
  parent.children.insert(parent.children.begin() + static_cast<std::ptrdiff_t>(at),
                         std::move(child));
  return result;
}

void RadixTree::append_pages(Node& node, TokenSpan tokens, OwnedPages pages) {
  const std::size_t num_full = tokens.size() / page_size_;
  PageHash parent = kRootHash;
  if (!node.hashes.empty()) {
    parent = node.hashes.back();
  } else if (!node.parent->is_root()) {
    parent = node.parent->hashes.back();
  }
  for (std::size_t i = 0; i < num_full; ++i) {
    const PageHash hash =
        hash_page(node.space->hash, parent, tokens.subspan(i * page_size_, page_size_));
    node.hashes.push_back(hash);
    log_.add({KvEventKind::kStored, Tier::kL1, hash, parent, page_size_});
    parent = hash;
  }
  node.tokens.insert(node.tokens.end(), tokens.begin(), tokens.end());
  node.pages.append(std::move(pages));
}

OwnedPages RadixTree::publish(NodeRef& ref, TokenSpan tokens, OwnedPages pages,
                              std::vector<Adopted>& adopted) {
  OwnedPages duplicates(pool_, pages.owner());
  while (!tokens.empty()) {
    Node* node = ref.node_;
    if (Node* child = full_child(*node, tokens)) {
      const std::int32_t shared = common_prefix_len(child->tokens, tokens) / page_size_ * page_size_;
      if (shared < child->len()) child = &split(*child, shared);
      const std::int32_t num_pages = shared / page_size_;
      for (std::int32_t i = 0; i < num_pages; ++i) {
        adopted.push_back({child->start / page_size_ + i, child->pages[i]});
      }
      duplicates.append(pages.split_front(num_pages));
      move_down(ref, *child);
      tokens = tokens.subspan(static_cast<std::size_t>(shared));
      continue;
    }
    const bool may_grow = !node->is_root() && node->is_leaf() && node->num_users == 1;
    if (!may_grow) {
      drop_covered_partial(*node, tokens.first(page_size_));
      node = &add_child(*node, child_position(*node, tokens.first(page_size_)));
      ref.node_ = node;
    }
    append_pages(*node, tokens, std::move(pages));
    break;
  }
  return duplicates;
}

void RadixTree::publish_partial(NodeRef& ref, TokenSpan tokens, OwnedPages page) {
  Node* node = ref.node_;
  PrefixMatch match;
  find_partial(*node, tokens, match);
  if (match.partial_len == static_cast<std::int32_t>(tokens.size())) return;  // `page` is freed
  const bool may_grow = !node->is_root() && node->is_leaf() && node->num_users == 1;
  if (!may_grow) {
    drop_covered_partial(*node, tokens);
    node = &add_child(*node, child_position(*node, tokens));
    ref.node_ = node;
  }
  append_pages(*node, tokens, std::move(page));
}

// A partly filled page whose tokens begin a newer page is of no more use.
void RadixTree::drop_covered_partial(Node& parent, TokenSpan tokens) {
  const std::size_t at = child_position(parent, tokens);
  if (at == 0) return;
  Node& before = *parent.children[at - 1];
  if (before.len() >= static_cast<std::int32_t>(tokens.size()) || before.num_users > 0 ||
      compare_tokens(before.tokens, tokens.first(before.tokens.size())) != 0) {
    return;
  }
  cut_pages(before, 0);
  remove_leaf(before);
}

// ---- shrinking ----------------------------------------------------------------------------

void RadixTree::cut_pages(Node& node, std::int32_t num_pages) {
  const std::int32_t num_cut = node.pages.size() - num_pages;
  while (static_cast<std::int32_t>(node.hashes.size()) > num_pages) {
    const PageHash hash = node.hashes.back();
    node.hashes.pop_back();
    PageHash parent = kRootHash;
    if (!node.hashes.empty()) {
      parent = node.hashes.back();
    } else if (!node.parent->is_root()) {
      parent = node.parent->hashes.back();
    }
    log_.add({KvEventKind::kRemoved, Tier::kL1, hash, parent, page_size_});
  }
  node.tokens.resize(std::min<std::size_t>(node.tokens.size(),
                                           static_cast<std::size_t>(num_pages) * page_size_));
  node.pages.free_back(num_cut);
  if (node.num_users == 0) num_evictable_pages_ -= num_cut;
}

Node* RadixTree::remove_leaf(Node& node) {
  Node* parent = node.parent;
  const auto at = std::find_if(parent->children.begin(), parent->children.end(),
                               [&node](const auto& child) { return child.get() == &node; });
  if (node.num_users == 0) evictable_.erase(&node);
  parent->children.erase(at);
  --num_nodes_;
  if (parent->is_leaf() && parent->num_users == 0 && !parent->is_root()) evictable_.insert(parent);
  return parent;
}

void RadixTree::drop_root_if_unused(Node& root) {
  if (root.is_root() && root.is_leaf() && root.num_users == 0) {
    const std::string salt = root.space->salt;
    spaces_.erase(salt);
  }
}

std::int32_t RadixTree::evict(std::int32_t num_pages) {
  std::int32_t freed = 0;
  while (freed < num_pages && !evictable_.empty()) {
    Node& leaf = **evictable_.begin();
    const std::int32_t cut = std::min(num_pages - freed, leaf.pages.size());
    cut_pages(leaf, leaf.pages.size() - cut);
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
  while (!node->is_root() && node->is_leaf() && node->num_users == 0) {
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

// ---- looking ------------------------------------------------------------------------------

std::int32_t RadixTree::num_evictable_on_path(const PrefixMatch& match) const {
  const Node* node = match.node;
  if (node == nullptr) return 0;
  std::int32_t pages = node->num_users > 0 ? 0 : (match.full_len - node->start) / page_size_;
  for (node = node->parent; node != nullptr; node = node->parent) {
    pages += node->num_users > 0 ? 0 : node->pages.size();
  }
  return pages;
}

std::int32_t RadixTree::num_evictable_beside(const PrefixMatch& match) const {
  const Node* node = match.partial_node;
  if (node == nullptr || node->num_users > 0) return 0;
  const std::int32_t on_path = node == match.node ? (match.full_len - node->start) / page_size_ : 0;
  return node->pages.size() - on_path;
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

std::string RadixTree::check_node(const Node& node, std::int32_t& evictable,
                                  std::size_t& leaves) const {
  const std::string name = "node " + std::to_string(node.id.value);
  if (!node.is_root() && node.tokens.empty()) return name + " is empty";
  if (!node.is_leaf() && node.len() % page_size_ != 0) return name + " has children off a page end";
  if (node.pages.size() != (node.len() + page_size_ - 1) / page_size_) return name + " lacks pages";
  if (static_cast<std::int32_t>(node.hashes.size()) != node.len() / page_size_) {
    return name + " has the wrong number of hashes";
  }
  PageHash parent_hash = kRootHash;
  if (!node.is_root() && !node.parent->is_root()) parent_hash = node.parent->hashes.back();
  for (std::size_t i = 0; i < node.hashes.size(); ++i) {
    const TokenSpan page = TokenSpan(node.tokens).subspan(i * page_size_, page_size_);
    if (hash_page(node.space->hash, parent_hash, page) != node.hashes[i]) return name + " misnamed";
    parent_hash = node.hashes[i];
  }
  const bool is_queued = evictable_.contains(const_cast<Node*>(&node));
  if (is_queued != (node.is_leaf() && node.num_users == 0 && !node.is_root())) {
    return name + " is wrongly in or out of the eviction queue";
  }
  leaves += is_queued ? 1 : 0;
  evictable += node.num_users == 0 ? node.pages.size() : 0;
  std::int32_t users_below = 0;
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    const Node& child = *node.children[i];
    users_below += child.num_users;
    if (child.parent != &node || child.start != node.end()) return name + " has a stray child";
    if (i > 0 && compare_tokens(first_page(*node.children[i - 1]), first_page(child)) >= 0) {
      return name + " has children out of order";
    }
    std::string broken = check_node(child, evictable, leaves);
    if (!broken.empty()) return broken;
  }
  return users_below > node.num_users ? name + " counts fewer users than its children" : "";
}

std::string RadixTree::find_broken_invariant() const {
  std::int32_t evictable = 0;
  std::size_t leaves = 0;
  for (const auto& [salt, space] : spaces_) {
    std::string broken = check_node(*space->root, evictable, leaves);
    if (!broken.empty()) return broken;
  }
  if (leaves != evictable_.size()) return "the eviction queue holds a node outside the tree";
  if (evictable != num_evictable_pages_) return "the count of evictable pages is off";
  return "";
}

}  // namespace moorage
