// SPDX-License-Identifier: Apache-2.0
// Which full pages lie in L2 and L3, and the tickets of pages on their way. Knows no request, and
// no prefix but by its name: a page's chained hash says all the tokens before it.
//
// Invariants:
//   free + resident + incoming + orphaned == num_l2_pages
//   a ticket owns the page it writes and holds the one it reads until it is acked
//   a page with children in L2 stays there: eviction takes ends of chains, in the order of Key
//   a leased page is not evicted; it may be lost with a failed transfer
//   an unwanted page is on its way, or the page before one; its last ticket takes it along
// Thread rule: one thread.
#pragma once

#include <cstring>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "events/kv_events.h"
#include "pages/owned_pages.h"
#include "prefix/eviction.h"
#include "prefix/reuse.h"

namespace moorage {

enum class MoveKind : std::uint8_t {
  kLoadBack,   // L2 -> L1
  kWriteBack,  // L1 -> L2
  kFetch,      // L3 -> L2
  kStore,      // L2 -> L3
};

// Source and target: 1, 2 or 3.
constexpr std::pair<int, int> tiers_of(MoveKind kind) {
  switch (kind) {
    case MoveKind::kLoadBack: return {2, 1};
    case MoveKind::kWriteBack: return {1, 2};
    case MoveKind::kFetch: return {3, 2};
    case MoveKind::kStore: return {2, 3};
  }
  return {0, 0};
}

struct Move {
  std::int64_t ticket;
  MoveKind kind;
  std::int32_t source_page;  // -1: L3 knows pages by hash alone
  std::int32_t target_page;
  PageHash hash;
};

// A full page: its name, the name before it, and where the prefix it ends, ends.
struct PageName {
  PageHash hash;
  PageHash parent;
  std::int32_t end = 0;  // tokens
};

struct TierOptions {
  std::int32_t num_l2_pages = 0;
  bool use_l3 = false;
  std::int32_t num_l3_pages = 1 << 22;  // names remembered
  std::int32_t page_size = 64;
  EvictionPolicy eviction = EvictionPolicy::kValue;
  std::int32_t attention_len = 32768;
};

class LowerTiers : public LowerResidency {
 public:
  LowerTiers(TierOptions options, KvEventLog& log);

  bool is_enabled() const { return pool_.num_pages() > 0; }
  void set_now(TimeMs now_ms);  // wishes to keep pages end with their time

  bool is_in_l2(const PageHash& hash) const override;
  bool is_in_l3(const PageHash& hash) const;
  std::vector<PageName> names() const;  // what is in a lower tier, heads of chains first
  bool is_coming_to_l2(const PageHash& hash) const;
  bool is_going_to_l3(const PageHash& hash) const;
  bool is_moving(const PageHash& hash) const;  // some ticket reads or writes it
  bool may_take_page() const { return pool_.num_free() > 0 || !idle_ends_.empty(); }
  void touch(const PageHash& hash);
  void tick(std::int64_t num_pages) { reuse_.tick(num_pages); }  // used, wherever they are
  // Somebody is about to load these, pages of one prefix, and to go on behind them.
  void note_use(std::span<const PageHash> hashes);

  // Each makes a ticket; false (or -1): L2 has no room. A page that came to L2 goes on to L3.
  bool write_back(PagePool& l1, PageId source, const PageName& name);
  std::int64_t fetch(const PageHash& hash);                    // Requires: is_in_l3(hash)
  std::int64_t load_back(const PageHash& hash, PageId target);  // Requires: is_in_l2(hash)
  void store(const PageHash& hash);                             // Requires: is_in_l2(hash)

  bool is_in_flight(std::int64_t ticket) const;  // and told of
  void ack(std::int64_t ticket, bool ok);        // Requires: is_in_flight(ticket)
  std::vector<Move> drain_moves() { return std::exchange(moves_, {}); }
  std::int64_t newest_ticket() const { return next_ticket_ - 1; }
  bool is_over(std::int64_t ticket) const;  // it and all before it are acked

  // Takes in what survived a restart, or was found. Requires: the page is free.
  void adopt_l2(const PageName& name, PageId page);
  void adopt_l3(const PageName& name);
  bool lose_l3(const PageHash& hash);  // false: nobody believed that it is there
  // Forgets the pages of a prefix in L2 and L3 from its end on, as far as nobody else goes on behind
  // them or leases them. What is on its way goes when it has come, unless it is used till then.
  struct Dropped {
    std::int32_t num_pages = 0;
    std::int32_t num_unwanted = 0;  // of these, on their way or before one that is
  };
  Dropped drop(std::span<const PageHash> hashes);
  bool let_go_of_l2(const PageHash& hash);

  // ---- valuing: the end of a chain in L2 stands for the chain behind its last fork.
  void value(const PageHash& hash, std::int32_t return_permille);
  void hold(const PageHash& hash, TimeMs l2_until_ms, TimeMs l3_until_ms);  // 0: no wish

  // ---- leases, counted per page.
  void lease(Tier tier, const PageHash& hash);    // Requires: there, or coming to L2
  void unlease(Tier tier, const PageHash& hash);
  bool is_leased(Tier tier, const PageHash& hash) const;
  std::int32_t num_leased(Tier tier) const { return tier == Tier::kL2 ? num_l2_leased_ : num_l3_leased_; }
  std::int64_t num_leased_lost() const { return num_leased_lost_; }

