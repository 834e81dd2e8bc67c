// SPDX-License-Identifier: Apache-2.0
// Which token prefixes have KV, and in which pages. Knows no request and no step.
//
// Invariants:
//   every node but a leaf ends on a page boundary; only a leaf's last page may be partly filled
//   siblings are ordered by their first page's tokens, and no two share a whole page
//   num_users counts references to the node and below; eviction never touches a node with users
//   num_leases counts leases that end at the node or below; each ends where a node ends
//   a full page's hash is computed once: by whoever publishes it, else when it enters the tree
// Thread rule: one thread. Node pointers in a PrefixMatch are valid until the next non-const call.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "events/kv_events.h"
#include "prefix/eviction.h"
#include "prefix/lease.h"
#include "prefix/node.h"
#include "prefix/reuse.h"

namespace moorage {

struct PrefixMatch {
  Node* node = nullptr;       // where the full pages end (possibly inside it); null: no such space
  std::int32_t full_len = 0;  // tokens matched in full pages
  Node* partial_node = nullptr;  // holds a page whose first partial_len tokens match too
  std::int32_t partial_index = 0;
  std::int32_t partial_len = 0;

  std::int32_t len() const { return full_len + partial_len; }
};

struct TreeOptions {
  std::int32_t page_size = 64;
  std::string model_fingerprint;
  EvictionPolicy eviction = EvictionPolicy::kValue;
  std::int32_t attention_len = 32768;
};

// Pages of the tree, by how they may be used. A page counts in each line that fits it.
struct TreePages {
  std::int32_t evictable = 0;    // in nodes without users
  std::int32_t leased = 0;       // in nodes with leases
  std::int32_t idle_leased = 0;  // both
};

class RadixTree {
 public:
  RadixTree(PagePool& pool, TreeOptions options, KvEventLog& log,
            const LowerResidency* lower = nullptr);
  ~RadixTree();  // Requires: no NodeRef is alive

  void set_now(TimeMs now_ms) { now_ms_ = now_ms; }

  // ---- matching. Longest cached prefix, token-exact; changes nothing, not even recency.
  PrefixMatch find(const std::string& salt, TokenSpan tokens) const;

  // ---- keeping.
  // References the path up to match.full_len, splitting a node there if need be; keeps `match`
  // valid.
  NodeRef pin(const std::string& salt, PrefixMatch& match);
  NodeRef pin_partial(const PrefixMatch& match);  // Requires: match.partial_len > 0
  bool can_take_partial(const PrefixMatch& match) const;
  OwnedPages take_partial(const PrefixMatch& match);  // Requires: can_take_partial(match)

  // ---- growing.
  // Appends full pages below `ref` and moves it to their end. A page that was there already is not
  // stored twice: the caller's copy comes back, and `adopted` gets the tree's (index, page).
  struct Adopted {
    std::int32_t index;  // of the page in the sequence
    PageId page;
  };
  // `names`: of these pages, as far as anybody computed them already.
  OwnedPages publish(NodeRef& ref, TokenSpan tokens, OwnedPages pages,
                     std::vector<Adopted>& adopted, std::span<const PageHash> names = {});
  // Appends a partly filled page below `ref` (or frees it if its tokens are there already).
  void publish_partial(NodeRef& ref, TokenSpan tokens, OwnedPages page);

  // ---- reuse, for the order of eviction (reuse.h).
  // A request goes on from this prefix; its whole prompt has that many pages. Not for one that had
  // given way, which would find what it left itself.
  void note_use(const NodeRef& ref, std::int32_t num_pages);
  void note_awaited(const NodeRef& ref);  // what was brought here is for somebody who waits
  bool is_looping() const { return uses_value_ && reuse_.is_looping(); }

  // ---- shrinking. Each returns the number of pages freed.
  std::int32_t evict(std::int32_t num_pages);
  std::int32_t drop(const std::string& salt, TokenSpan tokens, std::int32_t keep_tokens);
  std::int32_t drop_unwanted(Node& leaf);  // and what of its path is worth nothing and idle too

  // ---- valuing.
  // Says how likely the end of this prefix is to be continued, and until when its owner would like
  // it here (0: no such wish); returns the tokens found.
  std::int32_t hint(const std::string& salt, TokenSpan tokens, std::int32_t return_permille,
                    TimeMs hold_until_ms = 0);
  std::int64_t cost(std::int32_t depth) const { return value_.cost(depth); }  // of a page there
  // Wishes whose time is over: their nodes are worth nothing more; returns the idle leaves of them.
  std::vector<Node*> end_holds();

  // ---- copies below: nodes of which L2 had no room for some page.
  void mark_unbacked(const Node& node, bool is_unbacked);
  const Node* next_unbacked(NodeId after) const;  // in the order of their ids, round and round
  void hint(const NodeRef& ref, std::int32_t return_permille);

