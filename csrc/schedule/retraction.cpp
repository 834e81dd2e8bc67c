// SPDX-License-Identifier: Apache-2.0
// Who gives way when pages or places run out, and how it comes back.
#include <algorithm>
#include <limits>

#include "schedule/scheduler.h"

namespace moorage {

bool Scheduler::is_running(const Request& request) {
  return request.is<Bootstrapping>() || is_prefilling(request) || request.is<Decoding>();
}

// How many of `len` tokens have a page to be written to; others give way if not one has.
std::int32_t Scheduler::reserve(Request& request, std::int32_t len, Plan& plan) {
  const std::int32_t start = request.num_planned;
  while (true) {
    const std::int32_t covered = grow_tail(request, start + len, plan);
    if (covered > start) return covered - start;
    is_short_of_pages_ = true;
    const bool is_memory_coming =
        num_leaving_ > num_sending_ || pool_.count(PageOwner::kInFlight) > 0;
    if (is_memory_coming || running_.size() == 1) return 0;
    Request& victim = choose_victim();
    retract(victim);
    if (&victim == &request) return 0;
  }
}

// What it is worth to let a request run on: the chance that its context is used again, times what
// recomputing a page of it costs. Each time it gave way before makes it dearer, so nobody is the
// victim for ever. Until a remote prefill is over its pages would not even come free.
std::int64_t Scheduler::run_value(const Request& request) const {
  if (request.is<Bootstrapping>()) return std::numeric_limits<std::int64_t>::max();
  const std::int64_t cost = tree_.cost(request.num_computed / 2);
  return cost * (1 + request.return_permille) / 1000 * (1 + request.num_retractions);
}

// The worst class first, then the least value, then the latest.
bool Scheduler::gives_way_before(const Request& a, const Request& b) const {
  if (a.priority != b.priority) return a.priority > b.priority;
  const std::int64_t a_value = run_value(a), b_value = run_value(b);
  if (a_value != b_value) return a_value < b_value;
  return b.runs_before(a);
}

// Anybody but the first in running order, which therefore always progresses.
Request& Scheduler::choose_victim() const {
  Request* victim = running_[1];
  for (std::size_t i = 2; i < running_.size(); ++i) {
    if (gives_way_before(*running_[i], *victim)) victim = running_[i];
  }
  return *victim;
}

void Scheduler::retract(Request& request) {
  stats_.num_retractions += 1;
  request.num_retractions += 1;
  leave_running(request);
  fire(request, Retract{});
  if (request.num_steps_in_flight == 0) requeue(request);
}

// Its full pages are in the tree, and in L2 where there was room: it goes on from there.
void Scheduler::requeue(Request& request) {
  num_leaving_ -= 1;
  fire(request, Drained{});
  request.num_computed = 0;
  request.num_planned = 0;
  request.num_trusted = 0;
  request.was_retracted = true;
  request.loads_left = kMaxLoads;
  request.num_loaded = 0;
  request.num_fetched = 0;
  request.leader = RequestId{};
  waiting_.insert(request);
  retracted_.push_back(request.id.value);
}

// ---- preemption --------------------------------------------------------------------------------

// Pages that come free, or need not be kept free any more, when it gives way.
std::int32_t Scheduler::num_pages_given_by(const Request& request) const {
  const Holdings& kv = *request.holdings();
  const std::int32_t held = kv.base_len() / config_.page_size + kv.tail.size();
  std::int32_t given = kv.tail.size() + 1 +
                       std::max(0, config_.pages_of(request.prefill_end) - held);
  for (const Node* at = &kv.prefix.node(); !at->is_root() && at->num_users == 1; at = at->parent) {
    given += at->num_leases == 0 ? at->pages.size() : 0;
  }
  return given;
}

// A waiting request takes the place of running ones of a worse class: of one if it lacks a slot, of
// as many as it takes if it lacks pages, of none if that would not be enough. Whoever waited long
// enough to stand before it is left alone, and so is who gave its place too often already.
void Scheduler::preempt_for(const Request& urgent, std::int32_t num_lacking_pages) {
  if (config_.max_preemptions == 0 || num_leaving_ > num_sending_) return;
  std::vector<Request*> victims;
  for (Request* request : running_) {
    if (request->priority > urgent.priority && urgent.runs_before(*request) &&
        request->num_preemptions < config_.max_preemptions && !request->is<Bootstrapping>()) {
      victims.push_back(request);
    }
  }
  std::ranges::sort(victims, [this](const Request* a, const Request* b) {
    return gives_way_before(*a, *b);
  });
  std::size_t num_victims = 0;
  std::int32_t num_pages = 0;
  while (num_victims < victims.size() && (num_victims == 0 || num_pages < num_lacking_pages)) {
    num_pages += num_pages_given_by(*victims[num_victims++]);
  }
  if (num_pages < num_lacking_pages) return;
  for (std::size_t i = 0; i < num_victims; ++i) {
    victims[i]->num_preemptions += 1;
    stats_.num_preemptions += 1;
    retract(*victims[i]);
  }
}

}  // namespace moorage
