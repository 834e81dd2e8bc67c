// SPDX-License-Identifier: Apache-2.0
// Who may have a prefix kept, until when: budgets, deadlines, a queue for those who must wait.
//
// A lease changes only the order of eviction (leased pages go last), so leases can delay nobody
// for ever: where nothing else is left to evict they give way, from their end, and it is reported.
// Invariants:
//   distinct leased pages <= lease_percent of the pool, when granted
//   a tenant's leases <= tenant_lease_percent of the pool while several tenants hold leases
// Thread rule: one thread.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/config.h"
#include "prefix/radix_tree.h"

namespace moorage {

enum class LeaseState : std::uint8_t { kGranted, kClipped, kQueued, kDenied };

struct LeaseRequest {
  std::int64_t lease_id = -1;
  std::vector<TokenId> token_ids;
  TimeMs until_ms = 0;
  std::string tenant;
  std::string salt;
};

struct LeaseGrant {
  LeaseState state = LeaseState::kDenied;
  std::int32_t tokens_requested = 0;
  std::int32_t tokens_granted = 0;
  std::string reason;  // empty | not_resident | budget | tenant_budget | expired
};

enum class LeaseEventKind : std::uint8_t { kGranted, kClipped, kRevoked, kExpired, kDenied };

struct LeaseEvent {
  std::int64_t lease_id;
  LeaseEventKind kind;
  std::int32_t num_tokens;  // still covered
};

class LeaseBook {
 public:
  static constexpr std::size_t kMaxQueued = 1024;

  LeaseBook(const SchedulerConfig& config, RadixTree& tree) : config_(config), tree_(tree) {}

  // A lease of the same id is replaced: that is how one is renewed.
  LeaseGrant lease(LeaseRequest request, TimeMs now_ms);
  bool release(std::int64_t lease_id);  // false: unknown
  void tick(TimeMs now_ms);             // ends what expired, then serves the queue
  void note_cuts();                     // after pages went: reports leases that lost some

  std::vector<LeaseEvent> drain_events() { return std::exchange(events_, {}); }
  std::int64_t num_leases() const { return static_cast<std::int64_t>(leases_.size()); }
  std::int64_t num_queued() const { return static_cast<std::int64_t>(queue_.size()); }

 private:
  LeaseGrant try_grant(const LeaseRequest& request);
  std::int32_t room() const;
  std::int32_t tenant_room_for(const std::string& tenant) const;
  void end(std::int64_t lease_id, LeaseEventKind kind);

  const SchedulerConfig& config_;
  RadixTree& tree_;
  std::map<std::int64_t, std::unique_ptr<Lease>> leases_;
  std::set<std::pair<TimeMs, std::int64_t>> by_deadline_;
  std::deque<LeaseRequest> queue_;
  std::vector<LeaseEvent> events_;
  std::int64_t evictions_seen_ = 0;
  bool has_new_room_ = false;
};

}  // namespace moorage
