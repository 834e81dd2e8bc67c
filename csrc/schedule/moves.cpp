// SPDX-License-Identifier: Apache-2.0
// What the owner of a prefix asks for from outside: where it lies, that it be moved, kept for a
// while, taken in after a restart.
#include <algorithm>
#include <stdexcept>

#include "schedule/scheduler.h"

namespace moorage {
namespace {

[[noreturn]] void reject(const std::string& field, const std::string& why) {
  throw std::invalid_argument(field + ": " + why);
}

// While it lives, L2 makes no room of these pages of a prefix that is moved to `tier`, as far as
// that does not have them yet.
class KeptInL2 {
 public:
  KeptInL2(LowerTiers& tiers, Tier tier, std::span<const PageHash> names) : tiers_(tiers) {
    const auto is_kept = [&](const PageHash& hash) {
      return (tiers.is_in_l2(hash) || tiers.is_coming_to_l2(hash)) &&
             !(tier == Tier::kL3 && tiers.is_in_l3(hash));
    };
    for (std::size_t i = 0; i < names.size(); ++i) {  // the end of a run keeps what lies before it
      if (!is_kept(names[i]) || (i + 1 < names.size() && is_kept(names[i + 1]))) continue;
      tiers_.lease(Tier::kL2, names[i]);
      ends_.push_back(names[i]);
    }
  }
  KeptInL2(const KeptInL2&) = delete;
  KeptInL2& operator=(const KeptInL2&) = delete;
  ~KeptInL2() { release(); }

  void release() {
    for (const PageHash& hash : std::exchange(ends_, {})) tiers_.unlease(Tier::kL2, hash);
  }