  // Tokens of `tokens` a lease could cover, and the pages of them that no lease covers yet.
  struct Leasable {
    std::int32_t num_tokens = 0;
    std::int32_t num_pages = 0;
    std::int32_t num_new_pages = 0;
  };
  Leasable leasable(const std::string& salt, TokenSpan tokens) const;
  void attach(Lease& lease, const std::string& salt, TokenSpan tokens);  // to a leasable prefix
  void detach(Lease& lease);

  // ---- looking.
  const TreePages& pages() const { return counts_; }
  // What pin(match), and then pin_partial(match), would take from the evictable pages.
  TreePages pages_on_path(const PrefixMatch& match) const;
  std::int32_t num_evictable_beside(const PrefixMatch& match) const;
  std::int64_t num_evicted_pages() const { return num_evicted_pages_; }
  std::int64_t version() const { return version_; }  // grows with every change
  std::int64_t num_nodes() const { return num_nodes_; }
  // The full pages of a match, with their names.
  struct NamedPage {
    PageId page;
    PageHash hash;
  };
  std::vector<NamedPage> full_pages(const PrefixMatch& match) const;
  std::vector<PageId> pages_of(const Node& node) const;     // from the root to its end
  std::vector<PageHash> hashes_of(const Node& node) const;  // of the full pages on that path
  std::vector<const Node*> snapshot(std::int32_t max_nodes) const;  // breadth first
  std::string find_broken_invariant() const;                // empty: none; walks everything

 private:
  friend class NodeRef;
  struct Space {
    PrefixSpace names;
    std::unique_ptr<Node> root;
  };
  // While it lives a node's fields may change: counters and queue follow when it ends.
  class Edit {
   public:
    Edit(RadixTree& tree, Node& node) : tree_(tree), node_(node) { tree_.forget(node_); }
    ~Edit() { tree_.remember(node_); }
    Edit(const Edit&) = delete;
    Edit& operator=(const Edit&) = delete;

   private:
    RadixTree& tree_;
    Node& node_;
  };

  // radix_tree.cpp
  void remember(Node& node);
  void forget(Node& node);
  void count(const Node& node, std::int32_t sign);
  static bool is_evictable_leaf(const Node& node);
  void acquire(Node& node);
  void release(Node& node);
  void add_user(Node& node);
  void move_down(NodeRef& ref, Node& child);
  void merge_upwards(Node* node);
  void merge_only_child(Node& node);
  Node& make_root(const std::string& salt);
  Node& add_child(Node& parent, TokenSpan tokens);
  Node& split(Node& node, std::int32_t num_tokens);
  bool may_grow(const Node& node, bool is_on_probation) const;
  PageHash last_hash(const Node& node) const;
  std::vector<PageHash> name_pages(const Node& parent, TokenSpan tokens,
                                   std::span<const PageHash> names) const;
  bool are_for_probation(const Node& parent, std::span<const PageHash> names);
  const Node* next_victim() const;
  void append_pages(Node& node, TokenSpan tokens, OwnedPages pages,
                    std::span<const PageHash> names);
  TokenSpan first_page(const Node& node) const;
  std::size_t child_position(const Node& parent, TokenSpan page) const;
  Node* full_child(const Node& parent, TokenSpan tokens) const;
  void find_partial(const Node& parent, TokenSpan rest, PrefixMatch& match) const;

  // radix_tree_shrink.cpp
  void drop_covered_partial(Node& parent, TokenSpan tokens);
  void cut_pages(Node& node, std::int32_t num_pages, bool is_evicted = false);
  Node* remove_leaf(Node& node);  // returns its parent
  void drop_root_if_unused(Node& root);
  void move_leases(Node& from, Node& to);
  void hint_upwards(Node* node, std::int32_t return_permille, TimeMs hold_until_ms);
  Node* leasable_node(const PrefixMatch& match) const;

  // radix_tree_look.cpp
  std::string check_node(const Node& node, TreePages& counts, std::size_t& leaves) const;

  PagePool& pool_;
  const std::int32_t page_size_;
  const std::string model_fingerprint_;
  KvEventLog& log_;
  const LowerResidency* const lower_;  // null: there is one tier

  std::unordered_map<std::string, std::unique_ptr<Space>> spaces_;
  EvictionQueue evictable_;  // leaves without users
  std::set<std::pair<TimeMs, NodeId>> deadlines_;  // of wishes to keep a node
  std::map<NodeId, Node*> held_;                   // whose they are
  std::map<NodeId, Node*> unbacked_;
  EvictionValue value_;
  const bool uses_value_;
  ReuseHistory reuse_;
  TreePages counts_;
  std::int64_t num_evicted_pages_ = 0;
  std::int64_t num_nodes_ = 0;
  std::int64_t next_node_id_ = 0;
  std::int64_t version_ = 0;
  TimeMs now_ms_ = 0;
};

}  // namespace moorage
