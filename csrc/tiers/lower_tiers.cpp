// SPDX-License-Identifier: Apache-2.0
// What lies where, in which order it is evicted, and who wants it kept.
#include "tiers/lower_tiers.h"

#include <algorithm>

namespace moorage {

LowerTiers::LowerTiers(TierOptions options, KvEventLog& log)
    : options_(options),
      log_(log),
      pool_(options.num_l2_pages),
      value_(options.eviction, options.attention_len),
      reuse_(options.num_l2_pages) {
  entries_.reserve(static_cast<std::size_t>(options.num_l2_pages));
}

void LowerTiers::set_now(TimeMs now_ms) {
  now_ms_ = now_ms;
  while (!deadlines_.empty() && std::get<TimeMs>(*deadlines_.begin()) <= now_ms) {
    const auto [until, tier, hash] = *deadlines_.begin();
    end_hold(tier, hash);
    if (tier == Tier::kL2) {
      leave_l2_for_l3(hash);
    } else {
      leave_l3(hash);
    }
  }
}

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

LowerTiers::Entry& LowerTiers::make(const PageName& name) {
  Entry& entry = make(name.hash);
  entry.parent = name.parent;
  entry.end = name.end;
  return entry;
}

bool LowerTiers::is_idle_end(const Entry& entry) {
  return !entry.l2.is_empty() && entry.num_readers == 0 && entry.num_children == 0 &&
         entry.num_l2_leases == 0;
}

LowerTiers::Key LowerTiers::key_of(const PageHash& hash, const Entry& entry) {
  return {entry.keep_value, entry.last_used_ms, entry.sequence, hash};
}

void LowerTiers::remember(const PageHash& hash, const Entry& entry) {
  if (is_idle_end(entry)) idle_ends_.insert(key_of(hash, entry));
}

void LowerTiers::forget(const PageHash& hash, const Entry& entry) {
  if (is_idle_end(entry)) idle_ends_.erase(key_of(hash, entry));
}

// Requires: it is forgotten.
void LowerTiers::revalue(Entry& entry) {
  entry.keep_value = value_.of(entry.end, entry.return_permille, entry.l2_until_ms > 0);
  if (entry.is_on_probation && !entry.is_awaited) {
    entry.keep_value = value_.on_probation(entry.keep_value);
  }
}

void LowerTiers::add_child(const PageHash& parent) {
  if (parent == kRootHash) return;
  Entry& entry = make(parent);
  forget(parent, entry);
  entry.num_children += 1;
  want(parent);
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
      entry->is_going || entry->num_readers > 0 || entry->num_children > 0 ||
      entry->num_l3_children > 0 || entry->num_l2_leases > 0 || entry->num_l3_leases > 0) {
    return;
  }
  end_hold(Tier::kL2, hash);
  end_hold(Tier::kL3, hash);
  entries_.erase(hash);
}

void LowerTiers::settle_in(const PageHash& hash, OwnedPages page) {
  Entry& entry = *find(hash);
  entry.is_coming = false;
  entry.last_used_ms = now_ms_;
  entry.used_at = reuse_.now();
  entry.l2.append(std::move(page));
  revalue(entry);
  remember(hash, entry);
  log(KvEventKind::kStored, Tier::kL2, hash, entry.parent);
}

void LowerTiers::lose_l2(const PageHash& hash) {
  Entry& entry = *find(hash);
  if (entry.l2.is_empty()) return;
  const PageHash parent = entry.parent;
  forget(hash, entry);
  entry.l2.free_back(1);
  num_leased_lost_ += entry.num_l2_leases > 0 ? 1 : 0;
  log(KvEventKind::kRemoved, Tier::kL2, hash, parent);
  inherit(parent, entry);
  end_hold(Tier::kL2, hash);
  remove_child(parent);
}

// The end of a chain goes: what was said of it is said of the page before it.
void LowerTiers::inherit(const PageHash& parent, const Entry& child) {
  Entry* entry = parent == kRootHash ? nullptr : find(parent);
  if (entry == nullptr || entry->l2.is_empty() || entry->num_children > 1 ||
      entry->last_used_ms > child.last_used_ms ||
      entry->is_on_probation != child.is_on_probation) {
    return;
  }
  entry->used_at = std::max(entry->used_at, child.used_at);
  entry->return_permille = child.return_permille;
  entry->keep_value = child.keep_value;
  if (child.l2_until_ms > entry->l2_until_ms) {
    end_hold(Tier::kL2, parent);
    entry->l2_until_ms = child.l2_until_ms;
    deadlines_.insert({entry->l2_until_ms, Tier::kL2, parent});
  }
}

