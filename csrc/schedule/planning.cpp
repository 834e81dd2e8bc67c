// SPDX-License-Identifier: Apache-2.0
// Making a step of the running requests: decode rows and chunks of prefill. Nothing here depends on
// the length of a context.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "schedule/scheduler.h"

namespace moorage {

void Scheduler::next_plan(TimeMs now_ms, Plan& plan) {
  if (num_steps_in_flight_ >= kMaxStepsInFlight) {
    throw std::logic_error("next_plan: 2 steps are in flight; advance the older one first");
  }
  now_ms_ = std::max(now_ms_, now_ms);
  tree_.set_now(now_ms_);
  tiers_.set_now(now_ms_);
  plan.clear();
  prefill_rows_.clear();
  decode_rows_.clear();
  is_short_of_pages_ = false;

  leases_.tick(now_ms_);
  end_holds();
  write_through_.retry(now_ms_);
  take_in_arrivals();
  emit_table_changes(plan);
  plan_running(plan);
  if (!is_short_of_pages_) plan_admissions(plan);
  if (is_for_short_ones_ && !is_short_of_pages_) take_what_is_left(plan);
  plan.retracted.swap(retracted_);
  work_on_orders();
  leases_.note_cuts();
  emit_rows(plan);
  copy_sources_.clear();
  emit_moves(plan);
  emit_probes(plan);
}

bool Scheduler::wants_prefill(const Request& request) {
  return request.num_planned < request.prefill_end && !request.is<Bootstrapping>();
}

// Where a speculating request goes on is known only when its last results are in.
bool Scheduler::wants_decode(const Request& request) const {
  const bool speculates = request.num_draft_tokens > 0 || request.has_drafts_in_flight;
  if (speculates && request.num_samples_in_flight > 0) return false;
  return request.num_planned >= request.prefill_end &&
         request.num_outputs() + request.num_samples_in_flight < request.max_new_tokens;
}

// The token to decode from and as many drafts as could all be accepted.
std::int32_t Scheduler::num_decode_tokens(const Request& request) const {
  return std::min(1 + request.num_draft_tokens, request.max_new_tokens - request.num_outputs());
}

// A request that has the engine to itself may have larger steps: each expands the cached prefix again
// and gives an expert few tokens. Whoever comes meanwhile waits for one of them, so none takes
// longer than a step of that size does where a token costs two and a half times what the first does.
void Scheduler::widen_for(const Request& request) {
  if (!has_one_request_ || !wants_prefill(request)) return;
  const std::int64_t first_len = config_.attention_len;  // cost(n) / cost(0) == 1 + n / first_len
  const std::int64_t most = config_.lone_token_budget;
  const std::int64_t cost = 2 * (first_len + request.num_planned);
  const std::int64_t bounded = kLoneCostHalves * most * first_len / cost;
  const auto lone_budget = static_cast<std::int32_t>(std::min(most, bounded));
  prefill_budget_ = std::max(prefill_budget_, lone_budget);
}

void Scheduler::plan_running(Plan& plan) {
  std::int32_t num_decodes = 0;
  std::int64_t num_draft_tokens = 0;
  std::int32_t num_prefills = waiting_.size() == 0 ? 0 : 1;
  for (const Request* request : running_) {
    if (wants_decode(*request)) {
      num_decodes += 1;
      num_draft_tokens += num_decode_tokens(*request) - 1;
    }
    num_prefills += wants_prefill(*request) ? 1 : 0;
  }
  // Streams come first, but they never take the whole step from a prefill that waits.
  const std::int32_t kept = num_prefills == 0 ? 0 : quarter_of_step();
  const std::int32_t most_decode = std::max(1, config_.token_budget - kept);
  const std::int32_t decode_budget = std::min(num_decodes, most_decode);
  const bool speculates = num_decodes + num_draft_tokens <= most_decode;  // drafts give way first
  prefill_budget_ = config_.token_budget - decode_budget;
  if (speculates) prefill_budget_ -= static_cast<std::int32_t>(num_draft_tokens);
  // Who leaves may be about to wait again; who is read by another engine takes no part in a step.
  has_one_request_ = running_.size() + waiting_.size() == 1 && num_leaving_ == num_sending_;
  if (!running_.empty()) widen_for(*running_.front());

  const std::int32_t first = decode_budget < num_decodes ? decode_cursor_ % num_decodes : 0;
  std::int32_t nth_decode = 0;
  order_.assign(running_.begin(), running_.end());  // some may give way on the way
  for (Request* request : order_) {
    if (wants_decode(*request)) {
      const std::int32_t turn = (nth_decode++ - first + num_decodes) % num_decodes;
      const std::int32_t len = speculates ? num_decode_tokens(*request) : 1;
      if (turn < decode_budget && is_running(*request)) plan_row(*request, len, false, plan);
    } else if (wants_prefill(*request) && prefill_budget_ > 0 && is_running(*request)) {
      const std::int32_t rest = request->prefill_end - request->num_planned;
      if (is_short(rest)) plan_row(*request, std::min(rest, prefill_budget_), true, plan);
    }
  }
  decode_cursor_ = decode_budget < num_decodes ? first + decode_budget : 0;
  is_for_short_ones_ = is_turn_of_streams();
  if (!is_for_short_ones_) plan_long_prefills(plan);
}

std::int32_t Scheduler::quarter_of_step() const { return (config_.token_budget + 3) / 4; }

bool Scheduler::is_short(std::int32_t num_tokens) const { return num_tokens <= quarter_of_step(); }

// A step of a long prompt takes as long as dozens of a stream's own, and the stream keeps its memory
// all the while. Where little is spare, streams have some steps to each one with a long prompt: they
// end sooner, and the next turn finds room.
bool Scheduler::is_turn_of_streams() const {
  return !decode_rows_.empty() && num_steps_since_long_ < kStreamSteps &&
         std::int64_t{num_spare_pages()} * 100 <
             std::int64_t{config_.num_pages} * config_.spare_percent;
}

// A prompt of many steps leaves a quarter of each to short ones that come meanwhile: a turn of a
// tool's answer does not wait until somebody's whole repository has been read.
void Scheduler::plan_long_prefills(Plan& plan) {
  const auto is_long = [this](const Request* request) {
    return is_running(*request) && wants_prefill(*request) &&
           !is_short(request->prefill_end - request->num_planned);
  };
  if (prefill_budget_ <= 0 || std::ranges::none_of(order_, is_long)) return;
  const bool has_short = waiting_.any(
      [this](Request& request) { return is_short(request.num_uncached) && !must_wait(request); });
  const std::int32_t kept = has_short ? std::min(quarter_of_step(), prefill_budget_ / 2) : 0;
  for (Request* request : order_) {
    if (!is_long(request)) continue;
    const std::int32_t rest = request->prefill_end - request->num_planned;
    const std::int32_t most = std::min(rest, prefill_budget_ - kept);
    is_for_short_ones_ = is_for_short_ones_ || most < rest;
    if (most > 0) plan_row(*request, most, true, plan);
  }
}

// Short ones may be shorter than that quarter, or have no slot or no memory to run in: then the long
// ones' rows grow.
void Scheduler::take_what_is_left(Plan& plan) {
  for (StepRow& row : prefill_rows_) {
    Request& request = *row.request;
    if (!is_running(request) || !wants_prefill(request) || prefill_budget_ <= 0) continue;
    const std::int32_t rest = request.prefill_end - request.num_planned;
    const std::int32_t len = reserve(request, std::min(rest, prefill_budget_), plan);
    row.len += len;
    row.samples = row.start + row.len >= request.prefill_end;
    prefill_budget_ -= len;
    request.num_planned += len;
    request.num_samples_in_flight += row.samples ? 1 : 0;  // it did not, or nothing were left of it
  }
}

void Scheduler::plan_row(Request& request, std::int32_t len, bool is_prefill, Plan& plan) {
  const std::int32_t start = request.num_planned;
  len = reserve(request, len, plan);
  if (len == 0) return;
  const bool samples = start + len >= request.prefill_end;
  auto& rows = is_prefill ? prefill_rows_ : decode_rows_;
  rows.push_back({&request, start, len, samples, is_prefill, request.load});
  if (is_prefill) prefill_budget_ -= len;
  request.num_planned += len;
  if (!is_prefill && len > 1) request.has_drafts_in_flight = true;
  request.num_steps_in_flight += 1;
  request.num_samples_in_flight += samples ? 1 : 0;
}

bool Scheduler::make_room(std::int32_t num_pages) {
  while (pool_.num_free() < num_pages) {  // what a transfer still reads comes free later
    if (tree_.evict(num_pages - pool_.num_free()) == 0) break;
  }
  return pool_.num_free() >= num_pages;
}

// Takes what pages it can for tokens up to `end`; returns how far they reach.
std::int32_t Scheduler::grow_tail(Request& request, std::int32_t end, Plan& plan) {
  Holdings& kv = *request.holdings();
  const std::int32_t first_page = kv.base_len() / config_.page_size;
  const std::int32_t lacking = config_.pages_of(end) - first_page - kv.tail.size();
  if (lacking > 0) make_room(lacking);
  for (std::int32_t i = std::min(lacking, pool_.num_free()); i > 0; --i) {
    const std::int32_t index = first_page + kv.tail.size();
    plan.page_deltas.push_back({kv.slot.id().value, index, kv.tail.grow().value});
  }
  return std::min(end, (first_page + kv.tail.size()) * config_.page_size);
}

// Pages that were swapped for the tree's own copy since the last plan.
void Scheduler::emit_table_changes(Plan& plan) {
  for (const TableChange& change : table_changes_) {
    Request* request = find_request(change.request_id);
    const Holdings* kv = request == nullptr ? nullptr : request->holdings();
    if (kv == nullptr) continue;
    plan.page_deltas.push_back({kv->slot.id().value, change.index, change.page.value});
  }
  table_changes_.clear();
}

void Scheduler::emit_rows(Plan& plan) {
  if (prefill_rows_.empty() && decode_rows_.empty()) return;
  std::size_t num_tokens = 0;
  for (const auto* rows : {&prefill_rows_, &decode_rows_}) {
    for (const StepRow& row : *rows) num_tokens += static_cast<std::size_t>(row.len);
  }
  if (num_tokens > plan.input_ids.capacity()) {  // once, not doubling on the way there
    plan.input_ids.reserve(num_tokens);
    plan.slot_mapping.reserve(num_tokens);
  }
  for (const StepRow& row : prefill_rows_) emit_row(row, plan);
  for (const StepRow& row : decode_rows_) emit_row(row, plan);
  plan.step_id = next_step_id_++;
  stats_.num_steps += 1;
  num_steps_in_flight_ += 1;
  Step& step = newest_step();
  step.id = StepId{plan.step_id};
  step.rows.assign(prefill_rows_.begin(), prefill_rows_.end());
  step.rows.insert(step.rows.end(), decode_rows_.begin(), decode_rows_.end());
  for (const auto& copy : plan.page_copies) step.copied.emplace_back(pool_, PageId{copy[0]});
  const bool has_long = std::ranges::any_of(prefill_rows_, [this](const StepRow& row) {
    return !is_short(row.request->prefill_end - row.start);
  });
  num_steps_since_long_ = has_long ? 0 : std::min(num_steps_since_long_ + 1, kStreamSteps);
}

void Scheduler::emit_row(const StepRow& row, Plan& plan) {
  Request& request = *row.request;
  const Holdings& kv = *request.holdings();
  plan.row_request_ids.push_back(request.id.value);
  plan.row_slots.push_back(kv.slot.id().value);
  plan.row_starts.push_back(row.start);
  plan.row_lens.push_back(row.len);
  plan.row_samples.push_back(row.samples ? 1 : 0);
  plan.row_loads.push_back(tickets_of_load(row));
  const TokenSpan tokens(request.tokens);
  const std::int32_t end = row.start + row.len, num_known = std::min(end, request.len());
  const auto first = static_cast<std::size_t>(row.start);
  const TokenSpan known = tokens.subspan(first, static_cast<std::size_t>(num_known) - first);
  plan.input_ids.insert(plan.input_ids.end(), known.begin(), known.end());
  plan.input_ids.resize(plan.input_ids.size() + static_cast<std::size_t>(end - num_known), -1);
  // Page by page: a division for each token of a long prompt would cost more than all the rest.
  const std::int32_t base = kv.base_len(), page_size = config_.page_size;
  for (std::int32_t at = row.start; at < end;) {
    const PageId page = kv.tail[(at - base) / page_size];
    const std::int32_t offset = at % page_size;
    const std::int32_t count = std::min(page_size - offset, end - at);
    const std::size_t filled = plan.slot_mapping.size();
    plan.slot_mapping.resize(filled + static_cast<std::size_t>(count));
    std::iota(plan.slot_mapping.begin() + static_cast<std::ptrdiff_t>(filled),
              plan.slot_mapping.end(), page.value * page_size + offset);
    at += count;
  }
}

void Scheduler::emit_moves(Plan& plan) {
  for (const Move& move : tiers_.drain_moves()) {
    const auto [source, target] = tiers_of(move.kind);
    plan.moves.push_back({move.ticket, static_cast<std::int64_t>(move.kind), source,
                          move.source_page, target, move.target_page});
    plan.move_hashes.push_back(move.hash);
  }
}

}  // namespace moorage
