// SPDX-License-Identifier: Apache-2.0
// The invariants of scheduler.h, walked in full. For tests and an idle loop, not for every step.
#include <algorithm>
#include <limits>

#include "schedule/scheduler.h"

namespace moorage {
namespace {

// Counts where each page is; a page in two places or none is named.
class PageCensus {
 public:
  explicit PageCensus(const PagePool& pool)
      : pool_(pool), seen_(static_cast<std::size_t>(pool.num_pages())) {}

  void count(std::span<const PageId> pages, PageOwner owner) {
    for (const PageId page : pages) {
      const std::string name = "page " + std::to_string(page.value);
      if (seen_[static_cast<std::size_t>(page.value)]++ > 0) broken_ = name + " is in two places";
      if (pool_.owner_of(page) != owner) broken_ = name + " is labelled with another owner";
      ++num_seen_;
    }
  }

  std::string broken() const {
    if (!broken_.empty()) return broken_;
    return num_seen_ == pool_.num_pages() ? "" : "a page is in no place";
  }

 private:
  const PagePool& pool_;
  std::vector<std::uint8_t> seen_;
  std::int32_t num_seen_ = 0;
  std::string broken_;
};

}  // namespace

std::string Scheduler::find_broken_invariant() const {
  std::string broken = tree_.find_broken_invariant();
  if (!broken.empty()) return broken;

  broken = tiers_.find_broken_invariant();
  if (!broken.empty()) return broken;

  broken = leases_.find_broken_invariant();
  if (!broken.empty()) return broken;

  PageCensus census(pool_);
  census.count(pool_.free_list(), PageOwner::kFree);
  for (const Node* node : tree_.snapshot(std::numeric_limits<std::int32_t>::max())) {
    census.count(node->pages.view(), PageOwner::kTree);
  }
  std::int64_t num_running = 0, num_waiting = 0, num_leaving = 0, num_sending = 0;
  std::vector<std::int32_t> slots;
  for (const auto& [id, request] : requests_) {
    num_running += is_running(*request) ? 1 : 0;
    if (request->is<Loading>() && request->load < 0) return "a request loads nothing";
    num_waiting += request->is<Waiting>() ? 1 : 0;
    num_sending += request->awaits_send ? 1 : 0;
    num_leaving += request->is<Draining>() || request->is<Retracting>() || request->is<Sending>()
                       ? 1
                       : 0;
    const Holdings* kv = request->holdings();
    if (kv == nullptr) continue;
    census.count(kv->tail.view(), kv->tail.owner());
    slots.push_back(kv->slot.id().value);
    if (kv->base_len() % config_.page_size != 0) return "a request's prefix ends inside a page";
    if (request->num_computed > request->num_planned) return "more is computed than planned";
    if (request->num_planned > kv->base_len() + kv->tail.size() * config_.page_size) {
      return "request " + std::to_string(id) + " has tokens without a page";
    }
  }
  for (const Step& step : steps_) {
    for (const OwnedPages& pages : step.replaced) {
      census.count(pages.view(), PageOwner::kInFlight);
    }
  }
  for (const auto& [id, transfer] : transfers_) {
    if (const auto* to = std::get_if<ToTree>(&transfer.target)) {
      census.count(to->pages.view(), PageOwner::kInFlight);
    }
    if (const auto* own = std::get_if<ToRequest>(&transfer.target)) {
      const Request* request = find_request(own->id);
      const Holdings* kv = request == nullptr ? nullptr : request->holdings();
      if (kv == nullptr || request->load != id) return "a load fills pages of nobody";
      const auto num_pages = static_cast<std::int32_t>(transfer.hashes.size());
      if (request->num_computed != kv->base_len() || kv->tail.size() < num_pages) {
        return "pages that are being loaded are taken for computed";
      }
    }
  }
  census.count(pool_.orphans(), PageOwner::kInFlight);
  std::ranges::sort(slots);
  if (std::ranges::adjacent_find(slots) != slots.end()) return "two requests share a slot";
  if (static_cast<std::int32_t>(slots.size()) + slots_.num_free() != config_.max_slots) {
    return "a slot is lost";
  }
  if (num_running != this->num_running() || num_waiting != this->num_waiting() ||
      num_leaving != num_leaving_ || num_sending != num_sending_) {
    return "a request is in the wrong list";
  }
  if (!std::ranges::is_sorted(running_, RunsBefore{})) return "the running list is out of order";
  return census.broken();
}

}  // namespace moorage