 private:
  LowerTiers& tiers_;
  std::vector<PageHash> ends_;
};

// Of a prefix's pages, those that L1 does not have.
std::span<const PageHash> behind(const std::vector<PageHash>& names, std::size_t num_in_l1) {
  return std::span(names).subspan(std::min(num_in_l1, names.size()));
}

}  // namespace

// ---- looking -----------------------------------------------------------------------------------

PageNames Scheduler::names_of(const std::string& salt, TokenSpan tokens,
                              const PrefixMatch& match) const {
  PageNames names{hash_namespace(config_.model_fingerprint, salt), {}};
  for (const auto& [page, hash] : tree_.full_pages(match)) names.pages.push_back(hash);
  const auto num_full = static_cast<std::int32_t>(tokens.size()) / config_.page_size;
  if (num_full > 0) page_hash(names, tokens, num_full - 1);
  return names;
}

PrefixDepth Scheduler::query_prefix(TokenSpan tokens, const std::string& salt) const {
  const PrefixMatch match = tree_.find(salt, tokens);
  PrefixDepth depth{match.len(), 0, 0, 0};
  if (!tiers_.is_enabled()) return depth;
  PageNames names{hash_namespace(config_.model_fingerprint, salt), {}};
  for (const PageHash& hash : pages_below(names, tokens, match)) {
    (tiers_.is_in_l2(hash) ? depth.l2 : depth.l3) += config_.page_size;
  }
  if (depth.l2 + depth.l3 > 0) depth.l1 = match.full_len;
  if (tiers_.num_in_flight() == 0 && orders_.empty()) return depth;
  names = names_of(salt, tokens, match);
  for (const PageHash& hash : names.pages) {
    const bool is_moving = tiers_.is_moving(hash) || loading_.contains(hash);
    depth.pending += is_moving ? config_.page_size : 0;
  }
  for (const auto& [id, order] : orders_) {
    if (names.pages.empty() || order.names.pages.back() != names.pages.back()) continue;
    depth.pending = std::max(depth.pending, order.last.tokens_pending);
  }
  return depth;
}

// ---- moving ------------------------------------------------------------------------------------

MoveResult Scheduler::move(TokenSpan tokens, MoveTarget target, const std::string& salt) {
  if (target == MoveTarget::kL3 && !config_.use_l3) reject("tier", "'l3' needs use_l3");
  MoveOrder order;
  order.names = names_of(salt, tokens, tree_.find(salt, tokens));
  const auto num_full = static_cast<std::int32_t>(order.names.pages.size());
  const auto same = std::ranges::find_if(orders_, [&](const auto& other) {
    return num_full > 0 && other.second.names.pages.back() == order.names.pages.back();
  });
  if (same != orders_.end() && same->second.target == target) return same->second.last;
  if (same != orders_.end()) orders_.erase(same);  // the newest wish counts
  if (target == MoveTarget::kNone) {
    const Forgotten gone = forget(salt, tokens, 0);
    const std::int32_t pending = gone.num_unwanted * config_.page_size;
    return {0, pending, num_full * config_.page_size - pending,
            gone.num_l1_pages + gone.num_lower_pages};
  }
  if (num_full == 0 || !tiers_.is_enabled()) {
    const std::int32_t there = target == MoveTarget::kL1 ? tree_.find(salt, tokens).full_len : 0;
    return {there, 0, num_full * config_.page_size - there, 0};
  }
  order.target = target;
  order.salt = salt;
  order.tokens.assign(tokens.begin(), tokens.end());
  const MoveResult result = order.last = work_on(order);
  if (result.tokens_pending == 0) return result;
  if (orders_.size() >= MoveOrder::kMaxOrders) orders_.erase(orders_.begin());
  orders_.emplace(next_order_++, std::move(order));
  return result;
}

// From the end on, until what is kept or what somebody else uses, leases or goes on from. What stays
// in L1 for such a reason stays below too.
Scheduler::Forgotten Scheduler::forget(const std::string& salt, TokenSpan tokens,
                                       std::int32_t keep_tokens) {
  Forgotten gone;
  gone.num_l1_pages = tree_.drop(salt, tokens, keep_tokens);
  if (!tiers_.is_enabled()) return gone;
  const PrefixMatch match = tree_.find(salt, tokens);
  const PageNames names = names_of(salt, tokens, match);
  const auto num_kept = static_cast<std::size_t>(
      std::max(config_.pages_of(keep_tokens), match.full_len / config_.page_size));
  if (num_kept >= names.pages.size()) return gone;
  const LowerTiers::Dropped dropped =
      tiers_.drop(std::span<const PageHash>(names.pages).subspan(num_kept));
  gone.num_lower_pages = dropped.num_pages;
  gone.num_unwanted = dropped.num_unwanted;
  return gone;
}

MoveResult Scheduler::work_on(MoveOrder& order) {
  const PrefixMatch match = tree_.find(order.salt, order.tokens);
  probe_for(order, match);
  MoveResult result;
  switch (order.target) {
    case MoveTarget::kL1: result = bring_up(order, match); break;
    case MoveTarget::kL2: result = bring_to_l2(order, match); break;
    case MoveTarget::kL3: result = bring_to_l3(order, match); break;
    case MoveTarget::kNone: break;
  }
  if (probes_.contains(order.probe_id)) {  // what nobody knows of may be in the store
    result.tokens_pending += std::exchange(result.tokens_missing, 0);
  }
  order.waits_for = tiers_.newest_ticket();
  const bool moves = !tiers_.is_over(order.waits_for);
  order.not_before_ms = moves ? now_ms_ : now_ms_ + MoveOrder::kRetryMs;
  return result;
}

// Once an order: after a restart the store may have what nobody here knows of.
void Scheduler::probe_for(MoveOrder& order, const PrefixMatch& match) {
  if (!config_.probe_l3 || std::exchange(order.has_asked, true)) return;
  while (!asked_.empty() && asked_.front().first + MoveOrder::kAskAgainMs <= now_ms_) {
    asked_.pop_front();
  }
  const std::span<const PageHash> names = order.names.pages;
  if (std::ranges::find(asked_, names.back(), [](const auto& at) { return at.second; }) !=
      asked_.end()) {
    return;  // whoever asks how far an order is, when it is over, makes it anew
  }
  const auto first = static_cast<std::size_t>(match.full_len / config_.page_size);
  for (std::size_t i = first; i < names.size(); ++i) {
    const PageHash& hash = names[i];
    if (tiers_.is_in_l2(hash) || tiers_.is_in_l3(hash) || tiers_.is_coming_to_l2(hash)) continue;
    order.probe_id = ask_store(names, i);
    return;
  }
}

void Scheduler::note_answer(std::int64_t probe_id) {
  for (auto& [id, order] : orders_) {
    if (order.probe_id != probe_id) continue;
    order.not_before_ms = now_ms_;
    asked_.emplace_back(now_ms_, order.names.pages.back());
  }
}

// Prefetches into what memory nobody runs in or leases.
MoveResult Scheduler::bring_up(MoveOrder& order, PrefixMatch match) {
  const auto num_full = static_cast<std::int32_t>(order.names.pages.size());
  const std::int32_t first = match.full_len / config_.page_size;
  std::vector<PageHash> ready;
  std::int32_t end = first;
  bool is_ready = true;
  for (; end < num_full; ++end) {
    const PageHash& hash = order.names.pages[static_cast<std::size_t>(end)];
    is_ready &= tiers_.is_in_l2(hash) || tiers_.is_in_l3(hash);
    if (!is_ready && !tiers_.is_coming_to_l2(hash)) break;
    if (is_ready) ready.push_back(hash);
  }
  const TreePages on_path = tree_.pages_on_path(match);
  const TreePages& cached = tree_.pages();
  const std::int32_t room = pool_.num_free() + cached.evictable - on_path.evictable -
                            (cached.idle_leased - on_path.idle_leased) - num_promised_pages() -
                            pool_.num_held();
  ready.resize(static_cast<std::size_t>(
      std::clamp<std::int64_t>(room, 0, static_cast<std::int64_t>(ready.size()))));
  MoveResult result{match.full_len, (end - first) * config_.page_size,
                    (num_full - end) * config_.page_size, 0};
  if (ready.empty()) return result;
  const std::int64_t newest = next_transfer_;
  std::int64_t id = start_transfer(order.salt, order.tokens, match, ready);
  if (id < 0 && !tiers_.is_in_l2(ready[0])) {  // L2 is full, perhaps of what L1 has by now
    std::span<const PageHash> above(order.names.pages.data(), static_cast<std::size_t>(first));
    const auto let_go = [&] {
      const bool is_gone = tiers_.let_go_of_l2(above.back());
      above = above.first(above.size() - (is_gone ? 1 : 0));
      return is_gone;
    };
    while (!above.empty() && tiers_.is_in_l3(above.back()) && let_go()) {}
    while (tiers_.pool().num_free() == 0 && !above.empty() && let_go()) {}  // one that L1 alone has
    id = start_transfer(order.salt, order.tokens, match, ready);
  }
  if (id >= newest) {
    result.num_pages = static_cast<std::int32_t>(transfers_.at(id).hashes.size());
  }
  return result;
}

// One page of a prefix from L1 to L2; false: there is no room.
bool Scheduler::send_down(const MoveOrder& order, std::span<const RadixTree::NamedPage> pages,
                          std::size_t index) {
  const PageName name{pages[index].hash, index > 0 ? order.names.pages[index - 1] : kRootHash,
                      static_cast<std::int32_t>(index + 1) * config_.page_size};
  return tiers_.write_back(pool_, pages[index].page, name);
}

// Nothing leaves L1 before L2 has room for all of it, and none of that room is what L2 alone has of
// the prefix.
MoveResult Scheduler::bring_to_l2(MoveOrder& order, const PrefixMatch& match) {
  const std::vector<RadixTree::NamedPage> in_l1 = tree_.full_pages(match);
  const KeptInL2 kept(tiers_, Tier::kL2, behind(order.names.pages, in_l1.size()));
  MoveResult result;
  std::vector<PageHash> only_in_l3;
  bool has_room = true;
  for (std::size_t i = 0; i < order.names.pages.size(); ++i) {
    const PageHash& hash = order.names.pages[i];
    if (tiers_.is_in_l2(hash)) {
      result.tokens_there += config_.page_size;
    } else if (tiers_.is_coming_to_l2(hash)) {
      result.tokens_pending += config_.page_size;
    } else if (i < in_l1.size()) {
      has_room = has_room && send_down(order, in_l1, i);
      result.tokens_pending += config_.page_size;
    } else if (tiers_.is_in_l3(hash)) {
      only_in_l3.push_back(hash);
      result.tokens_pending += config_.page_size;
    } else {
      result.tokens_missing += config_.page_size;
    }
  }
  if (has_room) start_fetch(only_in_l3);
  if (has_room) result.num_pages = tree_.drop(order.salt, order.tokens, 0);
  return result;
}

// Heads first, as a store takes no page before the one it follows: a tail that waited in L2 for its
// head could keep the head out. Where L2 is smaller than the prefix, what the store has makes room
// for what comes behind it, before what others have there does. L1 keeps what the store does not
// have yet, so that a page that waits in L2 may make room for others.
MoveResult Scheduler::bring_to_l3(MoveOrder& order, const PrefixMatch& match) {
  const std::vector<RadixTree::NamedPage> in_l1 = tree_.full_pages(match);
  const std::vector<PageHash>& names = order.names.pages;
  KeptInL2 kept(tiers_, Tier::kL3, behind(names, in_l1.size()));
  std::size_t end = names.size();  // what may leave L2 lies before it
  const auto send = [&](std::size_t index) {
    while (tiers_.pool().num_free() == 0 && end > 0) {
      end -= 1;
      if (tiers_.is_in_l3(names[end])) tiers_.let_go_of_l2(names[end]);
    }
    if (send_down(order, in_l1, index)) return true;
    kept.release();  // a tail is worth less than its head
    return send_down(order, in_l1, index);
  };
  MoveResult result;
  bool has_room = true, has_heads = true;
  bool may_store = true;  // the store has the page before, or is given it
  std::size_t num_kept = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const PageHash& hash = names[i];
    const bool in_l3 = tiers_.is_in_l3(hash), in_l2 = tiers_.is_in_l2(hash);
    const bool is_coming = tiers_.is_coming_to_l2(hash);
    has_heads = has_heads && (in_l3 || in_l2 || is_coming || i < in_l1.size());
    if (in_l3 && !is_coming) {  // what comes once more is let go of when it has come
      may_store = true;
      result.tokens_there += config_.page_size;
      continue;
    }
    (has_heads ? result.tokens_pending : result.tokens_missing) += config_.page_size;
    if (!has_heads) continue;
    num_kept = i + 1;
    if (in_l2 && may_store) tiers_.store(hash);
    if (!in_l2 && !is_coming) has_room = has_room && send(i);
    may_store = in_l3 || tiers_.is_going_to_l3(hash);
  }
  kept.release();
  for (std::size_t i = names.size(); i-- > num_kept && tiers_.is_in_l3(names[i]);) {
    if (!tiers_.let_go_of_l2(names[i])) break;
  }
  result.num_pages = tree_.drop(order.salt, order.tokens,
                                static_cast<std::int32_t>(num_kept) * config_.page_size);
  return result;
}

