// SPDX-License-Identifier: Apache-2.0
#include "schedule/wait_queue.h"

#include <algorithm>

#include "core/check.h"

namespace moorage {

void WaitQueue::join(Request& request) {
  const auto found = std::ranges::find_if(
      tenants_, [&request](const auto& tenant) { return tenant->name == request.tenant_name; });
  if (found == tenants_.end()) {
    tenants_.push_back(std::make_unique<Tenant>());
    tenants_.back()->name = request.tenant_name;
    tenants_.back()->next = tenants_.back()->waiting.end();
    request.tenant = tenants_.back().get();
  } else {
    request.tenant = found->get();
  }
  request.tenant->num_requests += 1;
}

void WaitQueue::leave(Request& request) {
  Tenant* tenant = std::exchange(request.tenant, nullptr);
  if (--tenant->num_requests > 0) return;
  MOORAGE_CHECK(tenant->waiting.empty(), "a tenant left with requests still waiting");
  const auto at = std::ranges::find_if(
      tenants_, [tenant](const auto& other) { return other.get() == tenant; });
  const auto index = static_cast<std::size_t>(at - tenants_.begin());
  if (index < served_) --served_;
  tenants_.erase(at);
  if (served_ >= tenants_.size()) served_ = 0;
}

void WaitQueue::insert(Request& request) {
  request.tenant->waiting.insert(&request);
  ++size_;
}

void WaitQueue::erase(Request& request) {
  Tenant& tenant = *request.tenant;
  const auto at = tenant.waiting.find(&request);
  if (at == tenant.waiting.end()) return;
  if (tenant.next == at) ++tenant.next;
  tenant.waiting.erase(at);
  --size_;
  if (tenant.waiting.empty()) tenant.credit = std::min<std::int64_t>(tenant.credit, 0);
}

void WaitQueue::rewind() {
  for (const auto& tenant : tenants_) tenant->next = tenant->waiting.begin();
}

Request* WaitQueue::next() {
  Tenant* tenant = choose();
  if (tenant == nullptr) return nullptr;
  return *tenant->next++;
}

Tenant* WaitQueue::choose() {
  std::size_t best = tenants_.size();
  std::int64_t best_rounds = 0;
  for (std::size_t i = 0; i < tenants_.size(); ++i) {
    const std::size_t index = (served_ + i) % tenants_.size();
    const Tenant& tenant = *tenants_[index];
    if (tenant.next == tenant.waiting.end()) continue;
    const std::int64_t rounds = tenant.credit > 0 ? 0 : -tenant.credit / quantum_ + 1;
    if (best != tenants_.size() && rounds >= best_rounds) continue;
    best = index;
    best_rounds = rounds;
  }
  if (best == tenants_.size()) return nullptr;
  if (best_rounds > 0) {
    for (const auto& tenant : tenants_) {
      if (!tenant->waiting.empty()) tenant->credit += best_rounds * quantum_;
    }
  }
  served_ = best;
  return tenants_[best].get();
}

void WaitQueue::charge(Request& request, std::int64_t num_tokens) {
  request.tenant->credit -= num_tokens;
}

}  // namespace moorage
