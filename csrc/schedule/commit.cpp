// SPDX-License-Identifier: Apache-2.0
// Results of a step come in: tokens, finishes, failures; pages enter the tree as they fill.
#include <algorithm>
#include <stdexcept>

#include "schedule/scheduler.h"

namespace moorage {
namespace {

[[noreturn]] void reject(const std::string& field, const std::string& why) {
  throw std::invalid_argument(field + ": " + why);
}

}  // namespace

// ---- validation: nothing is applied unless everything is sound ------------------------------

void Scheduler::validate(std::span<const InputEvent> events) const {
  std::int32_t num_results = 0;
  std::vector<std::int64_t> acked, bootstrapped, sent, probed;
  HeardOf heard;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const std::string name = "events[" + std::to_string(i) + "]";
    if (const auto* result = std::get_if<StepResult>(&events[i])) {
      const std::string step_id = std::to_string(result->step_id.value);
      if (num_results >= num_steps_in_flight_) {
        reject(name + ".step_id", step_id + " is not in flight");
      }
      const Step& step = steps_[(first_step_ + num_results++) % kMaxStepsInFlight];
      if (result->step_id != step.id) {
        reject(name + ".step_id", step_id + " is not the oldest step in flight, " +
                                      std::to_string(step.id.value));
      }
      validate_loads(name + ".step_id", step, heard);
      validate_rows(*result, step, heard);
    } else if (const auto* abort = std::get_if<AbortInput>(&events[i])) {
      if (find_request(abort->request_id) == nullptr) {
        reject(name + ".request_id", std::to_string(abort->request_id.value) + " is unknown");
      }
    } else if (const auto* remote = std::get_if<RemotePrefillInput>(&events[i])) {
      const std::int64_t id = remote->request_id.value;
      const Request* request = find_request(remote->request_id);
      const bool is_first = std::ranges::find(bootstrapped, id) == bootstrapped.end();
      bootstrapped.push_back(id);
      if (is_first && request != nullptr && request->awaits_remote) continue;
      reject(name + ".request_id", std::to_string(id) + " awaits no remote prefill");
    } else if (const auto* done = std::get_if<SendDoneInput>(&events[i])) {
      const std::int64_t id = done->request_id.value;
      const Request* request = find_request(done->request_id);
      const bool is_first = std::ranges::find(sent, id) == sent.end();
      sent.push_back(id);
      if (is_first && request != nullptr && request->awaits_send) continue;
      reject(name + ".request_id", std::to_string(id) + " is not being sent");
    } else if (const auto* probe = std::get_if<ProbeDoneInput>(&events[i])) {
      const auto found = probes_.find(probe->probe_id);
      const bool is_first = std::ranges::find(probed, probe->probe_id) == probed.end();
      probed.push_back(probe->probe_id);
      if (!is_first || found == probes_.end() || !found->second.is_told) {
        reject(name + ".probe_id", std::to_string(probe->probe_id) + " is not open");
      }
      const auto most = static_cast<std::int64_t>(found->second.pages.size());
      if (probe->num_pages >= 0 && probe->num_pages <= most) continue;
      reject(name + ".num_pages", std::to_string(probe->num_pages) + " is not in [0, " +
                                      std::to_string(most) + "]");
    } else {
      const auto& ack = std::get<TransferAckInput>(events[i]);
      const bool is_first = std::ranges::find(acked, ack.ticket) == acked.end();
      acked.push_back(ack.ticket);
      note_heard(ack, heard);
      if (is_first && tiers_.is_in_flight(ack.ticket)) continue;
      reject(name + ".ticket", std::to_string(ack.ticket) + " is not in flight");
    }
  }
}

void Scheduler::validate_rows(const StepResult& result, const Step& step,
                              const HeardOf& heard) const {
  if (result.num_rows != static_cast<std::int32_t>(step.rows.size())) {
    reject("num_accepted", std::to_string(result.num_rows) + " rows, but step " +
                               std::to_string(step.id.value) + " has " +
                               std::to_string(step.rows.size()));
  }
  for (std::int32_t r = 0; r < result.num_rows; ++r) {
    const std::int32_t accepted = result.num_accepted[r];
    const StepRow& row = step.rows[static_cast<std::size_t>(r)];
    const auto load = heard.find(row.load);
    const bool is_void = row.is_void || (load != heard.end() && load->second.has_lost);
    const std::int32_t most = is_void || !row.samples ? 0 : row.is_prefill ? 1 : row.len;
    if (accepted < 0 || accepted > result.num_columns || accepted > most) {
      reject("num_accepted[" + std::to_string(r) + "]",
             std::to_string(accepted) + " is not in [0, " + std::to_string(most) +
                 "], nor within the columns of token_ids");
    }
    for (std::int32_t k = 0; k < accepted; ++k) {
      const TokenId token = result.token_ids[r * result.num_columns + k];
      if (token < 0) {
        reject("token_ids[" + std::to_string(r) + ", " + std::to_string(k) + "]",
               std::to_string(token) + " is negative");
      }
    }
  }
}

