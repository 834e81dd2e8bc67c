// SPDX-License-Identifier: Apache-2.0
#include "tiers/lower_tiers.h"

namespace moorage {

LowerTiers::LowerTiers(std::int32_t num_l2_pages, bool use_l3, std::int32_t page_size,
                       KvEventLog& log)
    : use_l3_(use_l3), page_size_(page_size), log_(log), pool_(num_l2_pages) {}

// ---- entries -----------------------------------------------------------------------------------

LowerTiers::Entry* LowerTiers::find(const PageHash& hash) {
  const auto found = entries_.find(hash);
  return found == entries_.end() ? nullptr : &found->second;
}

const LowerTiers::Entry* LowerTiers::find(const PageHash& hash) const {
  const auto found = entries_.find(hash);
  return found == entries_.end() ? nullptr : &found->second;
}

LowerTiers::Entry& LowerTiers::make(const PageHash& hash) {
  const auto [at, is_new] = entries_.try_emplace(hash, pool_);
  if (is_new) at->second.sequence = next_sequence_++;
  return at->second;
}

bool LowerTiers::is_idle_end(const Entry& entry) {
  return !entry.l2.is_empty() && entry.num_readers == 0 && entry.num_children == 0;
}

void LowerTiers::remember(const PageHash& hash, const Entry& entry) {
  if (is_idle_end(entry)) idle_ends_.insert({entry.last_used_ms, entry.sequence, hash});
}

void LowerTiers::forget(const PageHash& hash, const Entry& entry) {
  if (is_idle_end(entry)) idle_ends_.erase({entry.last_used_ms, entry.sequence, hash});
}

void LowerTiers::add_child(const PageHash& parent) {
  if (parent == kRootHash) return;
  Entry& entry = make(parent);
  forget(parent, entry);
  entry.num_children += 1;
}

void LowerTiers::remove_child(const PageHash& parent) {
  if (parent == kRootHash) return;
  Entry& entry = *find(parent);
  entry.num_children -= 1;
  remember(parent, entry);
  erase_if_unused(parent);
}

void LowerTiers::erase_if_unused(const PageHash& hash) {
  const Entry* entry = find(hash);
  if (entry == nullptr || !entry->l2.is_empty() || entry->in_l3 || entry->is_coming ||
      entry->is_going || entry->num_readers > 0 || entry->num_children > 0) {
    return;
  }
  entries_.erase(hash);
}

void LowerTiers::settle_in(const PageHash& hash, OwnedPages page) {
  Entry& entry = *find(hash);
  entry.is_coming = false;
  entry.last_used_ms = now_ms_;
  entry.l2.append(std::move(page));
  remember(hash, entry);
  log(KvEventKind::kStored, Tier::kL2, hash, entry.parent);
}

void LowerTiers::lose_l2(const PageHash& hash) {
  Entry& entry = *find(hash);
  if (entry.l2.is_empty()) return;
  const PageHash parent = entry.parent;
  forget(hash, entry);
  entry.l2.free_back(1);
  log(KvEventKind::kRemoved, Tier::kL2, hash, parent);
  remove_child(parent);
}

void LowerTiers::set_l3(const PageHash& hash, bool in_l3) {
  Entry& entry = *find(hash);
  if (entry.in_l3 == in_l3) return;
  entry.in_l3 = in_l3;
  num_l3_pages_ += in_l3 ? 1 : -1;
  log(in_l3 ? KvEventKind::kStored : KvEventKind::kRemoved, Tier::kL3, hash, entry.parent);
  if (!in_l3) return;
  l3_order_.push_back(hash);
  while (static_cast<std::int64_t>(l3_order_.size()) > kMaxL3Pages) {
    const PageHash oldest = l3_order_.front();
    l3_order_.pop_front();
    if (find(oldest) != nullptr) set_l3(oldest, false), erase_if_unused(oldest);
  }
}

void LowerTiers::log(KvEventKind kind, Tier tier, const PageHash& hash, const PageHash& parent) {
  log_.add({kind, tier, hash, parent, page_size_});
}

// ---- looking -----------------------------------------------------------------------------------

bool LowerTiers::is_in_l2(const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && !entry->l2.is_empty();
}

bool LowerTiers::is_in_l3(const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && entry->in_l3;
}

bool LowerTiers::is_coming_to_l2(const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && entry->is_coming;
}

void LowerTiers::touch(const PageHash& hash) {
  Entry* entry = find(hash);
  if (entry == nullptr) return;
  forget(hash, *entry);
  entry->last_used_ms = now_ms_;
  remember(hash, *entry);
}

// ---- tickets -----------------------------------------------------------------------------------

bool LowerTiers::make_room() {
  if (pool_.num_free() > 0) return true;
  if (idle_ends_.empty()) return false;
  const PageHash victim = std::get<PageHash>(*idle_ends_.begin());
  lose_l2(victim);
  erase_if_unused(victim);
  return true;
}

// Marks the page as coming: its parent is then no end of a chain, so room is not made of it.
OwnedPages LowerTiers::take_page(const PageHash& hash, const PageHash& parent) {
  OwnedPages page(pool_, PageOwner::kInFlight);
  Entry& entry = make(hash);
  entry.parent = parent;
  entry.is_coming = true;
  add_child(parent);
  if (make_room()) {
    page.grow();
    return page;
  }
  find(hash)->is_coming = false;
  remove_child(parent);
  erase_if_unused(hash);
  return page;
}

std::int64_t LowerTiers::issue(MoveKind kind, const PageHash& hash, PageHold source,
                               OwnedPages target, std::int32_t source_page,
                               std::int32_t target_page) {
  const std::int64_t ticket = next_ticket_++;
  moves_.push_back({ticket, kind, source_page, target_page, hash});
  tickets_.emplace(ticket, Ticket{kind, hash, std::move(source), std::move(target)});
  return ticket;
}

bool LowerTiers::write_back(PagePool& l1, PageId source, const PageHash& hash,
                            const PageHash& parent) {
  if (is_in_l2(hash) || is_coming_to_l2(hash)) return true;
  OwnedPages target = take_page(hash, parent);
  if (target.is_empty()) return false;
  const std::int32_t page = target[0].value;
  issue(MoveKind::kWriteBack, hash, PageHold(l1, source), std::move(target), source.value, page);
  return true;
}

std::int64_t LowerTiers::fetch(const PageHash& hash) {
  const PageHash parent = find(hash)->parent;
  OwnedPages target = take_page(hash, parent);
  if (target.is_empty()) return -1;
  const std::int32_t page = target[0].value;
  return issue(MoveKind::kFetch, hash, PageHold(), std::move(target), -1, page);
}

std::int64_t LowerTiers::load_back(const PageHash& hash, PageId target) {
  Entry& entry = *find(hash);
  forget(hash, entry);
  entry.num_readers += 1;
  entry.last_used_ms = now_ms_;
  return issue(MoveKind::kLoadBack, hash, PageHold(pool_, entry.l2[0]),
               OwnedPages(pool_, PageOwner::kInFlight), entry.l2[0].value, target.value);
}

void LowerTiers::store(const PageHash& hash) {
  Entry& entry = *find(hash);
  if (!use_l3_ || entry.in_l3 || entry.is_going) return;
  forget(hash, entry);
  entry.num_readers += 1;
  entry.is_going = true;
  issue(MoveKind::kStore, hash, PageHold(pool_, entry.l2[0]),
        OwnedPages(pool_, PageOwner::kInFlight), entry.l2[0].value, -1);
}

bool LowerTiers::is_in_flight(std::int64_t ticket) const {
  return tickets_.contains(ticket) && (moves_.empty() || ticket < moves_.front().ticket);
}

void LowerTiers::ack(std::int64_t ticket, bool ok) {
  auto node = tickets_.extract(ticket);
  Ticket& done = node.mapped();
  const PageHash hash = done.hash;
  Entry& entry = *find(hash);
  num_lost_ += ok ? 0 : 1;
  if (done.kind == MoveKind::kWriteBack || done.kind == MoveKind::kFetch) {
    if (ok) {
      settle_in(hash, std::move(done.target));
      if (done.kind == MoveKind::kWriteBack) store(hash);
      return;
    }
    const PageHash parent = entry.parent;
    entry.is_coming = false;
    if (done.kind == MoveKind::kFetch) set_l3(hash, false);
    remove_child(parent);
    return erase_if_unused(hash);
  }
  forget(hash, entry);
  entry.num_readers -= 1;
  remember(hash, entry);
  if (done.kind == MoveKind::kStore) {
    entry.is_going = false;
    if (ok) set_l3(hash, true);
  } else if (!ok) {
    lose_l2(hash);
  }
  erase_if_unused(hash);
}

// ---- from outside ------------------------------------------------------------------------------

void LowerTiers::adopt_l2(const PageHash& hash, const PageHash& parent, PageId page) {
  if (is_in_l2(hash) || is_coming_to_l2(hash)) return;
  OwnedPages owned(pool_, PageOwner::kInFlight);
  const PageId one[] = {page};
  owned.take(one);
  make(hash).parent = parent;
  add_child(parent);
  settle_in(hash, std::move(owned));
}

void LowerTiers::adopt_l3(const PageHash& hash, const PageHash& parent) {
  make(hash).parent = parent;
  set_l3(hash, true);
}

bool LowerTiers::drop(const PageHash& hash) {
  const Entry* entry = find(hash);
  if (entry == nullptr) return true;
  if (entry->is_coming || entry->is_going || entry->num_readers > 0 || entry->num_children > 0) {
    return false;
  }
  lose_l2(hash);
  set_l3(hash, false);
  erase_if_unused(hash);
  return true;
}

std::string LowerTiers::find_broken_invariant() const {
  std::size_t num_pages = pool_.free_list().size() + pool_.orphans().size(), num_ends = 0;
  std::int64_t num_l3 = 0;
  for (const auto& [hash, entry] : entries_) {
    num_pages += static_cast<std::size_t>(entry.l2.size());
    num_l3 += entry.in_l3 ? 1 : 0;
    num_ends += is_idle_end(entry) ? 1 : 0;
    if (entry.l2.size() > 1) return "a page lies twice in L2";
    if (entry.is_coming && !entry.l2.is_empty()) return "a page comes to L2 and is there";
  }
  for (const auto& [id, ticket] : tickets_) {
    num_pages += static_cast<std::size_t>(ticket.target.size());
    if (!entries_.contains(ticket.hash)) return "a ticket moves a page nobody knows";
  }
  if (num_pages != static_cast<std::size_t>(pool_.num_pages())) return "an L2 page is in no place";
  if (num_ends != idle_ends_.size()) return "the L2 eviction order lacks a page or has one too many";
  return num_l3 == num_l3_pages_ ? "" : "the count of L3 pages is off";
}

}  // namespace moorage