// All is there, or nothing came nearer for too long.
bool Scheduler::is_over(MoveOrder& order, const MoveResult& result) const {
  if (result.tokens_pending == 0) return true;
  if (probes_.contains(order.probe_id)) return false;
  std::int32_t reached = 2 * result.tokens_there;
  if (order.target == MoveTarget::kL1) {
    for (const PageHash& hash : order.names.pages) {
      reached += tiers_.is_in_l2(hash) ? config_.page_size : 0;
    }
  }
  const std::int64_t lost_before = std::exchange(order.num_lost, tiers_.num_lost());
  if (reached <= order.best) {
    // Whoever loses what it is given at once is not asked again at once.
    if (order.num_lost > lost_before) order.not_before_ms = now_ms_ + MoveOrder::kRetryMs;
    return ++order.num_stalls > MoveOrder::kMaxStalls;
  }
  order.best = reached;
  order.num_stalls = 0;
  return false;
}

void Scheduler::work_on_orders() {
  for (auto at = orders_.begin(); at != orders_.end();) {
    MoveOrder& order = at->second;
    if (now_ms_ < order.not_before_ms || !tiers_.is_over(order.waits_for)) {
      ++at;
      continue;
    }
    order.last = work_on(order);
    at = is_over(order, order.last) ? orders_.erase(at) : std::next(at);
  }
}