  const PagePool& pool() const { return pool_; }
  std::int64_t num_in_flight() const { return static_cast<std::int64_t>(tickets_.size()); }
  std::int64_t num_l3_pages() const { return num_l3_pages_; }
  std::int64_t num_lost() const { return num_lost_; }
  std::int64_t num_evicted() const { return num_evicted_; }
  std::string find_broken_invariant() const;

 private:
  struct HashOfHash {
    std::size_t operator()(const PageHash& hash) const {
      std::size_t value = 0;
      std::memcpy(&value, hash.data(), sizeof(value));
      return value;
    }
  };
  struct Entry {
    explicit Entry(PagePool& pool) : l2(pool, PageOwner::kTree) {}
    PageHash parent{};
    std::int32_t end = 0;  // tokens up to and with this page
    OwnedPages l2;         // at most one page
    bool in_l3 = false;
    bool is_coming = false;       // a ticket writes its L2 page
    bool is_going = false;        // a ticket stores it in L3
    std::int32_t num_readers = 0;   // tickets that read its L2 page
    std::int32_t num_children = 0;  // in L2 or on their way there
    std::int32_t num_l3_children = 0;
    std::int32_t num_l2_leases = 0;
    std::int32_t num_l3_leases = 0;
    bool is_unwanted = false;      // goes as soon as nothing moves it
    bool is_on_probation = false;  // was lost from L2 before (reuse.h)
    bool is_awaited = false;       // somebody is about to load it
    std::int64_t used_at = 0;      // as reuse.h counts time
    std::int32_t return_permille = kDefaultReturnPermille;
    TimeMs l2_until_ms = 0;  // its owner would like it there until then; 0: no such wish
    TimeMs l3_until_ms = 0;
    std::int64_t keep_value = 0;
    TimeMs last_used_ms = 0;
    std::int64_t sequence = 0;
    std::int64_t l3_sequence = 0;
  };
  struct Ticket {
    MoveKind kind;
    PageHash hash;
    PageHold source;
    OwnedPages target;
  };
  using Key = std::tuple<std::int64_t, TimeMs, std::int64_t, PageHash>;  // value, use, age
  using Deadline = std::tuple<TimeMs, Tier, PageHash>;

  // lower_tiers.cpp
  Entry* find(const PageHash& hash);
  const Entry* find(const PageHash& hash) const;
  Entry& make(const PageHash& hash);
  Entry& make(const PageName& name);
  static bool is_idle_end(const Entry& entry);
  static Key key_of(const PageHash& hash, const Entry& entry);
  void remember(const PageHash& hash, const Entry& entry);
  void forget(const PageHash& hash, const Entry& entry);
  void revalue(Entry& entry);
  void add_child(const PageHash& parent);
  void remove_child(const PageHash& parent);
  void settle_in(const PageHash& hash, OwnedPages page);
  void lose_l2(const PageHash& hash);
  void set_l3(const PageHash& hash, bool in_l3);
  static bool is_on_its_way(const Entry& entry);
  bool may_drop(const Entry& entry, const Entry* next) const;
  void want(const PageHash& hash);
  void drop_unwanted(PageHash hash);
  void find_standing(const PageHash& hash);
  std::int64_t next_victim_used_at() const;
  void inherit(const PageHash& parent, const Entry& child);
  void end_hold(Tier tier, const PageHash& hash);
  void leave_l2_for_l3(PageHash hash);
  void leave_l3(PageHash hash);
  void erase_if_unused(const PageHash& hash);
  void log(KvEventKind kind, Tier tier, const PageHash& hash, const PageHash& parent);

  // tickets.cpp
  bool make_room();
  void store_behind_heads(const PageHash& hash);
  void finish(Ticket& done, bool ok);
  OwnedPages take_page(const PageHash& hash, const PageHash& parent);
  std::int64_t issue(MoveKind kind, const PageHash& hash, PageHold source, OwnedPages target,
                     std::int32_t source_page, std::int32_t target_page);

  static constexpr std::size_t kMostOfferedAgain = 64;
  static constexpr TimeMs kOfferAgainMs = 50;

  const TierOptions options_;
  KvEventLog& log_;
  PagePool pool_;
  EvictionValue value_;
  ReuseHistory reuse_;
  std::unordered_map<PageHash, Entry, HashOfHash> entries_;
  std::set<Key> idle_ends_;
  std::set<Deadline> deadlines_;
  std::set<std::pair<std::int64_t, PageHash>> l3_order_;  // without the leased ones
  std::map<std::int64_t, Ticket> tickets_;
  std::vector<Move> moves_;           // not told of yet
  std::int64_t num_l3_pages_ = 0;
  std::int32_t num_l2_leased_ = 0;
  std::int32_t num_l3_leased_ = 0;
  std::int64_t num_leased_lost_ = 0;
  std::int64_t num_lost_ = 0;
  std::int64_t num_evicted_ = 0;
  std::int64_t next_ticket_ = 0;
  std::int64_t next_sequence_ = 0;
  std::int64_t next_l3_sequence_ = 0;
  TimeMs now_ms_ = 0;
  TimeMs offer_again_ms_ = 0;
};

}  // namespace moorage
