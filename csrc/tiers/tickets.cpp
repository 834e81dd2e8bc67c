// SPDX-License-Identifier: Apache-2.0
// Pages on their way: a ticket owns the page it writes and holds the one it reads, until its ack.
#include "tiers/lower_tiers.h"

namespace moorage {

bool LowerTiers::make_room() {
  if (pool_.num_free() > 0) return true;
  if (idle_ends_.empty()) return false;
  const PageHash victim = std::get<PageHash>(*idle_ends_.begin());
  value_.evicted(std::get<0>(*idle_ends_.begin()));
  num_evicted_ += 1;
  reuse_.lose(victim, find(victim)->used_at);
  lose_l2(victim);
  erase_if_unused(victim);
  return true;
}

// Marks the page as coming: its parent is then no end of a chain, so room is not made of it.
OwnedPages LowerTiers::take_page(const PageHash& hash, const PageHash& parent) {
  OwnedPages page(pool_, PageOwner::kInFlight);
  Entry& entry = make(hash);
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
  tickets_.emplace_hint(tickets_.end(), ticket,
                        Ticket{kind, hash, std::move(source), std::move(target)});
  return ticket;
}

bool LowerTiers::write_back(PagePool& l1, PageId source, const PageName& name) {
  if (is_in_l2(name.hash) || is_coming_to_l2(name.hash)) {
    want(name.hash);
    return true;
  }
  make(name);
  want(name.hash);
  OwnedPages target = take_page(name.hash, name.parent);
  if (target.is_empty()) return false;
  find_standing(name.hash);
  const std::int32_t page = target[0].value;
  issue(MoveKind::kWriteBack, name.hash, PageHold(l1, source), std::move(target), source.value,
        page);
  return true;
}

std::int64_t LowerTiers::fetch(const PageHash& hash) {
  const PageHash parent = find(hash)->parent;
  want(hash);
  OwnedPages target = take_page(hash, parent);
  if (target.is_empty()) return -1;
  find_standing(hash);
  find(hash)->is_awaited = true;
  const std::int32_t page = target[0].value;
  return issue(MoveKind::kFetch, hash, PageHold(), std::move(target), -1, page);
}

std::int64_t LowerTiers::load_back(const PageHash& hash, PageId target) {
  Entry& entry = *find(hash);
  forget(hash, entry);
  entry.num_readers += 1;
  entry.last_used_ms = now_ms_;
  entry.used_at = reuse_.now();
  entry.is_awaited = false;
  revalue(entry);
  return issue(MoveKind::kLoadBack, hash, PageHold(pool_, entry.l2[0]),
               OwnedPages(pool_, PageOwner::kInFlight), entry.l2[0].value, target.value);
}

void LowerTiers::store(const PageHash& hash) {
  Entry& entry = *find(hash);
  if (!options_.use_l3 || entry.in_l3 || entry.is_going) return;
  forget(hash, entry);
  entry.num_readers += 1;
  entry.is_going = true;
  issue(MoveKind::kStore, hash, PageHold(pool_, entry.l2[0]),
        OwnedPages(pool_, PageOwner::kInFlight), entry.l2[0].value, -1);
}

// A page that comes to L2 takes along what lies before it and the store did not take: without that it
// is worth nothing there. Heads first; not too often, as the store may take nothing at all.
void LowerTiers::store_behind_heads(const PageHash& hash) {
  std::vector<PageHash> chain{hash};
  const Entry* entry = find(hash);
  while (now_ms_ >= offer_again_ms_ && chain.size() < kMostOfferedAgain &&
         entry->parent != kRootHash) {
    const PageHash before = entry->parent;
    entry = find(before);
    if (entry == nullptr || entry->l2.is_empty() || entry->in_l3 || entry->is_going ||
        entry->is_unwanted) {
      break;
    }
    chain.push_back(before);
  }
  if (chain.size() > 1) offer_again_ms_ = now_ms_ + kOfferAgainMs;
  for (auto at = chain.rbegin(); at != chain.rend(); ++at) store(*at);
}

// The store does not have it after all: what L2 has of it goes there again. A fetch under way finds
// out by itself.
bool LowerTiers::lose_l3(const PageHash& hash) {
  const Entry* entry = find(hash);
  if (entry == nullptr || !entry->in_l3 || entry->is_coming) return false;
  set_l3(hash, false);
  if (!entry->l2.is_empty() && !entry->is_unwanted) store(hash);
  erase_if_unused(hash);
  return true;
}

bool LowerTiers::is_in_flight(std::int64_t ticket) const {
  return tickets_.contains(ticket) && (moves_.empty() || ticket < moves_.front().ticket);
}

bool LowerTiers::is_over(std::int64_t ticket) const {
  return tickets_.empty() || tickets_.begin()->first > ticket;
}

void LowerTiers::ack(std::int64_t ticket, bool ok) {
  auto node = tickets_.extract(ticket);
  Ticket& done = node.mapped();
  const PageHash hash = done.hash;
  const PageHash parent = find(hash)->parent;
  finish(done, ok);
  drop_unwanted(find(hash) == nullptr ? parent : hash);
}

void LowerTiers::finish(Ticket& done, bool ok) {
  const PageHash hash = done.hash;
  Entry& entry = *find(hash);
  num_lost_ += ok ? 0 : 1;
  if (done.kind == MoveKind::kWriteBack || done.kind == MoveKind::kFetch) {
    if (ok) {
      settle_in(hash, std::move(done.target));
      if (done.kind == MoveKind::kWriteBack && !entry.is_unwanted) store_behind_heads(hash);
      return;
    }
    const PageHash parent = entry.parent;
    entry.is_coming = false;
    num_leased_lost_ += entry.num_l2_leases > 0 ? 1 : 0;
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

}  // namespace moorage
