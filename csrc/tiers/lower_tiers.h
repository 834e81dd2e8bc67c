// SPDX-License-Identifier: Apache-2.0
// Which full pages lie in L2 and L3, and the tickets of pages on their way. Knows no request, and
// no prefix but by its name: a page's chained hash says all the tokens before it.
//
// Invariants:
//   free + resident + incoming + orphaned == num_l2_pages
//   a ticket owns the page it writes and holds the one it reads until it is acked
//   a page with children in L2 stays there: eviction takes ends of chains, least recently used first
// Thread rule: one thread.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "events/kv_events.h"
#include "pages/owned_pages.h"

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

class LowerTiers : public LowerResidency {
 public:
  LowerTiers(std::int32_t num_l2_pages, bool use_l3, std::int32_t page_size, KvEventLog& log);

  bool is_enabled() const { return pool_.num_pages() > 0; }
  void set_now(TimeMs now_ms) { now_ms_ = now_ms; }

  bool is_in_l2(const PageHash& hash) const override;
  bool is_in_l3(const PageHash& hash) const;
  bool is_coming_to_l2(const PageHash& hash) const;
  void touch(const PageHash& hash);

  // Each makes a ticket; false (or -1): L2 has no room.
  bool write_back(PagePool& l1, PageId source, const PageHash& hash, const PageHash& parent);
  std::int64_t fetch(const PageHash& hash);                    // Requires: is_in_l3(hash)
  std::int64_t load_back(const PageHash& hash, PageId target);  // Requires: is_in_l2(hash)

  bool is_in_flight(std::int64_t ticket) const;  // and told of
  void ack(std::int64_t ticket, bool ok);        // Requires: is_in_flight(ticket)
  std::vector<Move> drain_moves() { return std::exchange(moves_, {}); }

  // Takes in what survived a restart. Requires: the pages are free; parents come first.
  void adopt_l2(const PageHash& hash, const PageHash& parent, PageId page);
  void adopt_l3(const PageHash& hash, const PageHash& parent);
  bool drop(const PageHash& hash);  // false: it is an inner page of a chain, or on its way

  const PagePool& pool() const { return pool_; }
  std::int64_t num_in_flight() const { return static_cast<std::int64_t>(tickets_.size()); }
  std::int64_t num_l3_pages() const { return num_l3_pages_; }
  std::int64_t num_lost() const { return num_lost_; }
  std::string find_broken_invariant() const;

 private:
  static constexpr std::int64_t kMaxL3Pages = 1 << 22;  // names remembered, not a capacity

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
    OwnedPages l2;  // at most one page
    bool in_l3 = false;
    bool is_coming = false;       // a ticket writes its L2 page
    bool is_going = false;        // a ticket stores it in L3
    std::int32_t num_readers = 0;   // tickets that read its L2 page
    std::int32_t num_children = 0;  // in L2 or on their way there
    TimeMs last_used_ms = 0;
    std::int64_t sequence = 0;
  };
  struct Ticket {
    MoveKind kind;
    PageHash hash;
    PageHold source;
    OwnedPages target;
  };
  using Key = std::tuple<TimeMs, std::int64_t, PageHash>;

  Entry* find(const PageHash& hash);
  const Entry* find(const PageHash& hash) const;
  Entry& make(const PageHash& hash);
  static bool is_idle_end(const Entry& entry);
  void remember(const PageHash& hash, const Entry& entry);
  void forget(const PageHash& hash, const Entry& entry);
  void add_child(const PageHash& parent);
  void remove_child(const PageHash& parent);
  void settle_in(const PageHash& hash, OwnedPages page);
  void lose_l2(const PageHash& hash);
  void set_l3(const PageHash& hash, bool in_l3);
  void erase_if_unused(const PageHash& hash);
  bool make_room();
  OwnedPages take_page(const PageHash& hash, const PageHash& parent);
  std::int64_t issue(MoveKind kind, const PageHash& hash, PageHold source, OwnedPages target,
                     std::int32_t source_page, std::int32_t target_page);
  void store(const PageHash& hash);
  void log(KvEventKind kind, Tier tier, const PageHash& hash, const PageHash& parent);

  const bool use_l3_;
  const std::int32_t page_size_;
  KvEventLog& log_;
  PagePool pool_;
  std::unordered_map<PageHash, Entry, HashOfHash> entries_;
  std::set<Key> idle_ends_;
  std::map<std::int64_t, Ticket> tickets_;
  std::vector<Move> moves_;           // not told of yet
  std::deque<PageHash> l3_order_;
  std::int64_t num_l3_pages_ = 0;
  std::int64_t num_lost_ = 0;
  std::int64_t next_ticket_ = 0;
  std::int64_t next_sequence_ = 0;
  TimeMs now_ms_ = 0;
};

}  // namespace moorage
