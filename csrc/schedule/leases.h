// SPDX-License-Identifier: Apache-2.0
// Who may have a prefix kept, where, until when: budgets, deadlines, a queue for those who wait.
//
// In L1 a lease changes only the order of eviction (leased pages go last), so leases can delay
// nobody for ever: where nothing else is left to evict they give way, from their end. What of such a
// lease L2 holds is then leased there (demoted), the rest is reported (revoked). In L2 and L3 leased
// pages are not evicted: nobody needs room there to go on.
// Invariants:
//   distinct leased pages of a tier <= lease_percent of its pool, when granted
//   a tenant's leases there <= tenant_lease_percent of it while several tenants hold leases there
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
#include "tiers/write_through.h"

namespace moorage {

enum class LeaseState : std::uint8_t { kGranted, kClipped, kQueued, kDenied };

struct LeaseRequest {
  std::int64_t lease_id = -1;
  std::vector<TokenId> token_ids;
  TimeMs until_ms = 0;
  std::string tenant;
  std::string salt;
  Tier tier = Tier::kL1;
};

struct LeaseGrant {
  LeaseState state = LeaseState::kDenied;
  std::int32_t tokens_requested = 0;
  std::int32_t tokens_granted = 0;
  std::string reason;  // empty | not_resident | budget | tenant_budget | expired
};

enum class LeaseEventKind : std::uint8_t {
  kGranted,
  kClipped,
  kDemoted,  // from L1 to L2
  kRevoked,
  kExpired,
  kDenied,
};

struct LeaseEvent {
  std::int64_t lease_id;
  LeaseEventKind kind;
  std::int32_t num_tokens;  // still covered
};

class LeaseBook {
 public:
  static constexpr std::size_t kMaxQueued = 1024;

  LeaseBook(const SchedulerConfig& config, RadixTree& tree, LowerTiers& tiers,
            WriteThrough& write_through)
      : config_(config), tree_(tree), tiers_(tiers), write_through_(write_through) {}

  // A lease of the same id is replaced: that is how one is renewed.
  LeaseGrant lease(LeaseRequest request, TimeMs now_ms);
  bool release(std::int64_t lease_id);  // false: unknown
  void tick(TimeMs now_ms);             // ends what expired, then serves the queue
  void note_cuts();                     // after pages went: reports leases that lost some

  std::vector<LeaseEvent> drain_events() { return std::exchange(events_, {}); }
  std::int64_t num_leases() const { return static_cast<std::int64_t>(leases_.size()); }
  std::int64_t num_queued() const { return static_cast<std::int64_t>(queue_.size()); }
  std::string find_broken_invariant() const;

 private:
  // What of a prefix a lease could cover, and the pages of it that no lease covers yet.
  struct Coverable {
    std::int32_t num_tokens = 0;
    std::int32_t num_pages = 0;
    std::int32_t num_new_pages = 0;
    std::vector<PageHash> names;  // l2 and l3
  };
  Coverable coverable(const LeaseRequest& request);
  Coverable coverable_below(Tier tier, std::vector<PageHash> names) const;
  LeaseGrant try_grant(const LeaseRequest& request);
  std::int64_t pool_pages(Tier tier) const;
  std::int32_t room(Tier tier) const;
  std::int32_t tenant_room_for(Tier tier, const std::string& tenant, const Lease* but) const;
  std::int32_t most_pages(Tier tier, const std::string& tenant, const Coverable& found,
                          const Lease* but) const;
  bool is_there(Tier tier, const PageHash& name) const;
  void attach_below(Lease& lease, Tier tier, std::vector<PageHash> names);
  void detach(Lease& lease);
  bool demote(Lease& lease);
  void note_losses_below();
  void end(std::int64_t lease_id, LeaseEventKind kind);

  const SchedulerConfig& config_;
  RadixTree& tree_;
  LowerTiers& tiers_;
  WriteThrough& write_through_;
  std::map<std::int64_t, std::unique_ptr<Lease>> leases_;
  std::set<std::pair<TimeMs, std::int64_t>> by_deadline_;
  std::deque<LeaseRequest> queue_;
  std::vector<LeaseEvent> events_;
  std::int64_t evictions_seen_ = 0;
  std::int64_t losses_seen_ = 0;
  bool has_new_room_ = false;
};

}  // namespace moorage