void LowerTiers::set_l3(const PageHash& hash, bool in_l3) {
  Entry& entry = *find(hash);
  if (entry.in_l3 == in_l3) return;
  const PageHash parent = entry.parent;
  entry.in_l3 = in_l3;
  num_l3_pages_ += in_l3 ? 1 : -1;
  log(in_l3 ? KvEventKind::kStored : KvEventKind::kRemoved, Tier::kL3, hash, parent);
  if (parent != kRootHash) make(parent).num_l3_children += in_l3 ? 1 : -1;
  if (!in_l3) {
    num_leased_lost_ += entry.num_l3_leases > 0 ? 1 : 0;
    l3_order_.erase({entry.l3_sequence, hash});
    end_hold(Tier::kL3, hash);
    return erase_if_unused(parent);
  }
  entry.l3_sequence = next_l3_sequence_++;
  if (entry.num_l3_leases == 0) l3_order_.insert({entry.l3_sequence, hash});
  while (num_l3_pages_ > options_.num_l3_pages && !l3_order_.empty()) {
    const PageHash oldest = l3_order_.begin()->second;
    set_l3(oldest, false);
    if (oldest != hash) erase_if_unused(oldest);
  }
}

void LowerTiers::log(KvEventKind kind, Tier tier, const PageHash& hash, const PageHash& parent) {
  log_.add({kind, tier, hash, parent, options_.page_size});
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

std::vector<PageName> LowerTiers::names() const {
  std::vector<PageName> names;
  for (const auto& [hash, entry] : entries_) {
    if (!entry.l2.is_empty() || entry.in_l3) names.push_back({hash, entry.parent, entry.end});
  }
  std::sort(names.begin(), names.end(), [](const PageName& left, const PageName& right) {
    return std::tie(left.end, left.hash) < std::tie(right.end, right.hash);
  });
  return names;
}

bool LowerTiers::is_coming_to_l2(const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && entry->is_coming;
}

bool LowerTiers::is_going_to_l3(const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && entry->is_going;
}

bool LowerTiers::is_moving(const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && (entry->is_coming || entry->num_readers > 0);
}

void LowerTiers::touch(const PageHash& hash) {
  Entry* entry = find(hash);
  if (entry == nullptr) return;
  want(hash);
  forget(hash, *entry);
  entry->last_used_ms = now_ms_;
  entry->used_at = reuse_.now();
  revalue(*entry);
  remember(hash, *entry);
}

// ---- reuse -------------------------------------------------------------------------------------

void LowerTiers::note_use(std::span<const PageHash> hashes) {
  std::int64_t used_at = 0, num_again = 0;
  for (const PageHash& hash : hashes) {
    Entry* const found = find(hash);  // null: it made room a moment ago
    if (found == nullptr || found->l2.is_empty() || found->is_awaited) {
      continue;  // counted when it comes, or came
    }
    Entry& entry = *found;
    forget(hash, entry);
    entry.is_awaited = true;
    entry.is_on_probation = false;
    revalue(entry);
    remember(hash, entry);
    used_at = std::max(used_at, entry.used_at);
    num_again += 1;
  }
  reuse_.note(reuse_.now() - used_at + num_again, num_again);
}

std::int64_t LowerTiers::next_victim_used_at() const {
  const auto at = idle_ends_.lower_bound(Key{0, 0, -1, PageHash{}});
  return at == idle_ends_.end() ? reuse_.now() : find(std::get<PageHash>(*at))->used_at;
}

// A page comes to L2. What nobody has lost goes with the page before it.
void LowerTiers::find_standing(const PageHash& hash) {
  const ReuseHistory::Found found = reuse_.find_lost(hash);
  Entry& entry = *find(hash);
  const Entry* before = find(entry.parent);
  entry.is_on_probation = before != nullptr && before->is_on_probation;
  if (!found.was_lost) return;
  reuse_.note(found.distance, 1);
  if (options_.eviction == EvictionPolicy::kValue && reuse_.is_looping() &&
      found.distance >= reuse_.now() - next_victim_used_at()) {
    entry.is_on_probation = true;
  }
}

// ---- valuing -----------------------------------------------------------------------------------

void LowerTiers::value(const PageHash& hash, std::int32_t return_permille) {
  Entry* entry = find(hash);
  if (entry == nullptr) return;
  want(hash);
  forget(hash, *entry);
  entry->return_permille = return_permille;
  revalue(*entry);
  remember(hash, *entry);
}

void LowerTiers::hold(const PageHash& hash, TimeMs l2_until_ms, TimeMs l3_until_ms) {
  Entry* entry = find(hash);
  if (entry == nullptr) return;
  want(hash);
  end_hold(Tier::kL2, hash);
  end_hold(Tier::kL3, hash);
  forget(hash, *entry);
  entry->l2_until_ms = l2_until_ms;
  entry->l3_until_ms = l3_until_ms;
  if (l2_until_ms > 0) deadlines_.insert({l2_until_ms, Tier::kL2, hash});
  if (l3_until_ms > 0) deadlines_.insert({l3_until_ms, Tier::kL3, hash});
  revalue(*entry);
  remember(hash, *entry);
}

void LowerTiers::end_hold(Tier tier, const PageHash& hash) {
  Entry& entry = *find(hash);
  TimeMs& until = tier == Tier::kL2 ? entry.l2_until_ms : entry.l3_until_ms;
  if (until > 0) deadlines_.erase({std::exchange(until, 0), tier, hash});
}

// Nobody asks for the end of this chain in L2 any longer: what L3 has of it goes, the rest is worth
// nothing more than its room.
void LowerTiers::leave_l2_for_l3(PageHash hash) {
  value(hash, 0);
  while (hash != kRootHash) {
    Entry* entry = find(hash);
    if (entry == nullptr || !is_idle_end(*entry) || entry->l2_until_ms > 0) return;
    if (!entry->in_l3) return value(hash, 0);
    const PageHash parent = entry->parent;
    lose_l2(hash);
    hash = parent;
  }
}

void LowerTiers::leave_l3(PageHash hash) {
  while (hash != kRootHash) {
    const Entry* entry = find(hash);
    if (entry == nullptr || !entry->in_l3 || entry->num_l3_children > 0 ||
        entry->num_l3_leases > 0 || entry->l3_until_ms > 0 || entry->is_coming) {
      return;
    }
    const PageHash parent = entry->parent;
    set_l3(hash, false);
    erase_if_unused(hash);
    hash = parent;
  }
}

// ---- leases ------------------------------------------------------------------------------------

void LowerTiers::lease(Tier tier, const PageHash& hash) {
  Entry& entry = *find(hash);
  want(hash);
  if (tier == Tier::kL2) {
    forget(hash, entry);
    num_l2_leased_ += entry.num_l2_leases++ == 0 ? 1 : 0;
    return remember(hash, entry);
  }
  if (entry.num_l3_leases++ > 0) return;
  num_l3_leased_ += 1;
  l3_order_.erase({entry.l3_sequence, hash});
}

void LowerTiers::unlease(Tier tier, const PageHash& hash) {
  Entry& entry = *find(hash);
  if (tier == Tier::kL2) {
    forget(hash, entry);
    num_l2_leased_ -= --entry.num_l2_leases == 0 ? 1 : 0;
    remember(hash, entry);
  } else if (--entry.num_l3_leases == 0) {
    num_l3_leased_ -= 1;
    if (entry.in_l3) l3_order_.insert({entry.l3_sequence, hash});
  }
  erase_if_unused(hash);
}

bool LowerTiers::is_leased(Tier tier, const PageHash& hash) const {
  const Entry* entry = find(hash);
  return entry != nullptr && (tier == Tier::kL2 ? entry->num_l2_leases : entry->num_l3_leases) > 0;
}

// ---- from outside ------------------------------------------------------------------------------

void LowerTiers::adopt_l2(const PageName& name, PageId page) {
  if (is_in_l2(name.hash) || is_coming_to_l2(name.hash)) return;
  OwnedPages owned(pool_, PageOwner::kInFlight);
  const PageId one[] = {page};
  owned.take(one);
  make(name);
  add_child(name.parent);
  settle_in(name.hash, std::move(owned));
}

void LowerTiers::adopt_l3(const PageName& name) {
  make(name);
  set_l3(name.hash, true);
  erase_if_unused(name.hash);
}

bool LowerTiers::is_on_its_way(const Entry& entry) {
  return entry.is_coming || entry.num_readers > 0;
}

// Nobody but `next` follows it, nobody was promised it, nobody waits for it.
bool LowerTiers::may_drop(const Entry& entry, const Entry* next) const {
  const bool next_in_l2 = next != nullptr && (!next->l2.is_empty() || next->is_coming);
  const bool next_in_l3 = next != nullptr && next->in_l3;
  return entry.num_children == (next_in_l2 ? 1 : 0) &&
         entry.num_l3_children == (next_in_l3 ? 1 : 0) && entry.num_l2_leases == 0 &&
         entry.num_l3_leases == 0 && entry.num_readers == (entry.is_going ? 1 : 0) &&
         !(entry.is_coming && entry.is_awaited);
}

LowerTiers::Dropped LowerTiers::drop(std::span<const PageHash> hashes) {
  Dropped dropped;
  const Entry* next = nullptr;  // the one behind, which stays for now
  for (auto at = hashes.rbegin(); at != hashes.rend(); ++at) {
    Entry* entry = find(*at);
    if (entry == nullptr) {
      next = nullptr;
      continue;
    }
    if (!may_drop(*entry, next)) break;
    dropped.num_pages += !entry->l2.is_empty() || entry->in_l3 || entry->is_coming ? 1 : 0;
    if (next != nullptr || is_on_its_way(*entry)) {
      entry->is_unwanted = true;
      dropped.num_unwanted += 1;
      next = entry;
      continue;
    }
    lose_l2(*at);
    set_l3(*at, false);
    erase_if_unused(*at);
  }
  return dropped;
}

// Somebody uses it after all, and with it what lies before.
void LowerTiers::want(const PageHash& hash) {
  for (Entry* entry = find(hash); entry != nullptr && std::exchange(entry->is_unwanted, false);) {
    entry = entry->parent == kRootHash ? nullptr : find(entry->parent);
  }
}

// Nothing moves it any longer, perhaps.
void LowerTiers::drop_unwanted(PageHash hash) {
  while (hash != kRootHash) {
    const Entry* entry = find(hash);
    if (entry == nullptr || !entry->is_unwanted || is_on_its_way(*entry) ||
        !may_drop(*entry, nullptr)) {
      return;
    }
    const PageHash parent = entry->parent;
    lose_l2(hash);
    set_l3(hash, false);
    erase_if_unused(hash);
    hash = parent;
  }
}

bool LowerTiers::let_go_of_l2(const PageHash& hash) {
  const Entry* entry = find(hash);
  if (entry == nullptr) return true;
  if (!is_idle_end(*entry)) return entry->l2.is_empty() && !entry->is_coming;
  lose_l2(hash);
  erase_if_unused(hash);
  return true;
}

std::string LowerTiers::find_broken_invariant() const {
  std::size_t num_pages = pool_.free_list().size() + pool_.orphans().size(), num_ends = 0;
  std::size_t num_l3_idle = 0, num_holds = 0;
  std::int64_t num_l3 = 0, num_l2_leased = 0, num_l3_leased = 0;
  std::unordered_map<PageHash, std::pair<int, int>, HashOfHash> children;
  for (const auto& [hash, entry] : entries_) {
    num_pages += static_cast<std::size_t>(entry.l2.size());
    num_l3 += entry.in_l3 ? 1 : 0;
    num_ends += is_idle_end(entry) ? 1 : 0;
    num_l3_idle += entry.in_l3 && entry.num_l3_leases == 0 ? 1 : 0;
    num_l2_leased += entry.num_l2_leases > 0 ? 1 : 0;
    num_l3_leased += entry.num_l3_leases > 0 ? 1 : 0;
    num_holds += (entry.l2_until_ms > 0 ? 1 : 0) + (entry.l3_until_ms > 0 ? 1 : 0);
    children[entry.parent].first += !entry.l2.is_empty() || entry.is_coming ? 1 : 0;
    children[entry.parent].second += entry.in_l3 ? 1 : 0;
    if (entry.l2.size() > 1) return "a page lies twice in L2";
    if (entry.is_coming && !entry.l2.is_empty()) return "a page comes to L2 and is there";
    if (is_idle_end(entry) && !idle_ends_.contains(key_of(hash, entry))) {
      return "an idle end is not in the L2 eviction order";
    }
  }
  for (const auto& [hash, entry] : entries_) {
    const auto found = children.find(hash);
    const std::pair<int, int> count = found == children.end() ? std::pair(0, 0) : found->second;
    if (count != std::pair(entry.num_children, entry.num_l3_children)) {
      return "a page counts other children than it has";
    }
  }
  for (const auto& [id, ticket] : tickets_) {
    num_pages += static_cast<std::size_t>(ticket.target.size());
    if (!entries_.contains(ticket.hash)) return "a ticket moves a page nobody knows";
  }
  if (num_pages != static_cast<std::size_t>(pool_.num_pages())) return "an L2 page is in no place";
  if (num_ends != idle_ends_.size()) return "the L2 eviction order lacks a page or has one too many";
  if (num_l3_idle != l3_order_.size()) return "the L3 order lacks a page or has one too many";
  if (num_holds != deadlines_.size()) return "a deadline is lost";
  if (num_l2_leased != num_l2_leased_ || num_l3_leased != num_l3_leased_) {
    return "a count of leased pages is off";
  }
  return num_l3 == num_l3_pages_ ? "" : "the count of L3 pages is off";
}

}  // namespace moorage