// ---- keeping -----------------------------------------------------------------------------------

std::int32_t Scheduler::hint_prefix(TokenSpan tokens, std::int32_t return_permille,
                                    const std::string& salt, HoldTimes hold) {
  if (hold.l1_until_ms > 0 && hold.l1_until_ms <= now_ms_) hold.l1_until_ms = now_ms_ + 1;
  const std::int32_t found = tree_.hint(salt, tokens, return_permille, hold.l1_until_ms);
  if (!tiers_.is_enabled()) return found;
  const PageNames names = names_of(salt, tokens, tree_.find(salt, tokens));
  if (names.pages.empty()) return found;
  tiers_.value(names.pages.back(), return_permille);
  tiers_.hold(names.pages.back(), hold.l2_until_ms, hold.l3_until_ms);
  return found;
}

// Nobody wants them in L1 any longer: what L2 takes goes there, the rest goes first where there is
// pressure.
void Scheduler::end_holds() {
  for (Node* leaf : tree_.end_holds()) {
    if (write_through_.send(*leaf, 0)) tree_.drop_unwanted(*leaf);
  }
}

// ---- taking in ---------------------------------------------------------------------------------

// Every name is checked against the tokens it stands for before anything is taken.
std::int32_t Scheduler::adopt(Tier tier, TokenSpan tokens, std::span<const PageHash> hashes,
                              std::span<const PageId> pages, const std::string& salt,
                              Fragment fragment) {
  if (!tiers_.is_enabled()) reject("tier", "there is one tier only: num_l2_pages is 0");
  if (tier == Tier::kL3 && !config_.use_l3) reject("tier", "'l3' needs use_l3");
  if (tokens.size() != hashes.size() * static_cast<std::size_t>(config_.page_size)) {
    reject("token_ids", std::to_string(tokens.size()) + " tokens are not " +
                            std::to_string(hashes.size()) + " full pages");
  }
  if (pages.size() != (tier == Tier::kL2 ? hashes.size() : 0)) {
    reject("pages", std::to_string(pages.size()) + " pages for " + std::to_string(hashes.size()) +
                        " names; l2 needs one each, l3 none");
  }
  if (fragment.start < 0 || fragment.start > config_.max_context_len ||
      fragment.start % config_.page_size != 0 ||
      (fragment.start == 0) != (fragment.before == kRootHash)) {
    reject("start", std::to_string(fragment.start) +
                        " is not the end of a page in front of these, or 0 where there is none");
  }
  const PageHash space = hash_namespace(config_.model_fingerprint, salt);
  std::vector<std::int32_t> seen;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    const auto page_size = static_cast<std::size_t>(config_.page_size);
    const PageHash& before = i > 0 ? hashes[i - 1] : fragment.before;
    if (hash_page(space, before, tokens.subspan(i * page_size, page_size)) != hashes[i]) {
      reject("page_hashes" + index, "is not the name of these tokens");
    }
    if (tier == Tier::kL3) continue;
    // Known by another branch that was taken in before: nothing is taken, its page is not read.
    if (tiers_.is_in_l2(hashes[i]) || tiers_.is_coming_to_l2(hashes[i])) continue;
    const std::int32_t page = pages[i].value;
    if (page < 0 || page >= config_.num_l2_pages ||
        tiers_.pool().owner_of(pages[i]) != PageOwner::kFree) {
      reject("pages" + index, std::to_string(page) + " is not a free L2 page");
    }
    seen.push_back(page);
  }
  std::ranges::sort(seen);
  if (std::ranges::adjacent_find(seen) != seen.end()) reject("pages", "a page appears twice");
  std::int32_t num_taken = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const PageName name{hashes[i], i > 0 ? hashes[i - 1] : fragment.before,
                        static_cast<std::int32_t>(fragment.start) +
                            static_cast<std::int32_t>(i + 1) * config_.page_size};
    if (tier == Tier::kL2) {
      num_taken += tiers_.is_in_l2(hashes[i]) || tiers_.is_coming_to_l2(hashes[i]) ? 0 : 1;
      tiers_.adopt_l2(name, pages[i]);
    } else {
      num_taken += tiers_.is_in_l3(hashes[i]) ? 0 : 1;
      tiers_.adopt_l3(name);
    }
  }
  return num_taken;
}

}  // namespace moorage
