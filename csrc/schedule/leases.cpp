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
  tree_.detach(*found->second);
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
  if (evictions_seen_ == tree_.num_evicted_pages()) return;
  evictions_seen_ = tree_.num_evicted_pages();
  std::vector<std::int64_t> lost;
  for (const auto& [id, lease] : leases_) {
    if (!std::exchange(lease->was_cut, false)) continue;
    if (lease->node == nullptr) {
      lost.push_back(id);
    } else {
      events_.push_back({id, LeaseEventKind::kRevoked, lease->num_tokens});
    }
  }
  for (const std::int64_t id : lost) end(id, LeaseEventKind::kRevoked);
}

std::int32_t LeaseBook::room() const {
  const std::int64_t budget = std::int64_t{config_.num_pages} * config_.lease_percent / 100;
  return static_cast<std::int32_t>(std::max<std::int64_t>(0, budget - tree_.pages().leased));
}

// A tenant's leases count in full, shared or not; a lone tenant has the whole budget.
std::int32_t LeaseBook::tenant_room_for(const std::string& tenant) const {
  bool is_alone = true;
  std::int64_t used = 0;
  for (const auto& [id, lease] : leases_) {
    if (lease->tenant == tenant) {
      used += config_.pages_of(lease->num_tokens);
    } else {
      is_alone = false;
    }
  }
  if (is_alone) return config_.num_pages;
  const std::int64_t budget = std::int64_t{config_.num_pages} * config_.tenant_lease_percent / 100;
  return static_cast<std::int32_t>(std::max<std::int64_t>(0, budget - used));
}

LeaseGrant LeaseBook::try_grant(const LeaseRequest& request) {
  LeaseGrant grant;
  grant.tokens_requested = static_cast<std::int32_t>(request.token_ids.size());
  const RadixTree::Leasable resident = tree_.leasable(request.salt, request.token_ids);
  // The last token sampled has no KV yet, so a whole session lacks one token.
  const bool is_whole = resident.num_tokens >= grant.tokens_requested - 1;
  if (!is_whole) grant.reason = "not_resident";
  if (resident.num_tokens == 0) return grant;

  const std::int32_t tenant_room = tenant_room_for(request.tenant);
  const std::int32_t shared_pages = resident.num_pages - resident.num_new_pages;
  const std::int32_t pool_room = shared_pages + room();
  const std::int32_t most_pages = std::min({resident.num_pages, pool_room, tenant_room});
  if (most_pages < resident.num_pages) {
    grant.reason = tenant_room < pool_room ? "tenant_budget" : "budget";
  }
  if (most_pages == 0) {
    grant.state = LeaseState::kQueued;
    return grant;
  }
  const std::int32_t num_tokens =
      std::min(resident.num_tokens, most_pages * config_.page_size);
  auto lease = std::make_unique<Lease>();
  lease->id = request.lease_id;
  lease->tenant = request.tenant;
  lease->until_ms = request.until_ms;
  tree_.attach(*lease, request.salt, TokenSpan(request.token_ids).first(num_tokens));
  grant.tokens_granted = lease->num_tokens;
  grant.state = is_whole && most_pages == resident.num_pages ? LeaseState::kGranted
                                                             : LeaseState::kClipped;
  by_deadline_.insert({lease->until_ms, lease->id});
  leases_.emplace(lease->id, std::move(lease));
  return grant;
}

}  // namespace moorage