// ---- application ----------------------------------------------------------------------------

std::vector<EndedRequest> Scheduler::advance(std::span<const InputEvent> events) {
  validate(events);
  std::vector<EndedRequest> ended;
  for (const InputEvent& event : events) {
    if (const auto* result = std::get_if<StepResult>(&event)) {
      commit_step(*result, ended);
    } else if (const auto* input = std::get_if<AbortInput>(&event)) {
      Request* request = find_request(input->request_id);
      if (request != nullptr) abort(*request, ended);  // null: it ended earlier in this batch
    } else if (const auto* remote = std::get_if<RemotePrefillInput>(&event)) {
      apply_remote_prefill(*remote, ended);
    } else if (const auto* done = std::get_if<SendDoneInput>(&event)) {
      apply_send_done(*done, ended);
    } else if (const auto* probe = std::get_if<ProbeDoneInput>(&event)) {
      apply_probe(*probe);
    } else {
      apply_ack(std::get<TransferAckInput>(event), ended);
    }
  }
  return ended;
}

void Scheduler::commit_step(const StepResult& result, std::vector<EndedRequest>& ended) {
  Step& step = oldest_step();
  first_step_ = (first_step_ + 1) % kMaxStepsInFlight;
  num_steps_in_flight_ -= 1;
  for (std::size_t r = 0; r < step.rows.size(); ++r) {
    const StepRow& row = step.rows[r];
    Request& request = *row.request;
    request.num_steps_in_flight -= 1;
    request.num_samples_in_flight -= row.samples ? 1 : 0;
    const TokenSpan accepted(result.token_ids + static_cast<std::ptrdiff_t>(r) * result.num_columns,
                             static_cast<std::size_t>(result.num_accepted[r]));
    commit_row(row, accepted, result.finished[r] != 0, result.failed[r] != 0);
    settle(request, ended);
  }
  step.rows.clear();
  step.replaced.clear();
  step.copied.clear();
}

void Scheduler::commit_row(const StepRow& row, TokenSpan accepted, bool finished, bool failed) {
  Request& request = *row.request;
  if (row.is_void) return;
  if (const auto* draining = std::get_if<Draining>(&request.state)) {
    // What an aborted request still computed is sound KV. After a finish the step ran for nothing.
    if (draining->status == EndStatus::kAborted && !failed && request.num_computed == row.start) {
      request.num_computed = std::min(row.start + (row.is_prefill ? row.len : 1), request.len());
    }
    return;
  }
  // Nor does a finished request whose pages another engine reads take in what ran behind its end.
  if (request.is<Sending>()) return;
  if (failed) return fire(request, Fail{"the step failed for this request"});
  // Of a decode row the KV of accepted drafts stands; behind it the next row writes anew.
  const auto num_accepted = static_cast<std::int32_t>(accepted.size());
  request.num_computed = row.start + (row.is_prefill ? row.len : std::max(1, num_accepted));
  if (!row.is_prefill && row.len > 1) {
    request.num_planned = request.num_computed;
    request.has_drafts_in_flight = false;
  }
  request.tokens.insert(request.tokens.end(), accepted.begin(), accepted.end());
  WaitQueue::charge(request, num_accepted);
  if (request.is<Prefilling>() && request.num_computed >= request.prefill_end) {
    fire(request, PrefillDone{});
  }
  if (finished || (row.samples && request.num_outputs() >= request.max_new_tokens)) {
    publish_full_pages(request);
    return finish(request);
  }
  if (row.samples && accepted.empty()) {
    return fire(request, Fail{"a sampled row accepted no token and did not finish"});
  }
  publish_full_pages(request);
}

void Scheduler::abort(Request& request, std::vector<EndedRequest>& ended) {
  fire(request, moorage::Abort{});
  settle(request, ended);
}

// An illegal event fails the request it hit, with both names, and nobody else.
template <class E>
void Scheduler::fire(Request& request, E event) {
  const bool held_memory = is_running(request);
  const bool was_waiting = request.is<Waiting>();
  const auto illegal = apply(request.state, std::move(event));
  if (illegal) {
    std::string message = "illegal event " + std::string(illegal->event) + " in state " +
                          std::string(illegal->state);
    if (request.is<Draining>() || request.is<Ended>()) return;  // it is over already
    return fire(request, Fail{std::move(message)});
  }
  if (held_memory && (request.is<Draining>() || request.is<Sending>())) leave_running(request);
  if (was_waiting && request.is<Ended>()) {
    waiting_.erase(request);
    std::erase(arrivals_, &request);
  }
}

