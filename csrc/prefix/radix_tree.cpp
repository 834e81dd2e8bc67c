// SPDX-License-Identifier: Apache-2.0
// Matching, keeping and growing.
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

RadixTree::RadixTree(PagePool& pool, TreeOptions options, KvEventLog& log,
                     const LowerResidency* lower)
    : pool_(pool),
      page_size_(options.page_size),
      model_fingerprint_(std::move(options.model_fingerprint)),
      log_(log),
      lower_(lower),
      value_(options.eviction, options.attention_len),
      uses_value_(options.eviction == EvictionPolicy::kValue),
      reuse_(pool.num_pages()) {}

RadixTree::~RadixTree() {
  for (const auto& [salt, space] : spaces_) {
    MOORAGE_CHECK(space->root->num_users == 0, "a prefix reference outlived the tree");
  }
}

// ---- counters and queue, derived from a node's fields ------------------------------------------

bool RadixTree::is_evictable_leaf(const Node& node) {
  return node.num_users == 0 && node.is_leaf() && !node.is_root();
}

void RadixTree::count(const Node& node, std::int32_t sign) {
  const std::int32_t pages = sign * node.pages.size();
  counts_.evictable += node.num_users == 0 ? pages : 0;
  counts_.leased += node.num_leases > 0 ? pages : 0;
  counts_.idle_leased += node.num_users == 0 && node.num_leases > 0 ? pages : 0;
}

void RadixTree::remember(Node& node) {
  ++version_;
  count(node, 1);
  if (is_evictable_leaf(node)) evictable_.insert(&node);
  if (node.is_unbacked) unbacked_.emplace(node.id, &node);
  if (node.hold_until_ms > 0) {
    deadlines_.insert({node.hold_until_ms, node.id});
    held_.emplace(node.id, &node);
  }
}

void RadixTree::forget(Node& node) {
  count(node, -1);
  if (is_evictable_leaf(node)) evictable_.erase(&node);
  if (node.is_unbacked) unbacked_.erase(node.id);
  if (node.hold_until_ms > 0) {
    deadlines_.erase({node.hold_until_ms, node.id});
    held_.erase(node.id);
  }
}

// ---- references --------------------------------------------------------------------------------

void RadixTree::add_user(Node& node) {
  const Edit edit(*this, node);
  node.num_users += 1;
  node.last_used_ms = now_ms_;
}

void RadixTree::acquire(Node& node) {
  for (Node* at = &node; at != nullptr; at = at->parent) add_user(*at);
}

void RadixTree::release(Node& node) {
  Node* root = &node;
  for (Node* at = &node; at != nullptr; at = at->parent) {
    const Edit edit(*this, *at);
    MOORAGE_CHECK(at->num_users > 0, "a prefix was released twice");
    at->num_users -= 1;
    at->last_used_ms = now_ms_;
    at->used_at = reuse_.now();
    at->keep_value = value_.of(*at);
    root = at;
  }
  merge_upwards(&node);
  drop_root_if_unused(*root);
}

void RadixTree::move_down(NodeRef& ref, Node& child) {
  add_user(child);
  ref.node_ = &child;
}

// Longer nodes are not lengthened or joined: a token vector of a whole context, reallocated in the
// middle of a step, costs more than all the rest of the step.
constexpr std::int32_t kMaxGrownLen = 8192;

// Splits leave chains of nodes behind; where nothing tells parent and child apart, join them.
void RadixTree::merge_upwards(Node* node) {
  while (!node->is_root() && node->num_users == 0) {
    Node* parent = node->parent;
    if (node->children.size() == 1 && node->leases.empty() &&
        node->children[0]->num_users == 0 &&
        node->children[0]->is_on_probation == node->is_on_probation &&
        node->len() + node->children[0]->len() <= kMaxGrownLen &&
        node->children[0]->last_used_ms == node->last_used_ms) {
      merge_only_child(*node);
    }
    node = parent;
  }
}

void RadixTree::merge_only_child(Node& node) {
  const Edit edit(*this, node);
  forget(*node.children[0]);
  const std::unique_ptr<Node> child = std::move(node.children[0]);
  node.children = std::move(child->children);
  for (const auto& grandchild : node.children) grandchild->parent = &node;
  node.tokens.insert(node.tokens.end(), child->tokens.begin(), child->tokens.end());
  node.hashes.insert(node.hashes.end(), child->hashes.begin(), child->hashes.end());
  node.pages.append(std::move(child->pages));
  node.return_permille = child->return_permille;
  node.keep_value = child->keep_value;
  node.hold_until_ms = child->hold_until_ms;
  node.is_unbacked = node.is_unbacked || child->is_unbacked;
  node.is_awaited = node.is_awaited || child->is_awaited;
  node.leases = std::move(child->leases);
  for (Lease* lease : node.leases) lease->node = &node;
  --num_nodes_;
}

// ---- matching ----------------------------------------------------------------------------------

