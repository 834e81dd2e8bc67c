// SPDX-License-Identifier: Apache-2.0
// Letting a waiting request run: what of it is cached, who computes the rest of it already,
// whether its pages fit beside what the running ones still need.
#include <algorithm>

#include "schedule/scheduler.h"

namespace moorage {

// In order, without passing anyone by for lack of memory: whoever is next is never starved.
void Scheduler::plan_admissions(Plan& plan) {
  waiting_.rewind();
  while (prefill_budget_ > 0) {
    const bool has_slot = slots_.num_free() > 0;
    if (!has_slot && config_.max_preemptions == 0) return;
    Request* request = waiting_.next();
    if (request == nullptr) return;
    if (must_wait(*request) || (is_for_short_ones_ && !is_short(request->num_uncached))) continue;
    if (!has_slot) return preempt_for(*request, 0);
    if (try_admit(*request, plan) == Admitted::kNoMemory) return;
  }
}

// For somebody else's prefill, or for pages or word of them from a lower tier.
bool Scheduler::must_wait(Request& request) const {
  return is_following(request) || is_waiting_for_transfer(request) || is_waiting_for_probe(request);
}

Scheduler::Admitted Scheduler::try_admit(Request& request, Plan& plan) {
  if (blocked_.request_id == request.id.value && blocked_ == what_decides(request)) {
    return Admitted::kNoMemory;
  }
  // The last token is computed even if it is cached: its logits are wanted.
  PrefixMatch match = tree_.find(request.salt, TokenSpan(request.tokens).first(request.len() - 1));
  if (find_leader(request, match.full_len)) return Admitted::kFollows;
  const std::int32_t num_lacking = num_lacking_pages(request, match);
  if (num_lacking > 0) {
    preempt_for(request, num_lacking);
    blocked_ = what_decides(request);
    return Admitted::kNoMemory;
  }
  std::vector<PageHash> below = worth_bringing(request, match);
  if (!may_run_while_loading(request, below)) {
    if (waits_for_transfer(request, match, below)) return Admitted::kFollows;
    below.clear();
  }
  admit(request, match, below, plan);
  return Admitted::kYes;
}

Scheduler::Blocked Scheduler::what_decides(const Request& request) const {
  return {request.id.value,         tree_.version(),
          pool_.num_free(),         pool_.num_held(),
          num_promised_pages(),     num_running() + num_leaving_ + num_loads_};
}

bool Scheduler::is_prefilling(const Request& request) {
  return request.is<Loading>() || request.is<Prefilling>();
}

// A leader that ended, was retracted or has published enough is followed no longer.
bool Scheduler::is_following(const Request& request) const {
  if (!request.leader.is_valid()) return false;
  Request* leader = find_request(request.leader);
  return leader != nullptr && is_prefilling(*leader) &&
         leader->holdings()->base_len() < request.leader_len;
}

// Single flight: full pages that a running prefill is about to publish are not computed twice.
// Leaders run and followers wait, so there is no cycle.
bool Scheduler::find_leader(Request& request, std::int32_t cached_full_len) {
  const std::int32_t page_size = config_.page_size;
  const TokenSpan wanted = TokenSpan(request.tokens).first(request.len() - 1);
  request.leader = RequestId{};
  request.leader_len = cached_full_len;
  if (cached_full_len + page_size > static_cast<std::int32_t>(wanted.size())) return false;
  for (Request* other : running_) {
    if (!is_prefilling(*other) || other->salt != request.salt) continue;
    const TokenSpan theirs = TokenSpan(other->tokens).first(other->prefill_end);
    if (cached_full_len + page_size > static_cast<std::int32_t>(theirs.size())) continue;
    const TokenSpan next_page = wanted.subspan(cached_full_len, page_size);
    if (compare_tokens(next_page, theirs.subspan(cached_full_len, page_size)) != 0) continue;
    const std::int32_t shared = common_prefix_len(wanted, theirs) / page_size * page_size;
    if (shared <= request.leader_len) continue;
    request.leader = other->id;
    request.leader_len = shared;
  }
  if (!request.leader.is_valid()) return false;
  Request* leader = find_request(request.leader);
  if (request.runs_before(*leader)) {  // whoever waits lends its place
    running_.erase(std::ranges::find(running_, leader));
    leader->order_key_us = request.order_key_us;
    insert_running(*leader);
  }
  return true;
}

// Pages the running requests will want soon: the rest of their prefill and one more each.
std::int32_t Scheduler::num_promised_pages() const {
  std::int32_t promised = 0;
  for (Request* request : running_) {
    const Holdings& kv = *request->holdings();
    const std::int32_t held = kv.base_len() / config_.page_size + kv.tail.size();
    promised += std::max(0, config_.pages_of(request->prefill_end) - held) + 1;
  }
  return promised;
}

// What a request that is admitted may have: not what running ones will want, nor what transfers still
// read. Leases give way to a running request, but not to one that could as well wait.
std::int32_t Scheduler::num_spare_pages() const {
  const TreePages& cached = tree_.pages();
  return pool_.num_free() + cached.evictable - cached.idle_leased - pool_.num_held() -
         num_promised_pages();
}

std::int32_t Scheduler::num_lacking_pages(const Request& request, PrefixMatch& match) const {
  const std::int32_t last_len = request.prompt_len + request.max_new_tokens - 1;
  const std::int32_t needed = config_.pages_of(std::min(request.len() + 1, last_len)) -
                              match.full_len / config_.page_size;
  const TreePages on_path = tree_.pages_on_path(match);
  const std::int32_t copied =
      tree_.can_take_partial(match) ? 0 : tree_.num_evictable_beside(match);
  const bool is_alone = running_.empty() && num_leaving_ == 0;
  if (is_alone && num_loads_ == 0 && pool_.num_held() == 0) {
    // Alone, it fits (submit saw to that), if need be without the page it would copy from.
    const std::int32_t room = pool_.num_free() + tree_.pages().evictable - on_path.evictable;
    if (needed > room - copied) match.partial_node = nullptr, match.partial_len = 0;
    return 0;
  }
  return needed + copied + on_path.evictable - on_path.idle_leased - num_spare_pages();
}

void Scheduler::admit(Request& request, PrefixMatch match, std::span<const PageHash> below,
                      Plan& plan) {
  // One that has no row yet copies nothing, as a plan without rows does not; where whole pages come,
  // the start of the first one is of no use.
  if (request.remote_prefill || !below.empty()) {
    match.partial_node = nullptr, match.partial_len = 0;
  }
  const bool is_page_moved = tree_.can_take_partial(match);
  NodeRef prefix = tree_.pin(request.salt, match);
  if (!request.was_retracted) {
    tree_.note_use(prefix, config_.pages_of(request.len()));
    tiers_.tick(match.full_len / config_.page_size);
  }
  OwnedPages tail(pool_, PageOwner::kRequest);
  if (is_page_moved) {
    tail.append(tree_.take_partial(match));
  } else if (match.partial_len > 0) {
    const PageId source = match.partial_node->pages[match.partial_index];
    copy_sources_.push_back(tree_.pin_partial(match));
    make_room(1);
    plan.page_copies.push_back({source.value, tail.grow().value, match.partial_len});
    stats_.num_page_copies += 1;
  }
  const std::int32_t num_loading = start_own_load(request, below, tail) * config_.page_size;
  if (num_loading > 0) request.loaded_from = match.full_len, request.num_loaded = num_loading;

  OwnedSlot slot = slots_.take();
  std::int32_t index = 0;
  for (const PageId page : tree_.pages_of(prefix.node())) {
    plan.page_deltas.push_back({slot.id().value, index++, page.value});
  }
  for (const PageId page : tail.view()) {
    plan.page_deltas.push_back({slot.id().value, index++, page.value});
  }
  PrefixMatch found = match;
  found.full_len += num_loading;
  plan.admissions.push_back(make_admission(request, slot.id(), found));
  stats_.num_prompt_tokens += request.len();
  stats_.num_cached_tokens += match.len();
  if (num_loading == 0) {  // else once they are known to be good, see finish_own_load
    stats_.num_l2_cached_tokens += plan.admissions.back().cached_l2;
    stats_.num_l3_cached_tokens += plan.admissions.back().cached_l3;
  }

  request.num_computed = request.num_trusted = match.len();
  request.num_planned = found.len();
  request.prefill_end = request.len();
  request.leader = RequestId{};
  waiting_.erase(request);
  // What it lost by giving way is not its tenant's to pay.
  if (!request.was_retracted) WaitQueue::charge(request, request.len() - found.len());
  Holdings kv{std::move(slot), std::move(prefix), std::move(tail)};
  if (request.remote_prefill) {
    fire(request, AdmitRemote{std::move(kv)});
    insert_running(request);
    plan.admissions.back().remote = bootstrap(request, plan);
    if (plan.admissions.back().remote) return;
    fire(request, Bootstrapped{});
  } else if (num_loading > 0) {
    fire(request, AdmitLoading{std::move(kv)});
    insert_running(request);
  } else {
    fire(request, Admit{std::move(kv)});
    insert_running(request);
  }
  widen_for(request);
  const std::int32_t rest = request.prefill_end - request.num_planned;
  plan_row(request, std::min(rest, prefill_budget_), true, plan);
}

void Scheduler::insert_running(Request& request) {
  running_.insert(std::ranges::upper_bound(running_, &request, RunsBefore{}), &request);
}

}  // namespace moorage