template void Scheduler::fire(Request&, Admit);
template void Scheduler::fire(Request&, AdmitRemote);
template void Scheduler::fire(Request&, Bootstrapped);
template void Scheduler::fire(Request&, AdmitLoading);
template void Scheduler::fire(Request&, Loaded);
template void Scheduler::fire(Request&, PrefillDone);
template void Scheduler::fire(Request&, Finish);
template void Scheduler::fire(Request&, HandOver);
template void Scheduler::fire(Request&, Sent);
template void Scheduler::fire(Request&, moorage::Abort);
template void Scheduler::fire(Request&, Fail);
template void Scheduler::fire(Request&, Retract);
template void Scheduler::fire(Request&, Drained);

void Scheduler::leave_running(Request& request) {
  running_.erase(std::ranges::find(running_, &request));
  num_leaving_ += 1;
}

// Once no step touches a leaving request, its memory goes back.
void Scheduler::settle(Request& request, std::vector<EndedRequest>& ended) {
  if (request.num_steps_in_flight > 0) return;
  if (request.is<Retracting>()) return requeue(request);
  if (request.is<Draining>() || request.is<Ended>()) end(request, ended);
}

void Scheduler::publish_full_pages(Request& request) {
  Holdings& kv = *request.holdings();
  const std::int32_t base = kv.base_len();
  const std::int32_t num_pages = (request.num_computed - base) / config_.page_size;
  if (num_pages <= 0) return;
  adopted_.clear();
  const std::span<const PageHash> names = request.names.pages;
  const auto num_skipped =
      std::min(names.size(), static_cast<std::size_t>(base / config_.page_size));
  OwnedPages duplicates = tree_.publish(
      kv.prefix, TokenSpan(request.tokens).subspan(base, num_pages * config_.page_size),
      kv.tail.split_front(num_pages), adopted_, names.subspan(num_skipped));
  tiers_.tick(num_pages);
  if (tiers_.is_enabled()) write_through_.send(kv.prefix.node(), base);
  if (duplicates.is_empty()) return;
  stats_.num_duplicate_pages += duplicates.size();
  for (const auto& [index, page] : adopted_) table_changes_.push_back({request.id, index, page});
  if (request.num_steps_in_flight > 0) {
    duplicates.hand_to(PageOwner::kInFlight);
    newest_step().replaced.push_back(std::move(duplicates));
  }
}

// Publishes what of prompt and output has sound KV; returns how many tokens the tree then holds.
std::int32_t Scheduler::publish_rest(Request& request, EndedRequest& ended) {
  Holdings& kv = *request.holdings();
  if (ended.status == EndStatus::kFailed) request.num_computed = request.num_trusted;
  publish_full_pages(request);
  const std::int32_t base = kv.base_len();
  ended.page_hashes = tree_.hashes_of(kv.prefix.node());
  if (!ended.page_hashes.empty()) {
    tiers_.touch(ended.page_hashes.back());
    tiers_.value(ended.page_hashes.back(), request.return_permille);
  }
  const std::int32_t rest = request.num_computed - base;
  if (rest <= 0) {
    tree_.hint(kv.prefix, request.return_permille);
    return base;
  }
  OwnedPages page = kv.tail.split_front(1);
  tree_.publish_partial(kv.prefix, TokenSpan(request.tokens).subspan(base, rest), std::move(page));
  tree_.hint(kv.prefix, request.return_permille);
  return request.num_computed;
}

void Scheduler::end(Request& request, std::vector<EndedRequest>& ended) {
  EndedRequest result{request.id.value, EndStatus::kFailed, {}, 0, {}};
  if (auto* draining = std::get_if<Draining>(&request.state)) {
    result.status = draining->status;
    result.num_cached_tokens = publish_rest(request, result);
    num_leaving_ -= 1;
    fire(request, Drained{});
  } else {
    result.num_cached_tokens = tree_.find(request.salt, request.tokens).len();
  }
  Ended& over = std::get<Ended>(request.state);
  result.status = over.status;
  result.message = std::move(over.message);
  stats_.num_finished += result.status == EndStatus::kFinished ? 1 : 0;
  stats_.num_aborted += result.status == EndStatus::kAborted ? 1 : 0;
  stats_.num_failed += result.status == EndStatus::kFailed ? 1 : 0;
  ended.push_back(std::move(result));
  waiting_.leave(request);
  keep_buffer(std::move(request.tokens));
  requests_.erase(request.id.value);
}

}  // namespace moorage
