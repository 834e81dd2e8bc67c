// SPDX-License-Identifier: Apache-2.0
#include "schedule/leases.h"

#include <algorithm>

namespace moorage {

LeaseGrant LeaseBook::lease(LeaseRequest request, TimeMs now_ms) {
  release(request.lease_id);
  if (request.until_ms <= now_ms) {
    return {LeaseState::kDenied, static_cast<std::int32_t>(request.token_ids.size()), 0, "expired"};
  }
  LeaseGrant grant = try_grant(request);
  if (grant.state != LeaseState::kQueued) return grant;
  if (queue_.size() < kMaxQueued) {
    queue_.push_back(std::move(request));
  } else {
    grant.state = LeaseState::kDenied;
  }
  return grant;
}

bool LeaseBook::release(std::int64_t lease_id) {
  const auto queued = std::ranges::find(queue_, lease_id, &LeaseRequest::lease_id);
  if (queued != queue_.end()) {
    queue_.erase(queued);
    return true;
  }
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return false;
  by_deadline_.erase({found->second->until_ms, lease_id});
  detach(*found->second);
  leases_.erase(found);
  has_new_room_ = true;
  return true;
}

void LeaseBook::end(std::int64_t lease_id, LeaseEventKind kind) {
  release(lease_id);
  events_.push_back({lease_id, kind, 0});
}

void LeaseBook::tick(TimeMs now_ms) {
  while (!by_deadline_.empty() && by_deadline_.begin()->first <= now_ms) {
    end(by_deadline_.begin()->second, LeaseEventKind::kExpired);
  }
  if (!std::exchange(has_new_room_, false)) return;
  std::deque<LeaseRequest> waiting = std::exchange(queue_, {});
  for (LeaseRequest& request : waiting) {
    if (request.until_ms <= now_ms) {
      events_.push_back({request.lease_id, LeaseEventKind::kExpired, 0});
      continue;
    }
    const LeaseGrant grant = try_grant(request);
    const std::int64_t id = request.lease_id;
    switch (grant.state) {
      case LeaseState::kQueued: queue_.push_back(std::move(request)); break;
      case LeaseState::kDenied: events_.push_back({id, LeaseEventKind::kDenied, 0}); break;
      case LeaseState::kGranted:
        events_.push_back({id, LeaseEventKind::kGranted, grant.tokens_granted});
        break;
      case LeaseState::kClipped:
        events_.push_back({id, LeaseEventKind::kClipped, grant.tokens_granted});
        break;
    }
  }
}

// Every cut was made by eviction: the promise gave way to a request that had to run.
void LeaseBook::note_cuts() {
  note_losses_below();
  if (evictions_seen_ == tree_.num_evicted_pages()) return;
  evictions_seen_ = tree_.num_evicted_pages();
  std::vector<std::int64_t> lost;
  for (const auto& [id, lease] : leases_) {
    if (!std::exchange(lease->was_cut, false)) continue;
    if (demote(*lease)) {
      events_.push_back({id, LeaseEventKind::kDemoted, lease->num_tokens});
    } else if (lease->node == nullptr) {
      lost.push_back(id);
    } else {
      events_.push_back({id, LeaseEventKind::kRevoked, lease->num_tokens});
    }
  }
  for (const std::int64_t id : lost) end(id, LeaseEventKind::kRevoked);
}

// A lease that lost pages in L1 goes on in L2, if that covers more than what L1 has left of it.
bool LeaseBook::demote(Lease& lease) {
  if (!tiers_.is_enabled()) return false;
  Coverable found = coverable_below(Tier::kL2, lease.names);
  const std::int32_t most = most_pages(Tier::kL2, lease.tenant, found, &lease);
  const std::int32_t left = lease.node == nullptr ? 0 : lease.num_tokens;
  if (most * config_.page_size <= left) return false;
  found.names.resize(static_cast<std::size_t>(most));
  detach(lease);
  attach_below(lease, Tier::kL2, std::move(found.names));
  return true;
}

// A page of L2 or L3 went with a failed transfer: what lies behind it is of no use.
void LeaseBook::note_losses_below() {
  if (losses_seen_ == tiers_.num_leased_lost()) return;
  losses_seen_ = tiers_.num_leased_lost();
  std::vector<std::int64_t> lost;
  for (const auto& [id, lease] : leases_) {
    if (lease->tier == Tier::kL1) continue;
    const Tier tier = lease->tier;
    const auto gone = std::ranges::find_if(
        lease->names, [&](const PageHash& name) { return !is_there(tier, name); });
    if (gone == lease->names.end()) continue;
    std::vector<PageHash> left(lease->names.begin(), gone);
    detach(*lease);
    has_new_room_ = true;
    if (left.empty()) {
      lost.push_back(id);
      continue;
    }
    attach_below(*lease, tier, std::move(left));
    events_.push_back({id, LeaseEventKind::kRevoked, lease->num_tokens});
  }
  for (const std::int64_t id : lost) end(id, LeaseEventKind::kRevoked);
}

// ---- budgets -----------------------------------------------------------------------------------

std::int64_t LeaseBook::pool_pages(Tier tier) const {
  switch (tier) {
    case Tier::kL1: return config_.num_pages;
    case Tier::kL2: return config_.num_l2_pages;
    case Tier::kL3: return config_.num_l3_pages;
  }
  return 0;
}

std::int32_t LeaseBook::room(Tier tier) const {
  const std::int64_t budget = pool_pages(tier) * config_.lease_percent / 100;
  const std::int64_t used = tier == Tier::kL1 ? tree_.pages().leased : tiers_.num_leased(tier);
  return static_cast<std::int32_t>(std::max<std::int64_t>(0, budget - used));
}

// A tenant's leases count in full, shared or not; a lone tenant has the whole budget.
std::int32_t LeaseBook::tenant_room_for(Tier tier, const std::string& tenant,
                                        const Lease* but) const {
  bool is_alone = true;
  std::int64_t used = 0;
  for (const auto& [id, lease] : leases_) {
    if (lease->tier != tier || lease.get() == but) continue;
    if (lease->tenant == tenant) {
      used += config_.pages_of(lease->num_tokens);
    } else {
      is_alone = false;
    }
  }
  if (is_alone) return static_cast<std::int32_t>(pool_pages(tier));
  const std::int64_t budget = pool_pages(tier) * config_.tenant_lease_percent / 100;
  return static_cast<std::int32_t>(std::max<std::int64_t>(0, budget - used));
}

std::int32_t LeaseBook::most_pages(Tier tier, const std::string& tenant, const Coverable& found,
                                   const Lease* but) const {
  const std::int32_t shared_pages = found.num_pages - found.num_new_pages;
  return std::min(
      {found.num_pages, shared_pages + room(tier), tenant_room_for(tier, tenant, but)});
}

// ---- granting ----------------------------------------------------------------------------------

bool LeaseBook::is_there(Tier tier, const PageHash& name) const {
  return tier == Tier::kL3 ? tiers_.is_in_l3(name)
                           : tiers_.is_in_l2(name) || tiers_.is_coming_to_l2(name);
}

LeaseBook::Coverable LeaseBook::coverable_below(Tier tier, std::vector<PageHash> names) const {
  const auto gone = std::ranges::find_if(
      names, [&](const PageHash& name) { return !is_there(tier, name); });
  names.erase(gone, names.end());
  Coverable found;
  found.num_pages = static_cast<std::int32_t>(names.size());
  found.num_tokens = found.num_pages * config_.page_size;
  found.num_new_pages = static_cast<std::int32_t>(std::ranges::count_if(
      names, [&](const PageHash& name) { return !tiers_.is_leased(tier, name); }));
  found.names = std::move(names);
  return found;
}

LeaseBook::Coverable LeaseBook::coverable(const LeaseRequest& request) {
  if (request.tier == Tier::kL1) {
    const RadixTree::Leasable found = tree_.leasable(request.salt, request.token_ids);
    return {found.num_tokens, found.num_pages, found.num_new_pages, {}};
  }
  const PrefixMatch match = tree_.find(request.salt, request.token_ids);
  std::vector<PageHash> names;
  for (const auto& [page, hash] : tree_.full_pages(match)) names.push_back(hash);
  // What L1 has is sent down; what only L3 has a move has to bring up first.
  if (request.tier == Tier::kL2 && match.full_len > 0) write_through_.send(*match.node, 0);
  const PageHash space = hash_namespace(config_.model_fingerprint, request.salt);
  const TokenSpan tokens(request.token_ids);
  const auto page_size = static_cast<std::size_t>(config_.page_size);
  while ((names.size() + 1) * page_size <= tokens.size()) {
    const PageHash& parent = names.empty() ? kRootHash : names.back();
    if (!names.empty() && !is_there(request.tier, parent)) break;
    names.push_back(hash_page(space, parent, tokens.subspan(names.size() * page_size, page_size)));
  }
  return coverable_below(request.tier, std::move(names));
}

void LeaseBook::attach_below(Lease& lease, Tier tier, std::vector<PageHash> names) {
  lease.tier = tier;
  lease.names = std::move(names);
  lease.num_tokens = static_cast<std::int32_t>(lease.names.size()) * config_.page_size;
  for (const PageHash& name : lease.names) tiers_.lease(tier, name);
}

void LeaseBook::detach(Lease& lease) {
  if (lease.tier == Tier::kL1) return tree_.detach(lease);
  for (const PageHash& name : lease.names) tiers_.unlease(lease.tier, name);
  lease.names.clear();
  lease.num_tokens = 0;
}

LeaseGrant LeaseBook::try_grant(const LeaseRequest& request) {
  LeaseGrant grant;
  grant.tokens_requested = static_cast<std::int32_t>(request.token_ids.size());
  Coverable resident = coverable(request);
  // The last token sampled has no KV yet, so a whole session lacks one token; below L1 there are
  // full pages only.
  const std::int32_t wanted = request.tier == Tier::kL1
                                  ? grant.tokens_requested - 1
                                  : (grant.tokens_requested - 1) / config_.page_size *
                                        config_.page_size;
  const bool is_whole = resident.num_tokens >= wanted;
  if (!is_whole) grant.reason = "not_resident";
  if (resident.num_tokens == 0) {
    grant.reason = "not_resident";
    return grant;
  }

  const std::int32_t most = most_pages(request.tier, request.tenant, resident, nullptr);
  if (most < resident.num_pages) {
    const std::int32_t tenant_room = tenant_room_for(request.tier, request.tenant, nullptr);
    const std::int32_t shared_pages = resident.num_pages - resident.num_new_pages;
    grant.reason = tenant_room < shared_pages + room(request.tier) ? "tenant_budget" : "budget";
  }
  if (most == 0) {
    grant.state = LeaseState::kQueued;
    return grant;
  }
  auto lease = std::make_unique<Lease>();
  lease->id = request.lease_id;
  lease->tenant = request.tenant;
  lease->until_ms = request.until_ms;
  lease->tier = request.tier;
  if (request.tier == Tier::kL1) {
    const std::int32_t num_tokens = std::min(resident.num_tokens, most * config_.page_size);
    tree_.attach(*lease, request.salt, TokenSpan(request.token_ids).first(num_tokens));
    if (tiers_.is_enabled()) {  // so that pressure finds it in L2
      write_through_.send(*lease->node, 0);
      lease->names = tree_.hashes_of(*lease->node);
      if (!lease->names.empty()) tiers_.value(lease->names.back(), 1000);
    }
  } else {
    resident.names.resize(static_cast<std::size_t>(most));
    attach_below(*lease, request.tier, std::move(resident.names));
  }
  grant.tokens_granted = lease->num_tokens;
  grant.state =
      is_whole && most == resident.num_pages ? LeaseState::kGranted : LeaseState::kClipped;
  by_deadline_.insert({lease->until_ms, lease->id});
  leases_.emplace(lease->id, std::move(lease));
  return grant;
}

std::string LeaseBook::find_broken_invariant() const {
  for (const auto& [id, lease] : leases_) {
    if (lease->tier == Tier::kL1) continue;
    if (lease->names.empty()) return "a lease below L1 covers nothing";
    for (const PageHash& name : lease->names) {
      if (!tiers_.is_leased(lease->tier, name)) return "a leased page does not know of its lease";
    }
  }
  return by_deadline_.size() == leases_.size() ? "" : "a lease has no deadline";
}

}  // namespace moorage