TokenSpan RadixTree::first_page(const Node& node) const {
  return TokenSpan(node.tokens).first(std::min<std::size_t>(node.tokens.size(), page_size_));
}

std::size_t RadixTree::child_position(const Node& parent, TokenSpan page) const {
  const auto is_before = [this](const auto& child, TokenSpan key) {
    return compare_tokens(first_page(*child), key) < 0;
  };
  const auto at =
      std::lower_bound(parent.children.begin(), parent.children.end(), page, is_before);
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

// ---- keeping -----------------------------------------------------------------------------------

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

// Nobody else may hold the page, and no lease may promise its tokens to somebody.
bool RadixTree::can_take_partial(const PrefixMatch& match) const {
  const Node* node = match.partial_node;
  return node != nullptr && node->num_users == 0 && node->num_leases == 0 &&
         node->len() == match.partial_index * page_size_ + match.partial_len;
}

OwnedPages RadixTree::take_partial(const PrefixMatch& match) {
  Node& node = *match.partial_node;
  OwnedPages page(pool_, PageOwner::kTree);
  {
    const Edit edit(*this, node);
    page = node.pages.split_back(1);
    node.tokens.resize(node.tokens.size() - static_cast<std::size_t>(match.partial_len));
  }
  if (node.tokens.empty()) remove_leaf(node);
  return page;
}

// ---- growing -----------------------------------------------------------------------------------

// The new node takes the front, so that references to `node` still mean all of its path.
Node& RadixTree::split(Node& node, std::int32_t num_tokens) {
  const std::int32_t num_pages = num_tokens / page_size_;
  const std::size_t at = child_position(*node.parent, first_page(node));
  auto owner = std::make_unique<Node>(NodeId{next_node_id_++}, pool_);
  Node& front = *owner;
  const Edit edit(*this, node);
  OwnedPages back_pages = node.pages.split_back(node.pages.size() - num_pages);
  std::vector<TokenId> back_tokens(node.tokens.begin() + num_tokens, node.tokens.end());
  std::vector<PageHash> back_hashes(node.hashes.begin() + num_pages, node.hashes.end());
  front.parent = node.parent;
  front.space = node.space;
  front.start = node.start;
  front.num_users = node.num_users;
  front.num_leases = node.num_leases;
  front.last_used_ms = node.last_used_ms;
  front.return_permille = node.return_permille;
  front.keep_value = node.keep_value;
  front.hold_until_ms = node.hold_until_ms;
  front.is_unbacked = node.is_unbacked;
  front.used_at = node.used_at;
  front.is_on_probation = node.is_on_probation;
  front.is_awaited = node.is_awaited;
  front.tokens = std::move(node.tokens);
  front.tokens.resize(static_cast<std::size_t>(num_tokens));
  front.hashes = std::move(node.hashes);
  front.hashes.resize(static_cast<std::size_t>(num_pages));
  front.pages = std::move(node.pages);
  node.pages = std::move(back_pages);
  node.tokens = std::move(back_tokens);
  node.hashes = std::move(back_hashes);
  node.start += num_tokens;

  std::unique_ptr<Node>& link = front.parent->children[at];
  front.children.push_back(std::move(link));
  link = std::move(owner);
  node.parent = &front;
  remember(front);
  ++num_nodes_;
  return front;
}

// The caller's reference moves from `parent` to the new node.
Node& RadixTree::add_child(Node& parent, TokenSpan tokens) {
  const std::size_t at = child_position(parent, tokens);
  const Edit edit(*this, parent);
  auto owner = std::make_unique<Node>(NodeId{next_node_id_++}, pool_);
  Node& child = *owner;
  child.parent = &parent;
  child.space = parent.space;
  child.start = parent.end();
  child.last_used_ms = now_ms_;
  child.num_users = 1;
  child.used_at = reuse_.now();
  child.is_on_probation = parent.is_on_probation;
  parent.children.insert(parent.children.begin() + static_cast<std::ptrdiff_t>(at),
                         std::move(owner));
  remember(child);
  ++num_nodes_;
  return child;
}

// Only its sole user may lengthen a node, and not one whose end a lease marks; what is on probation
// stays apart from what is not.
bool RadixTree::may_grow(const Node& node, bool is_on_probation) const {
  return !node.is_root() && node.is_leaf() && node.num_users == 1 && node.leases.empty() &&
         node.len() < kMaxGrownLen && node.is_on_probation == is_on_probation;
}

PageHash RadixTree::last_hash(const Node& node) const {
  if (!node.hashes.empty()) return node.hashes.back();
  return node.is_root() || node.parent->is_root() ? kRootHash : node.parent->hashes.back();
}

// Of the full pages below `parent`, as far as nobody named them yet.
std::vector<PageHash> RadixTree::name_pages(const Node& parent, TokenSpan tokens,
                                            std::span<const PageHash> names) const {
  const std::size_t num_full = tokens.size() / static_cast<std::size_t>(page_size_);
  names = names.first(std::min(names.size(), num_full));
  std::vector<PageHash> all(names.begin(), names.end());
  all.reserve(num_full);
  for (std::size_t i = all.size(); i < num_full; ++i) {
    all.push_back(hash_page(parent.space->hash, all.empty() ? last_hash(parent) : all.back(),
                            tokens.subspan(i * page_size_, page_size_)));
  }
  return all;
}

void RadixTree::append_pages(Node& node, TokenSpan tokens, OwnedPages pages,
                             std::span<const PageHash> names) {
  const Edit edit(*this, node);
  PageHash parent = last_hash(node);
  for (const PageHash& hash : names) {
    node.hashes.push_back(hash);
    log_.add({KvEventKind::kStored, Tier::kL1, hash, parent, page_size_});
    parent = hash;
  }
  reuse_.tick(pages.size());
  node.used_at = reuse_.now();
  node.tokens.insert(node.tokens.end(), tokens.begin(), tokens.end());
  node.pages.append(std::move(pages));
}

OwnedPages RadixTree::publish(NodeRef& ref, TokenSpan tokens, OwnedPages pages,
                              std::vector<Adopted>& adopted, std::span<const PageHash> names) {
  OwnedPages duplicates(pool_, pages.owner());
  while (!tokens.empty()) {
    Node* child = full_child(*ref.node_, tokens);
    if (child == nullptr) {
      const std::vector<PageHash> all = name_pages(*ref.node_, tokens, names);
      const bool on_probation = are_for_probation(*ref.node_, all);
      if (!may_grow(*ref.node_, on_probation)) {
        drop_covered_partial(*ref.node_, tokens.first(page_size_));
        ref.node_ = &add_child(*ref.node_, tokens.first(page_size_));
        ref.node_->is_on_probation = on_probation;
      }
      append_pages(*ref.node_, tokens, std::move(pages), all);
      break;
    }
    const std::int32_t shared = common_prefix_len(child->tokens, tokens) / page_size_ * page_size_;
    if (shared < child->len()) child = &split(*child, shared);
    for (std::int32_t i = 0; i < child->pages.size(); ++i) {
      adopted.push_back({child->start / page_size_ + i, child->pages[i]});
    }
    duplicates.append(pages.split_front(child->pages.size()));
    move_down(ref, *child);
    tokens = tokens.subspan(static_cast<std::size_t>(shared));
    names = names.subspan(std::min(names.size(), static_cast<std::size_t>(shared / page_size_)));
  }
  return duplicates;
}

void RadixTree::publish_partial(NodeRef& ref, TokenSpan tokens, OwnedPages page) {
  PrefixMatch match;
  find_partial(*ref.node_, tokens, match);
  if (match.partial_len == static_cast<std::int32_t>(tokens.size())) return;  // `page` is freed
  if (!may_grow(*ref.node_, ref.node_->is_on_probation)) {
    drop_covered_partial(*ref.node_, tokens);
    ref.node_ = &add_child(*ref.node_, tokens);
  }
  append_pages(*ref.node_, tokens, std::move(page), {});
}

// ---- reuse -------------------------------------------------------------------------------------

void RadixTree::note_use(const NodeRef& ref, std::int32_t num_pages) {
  std::int32_t num_found = 0;
  for (Node* at = ref.node_; !at->is_root(); at = at->parent) {
    num_found += at->pages.size();
    if (std::exchange(at->is_awaited, false)) continue;  // counted as it came
    reuse_.note(reuse_.now() - at->used_at + num_pages, at->pages.size());
    at->is_on_probation = false;
  }
  reuse_.tick(num_found);
}

void RadixTree::note_awaited(const NodeRef& ref) {
  if (!ref.node_->is_root()) ref.node_->is_awaited = true;
}

// The unused leaf that would go next if none were on probation and none leased.
const Node* RadixTree::next_victim() const {
  const auto at = std::ranges::find_if(
      evictable_, [](const Node* node) { return node->keep_value >= 0 && node->num_leases == 0; });
  return at == evictable_.end() ? nullptr : *at;
}

// Pages of one run that are new here. What nobody has lost goes with the pages before it.
bool RadixTree::are_for_probation(const Node& parent, std::span<const PageHash> names) {
  std::int64_t furthest = -1;
  for (const PageHash& name : names) {
    const ReuseHistory::Found found = reuse_.find_lost(name);
    if (!found.was_lost) continue;
    const std::int64_t distance = found.distance + static_cast<std::int64_t>(names.size());
    reuse_.note(distance, 1);
    furthest = std::max(furthest, found.distance);
  }
  if (furthest < 0 || parent.is_on_probation || !is_looping()) return parent.is_on_probation;
  const Node* victim = next_victim();
  return victim == nullptr || furthest >= reuse_.now() - victim->used_at;
}

}  // namespace moorage
