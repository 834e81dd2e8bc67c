// SPDX-License-Identifier: Apache-2.0
// Turns any string of bytes into a run of the scheduler, checking every invariant on the way. The
// fuzzer and the random test share it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <algorithm>
#include <iostream>
#include <set>
#include <span>
#include <stdexcept>
#include <vector>

#include "schedule/scheduler.h"

namespace moorage {

inline void submit(Scheduler& scheduler, const RequestSpec& spec) {
  const RequestSpec* const one[] = {&spec};
  scheduler.submit(one);
}

// Owns the arrays of a step's results; every sampled row gets one token.
struct Results {
  explicit Results(const Plan& plan, TokenId token = 1)
      : step_id(plan.step_id),
        num_accepted(plan.row_samples.begin(), plan.row_samples.end()),
        tokens(plan.row_samples.size(), token),
        loads(plan.row_loads),
        finished(plan.row_samples.size()),
        failed(plan.row_samples.size()) {}

  StepResult view() const {
    return {StepId{step_id}, static_cast<std::int32_t>(num_accepted.size()), 1,
            num_accepted.data(), tokens.data(), finished.data(), failed.data()};
  }

  std::int64_t step_id;
  std::vector<std::int32_t> num_accepted;
  std::vector<TokenId> tokens;
  std::vector<std::array<std::int64_t, 2>> loads;  // tickets each row waited for
  std::vector<std::uint8_t> finished;
  std::vector<std::uint8_t> failed;
};

class SchedulerDriver {
 public:
  static SchedulerConfig config(std::uint8_t choice) {
    const std::int32_t num_l2_pages = choice % 3 * 10;
    SchedulerConfig config;
    config.page_size = 4;
    config.num_pages = 14;
    config.max_slots = 3;
    config.max_context_len = 48;
    config.token_budget = 10;
    config.lone_token_budget = choice % 2 * 25;
    config.attention_len = 16;
    config.lease_percent = 100;
    config.num_l2_pages = num_l2_pages;
    config.use_l3 = num_l2_pages > 0;
    config.num_l3_pages = choice / 3 % 2 == 0 ? 1 << 20 : 12;
    config.probe_l3 = config.use_l3 && choice / 6 % 2 == 1;
    config.l3_wait_ms = choice / 12 % 3 * 8;
    config.eviction = choice / 36 % 2 == 0 ? "value" : "lru";
    config.max_preemptions = choice / 72 % 2 * 2;
    config.overlap_loads = choice >= 144;
    return config;
  }

  // The first byte says how many pages L2 has: none, few or plenty; and what L3 does.
  explicit SchedulerDriver(std::span<const std::uint8_t> bytes)
      : bytes_(bytes.empty() ? bytes : bytes.subspan(1)),
        scheduler_(config(bytes.empty() ? std::uint8_t{0} : bytes[0])) {}

  void run() {
    while (!bytes_.empty()) {
      act(next() % 10);
      check();
    }
    finish();
  }

  std::int64_t num_retractions() const { return scheduler_.stats().num_retractions; }
  std::int64_t num_lower_hits() const { return num_lower_hits_; }
  std::int64_t num_remote() const { return num_remote_; }
  std::int64_t num_ended() const { return num_ended_; }
  std::int64_t num_sends() const { return num_sends_; }
  std::int64_t num_rows_while_loading() const { return num_rows_while_loading_; }
  std::int64_t num_void_rows() const { return num_void_rows_; }
  const Stats& stats() const { return scheduler_.stats(); }

 private:
  std::uint8_t next() {
    if (bytes_.empty()) return 0;
    const std::uint8_t byte = bytes_[0];
    bytes_ = bytes_.subspan(1);
    return byte;
  }

  void act(int choice) {
    switch (choice) {
      case 0:
      case 1: return submit_random();
      case 2: return abort_random();
      case 3: return disturb_cache();
      case 4: return commit();
      case 5: return ack_some();
      case 6: return speak_of_tiers();
      default: return plan();
    }
  }

  std::vector<TokenId> random_tokens() {
    std::vector<TokenId> tokens(1 + next() % 20);
    std::uint32_t state = next();  // one byte seeds all: inputs stay short, collisions common
    for (TokenId& token : tokens) {
      state = state * 1664525u + 1013904223u;
      token = static_cast<TokenId>((state >> 24) % 2);
    }
    return tokens;
  }

  void submit_random() {
    if (live_.size() >= 12) return;
    std::vector<TokenId> tokens = random_tokens();
    const std::int64_t id = next_id_++;
    live_.push_back(id);
    RequestSpec spec{RequestId{id}, std::move(tokens), 1 + next() % 28, next() % 3 - 1,
                     next() % 2 == 0 ? "a" : "b", next() % 4 == 0 ? "salt" : "",
                     next() * 4 % 1001, next() % 3, next() % 4 == 0};
    spec.l3_wait_ms = next() % 16 - 1;
    spec.send_kv = !spec.remote_prefill && next() % 4 == 0;
    submit(scheduler_, spec);
  }

  void abort_random() {
    if (live_.empty()) return;
    if (next() % 2 == 0) {
      scheduler_.set_num_draft_tokens(RequestId{live_[next() % live_.size()]}, next() % 3);
      return;
    }
    advance({AbortInput{RequestId{live_[next() % live_.size()]}}});
  }

  void disturb_cache() {
    const std::vector<TokenId> tokens = random_tokens();
    switch (next() % 5) {
      case 4: move(tokens, next() % 4); break;
      case 0: scheduler_.drop_prefix(tokens, next() % 8, ""); break;
      case 1: scheduler_.hint_prefix(tokens, next() * 4 % 1001, "", some_hold()); break;
      case 2: lease(tokens); break;
      default: scheduler_.release(next() % 4);
    }
  }

  void move(const std::vector<TokenId>& tokens, int target) {
    if (target == 2 && !scheduler_.config().use_l3) target = 1;
    const MoveResult result = scheduler_.move(tokens, static_cast<MoveTarget>(target), "");
    const std::int32_t full = static_cast<std::int32_t>(tokens.size()) / 4 * 4;
    require(result.tokens_there + result.tokens_pending + result.tokens_missing == full,
            "a move lost sight of some tokens");
  }

  HoldTimes some_hold() {
    const auto until = [this] { return next() % 2 == 0 ? 0 : now_ + next() % 32; };
    return {until(), until(), until()};
  }

  void lease(const std::vector<TokenId>& tokens) {
    const int most = scheduler_.config().use_l3 ? 3 : 1;
    scheduler_.lease({next() % 4, tokens, now_ + next() % 16, next() % 2 == 0 ? "a" : "b", "",
                      static_cast<Tier>(next() % most)});
  }

  void speak_of_tiers() {
    switch (next() % 3) {
      case 0: scheduler_.set_costs({next() * 100, next() * 100, next() * 100}); break;
      case 1:
        if (!probes_.empty()) end_probe(next());
        break;
      default:
        if (!sends_.empty()) end_send(next() > 60);
    }
  }

  void end_probe(int share) {
    const auto [id, num_pages] = probes_.back();
    probes_.pop_back();
    advance({ProbeDoneInput{id, num_pages * share / 255}});
  }

  void end_send(bool ok) {
    const RequestId id{sends_.back()};
    sends_.pop_back();
    advance({SendDoneInput{id, ok}});
  }

  // Of the tickets told of, in any order; some report a loss.
  void ack_some() {
    if (!remote_.empty()) end_remote(next() > 60);
    for (int i = next() % 8; i > 0 && !tickets_.empty(); --i) {
      ack(next() % tickets_.size(), next() > 40);
    }
  }

  void ack(std::size_t at, bool ok) {
    const std::int64_t ticket = tickets_[at];
    tickets_.erase(tickets_.begin() + static_cast<std::ptrdiff_t>(at));
    if (!ok) lost_.insert(ticket);
    advance({TransferAckInput{ticket, ok}});
  }

  // What a step read must have come before its results are taken; a row that read rubbish has none.
  void end_loads(Results& results) {
    for (std::size_t row = 0; row < results.loads.size(); ++row) {
      const auto [first, end] = results.loads[row];
      if (first < 0) continue;
      ++num_rows_while_loading_;
      for (std::int64_t ticket = first; ticket < end; ++ticket) {
        const auto at = std::ranges::find(tickets_, ticket);
        if (at == tickets_.end()) continue;
        require_refused(results);
        ack(static_cast<std::size_t>(at - tickets_.begin()), next() > 20);
      }
      const auto lost = lost_.lower_bound(first);
      if (lost == lost_.end() || *lost >= end) continue;
      results.num_accepted[row] = 0;
      ++num_void_rows_;
    }
  }

  void require_refused(const Results& results) {
    try {
      scheduler_.advance(std::vector<InputEvent>{results.view()});
    } catch (const std::invalid_argument&) {
      return;
    }
    require(false, "the results of a step were taken before what it read was there");
  }

  void end_remote(bool ok) {
    const RequestId id{remote_.back()};
    remote_.pop_back();
    advance({RemotePrefillInput{id, ok}});
  }

  void plan() {
    now_ += next() % 4;
    if (scheduler_.num_steps_in_flight() == Scheduler::kMaxStepsInFlight) commit();
    scheduler_.next_plan(now_, plan_);
    for (const auto& move : plan_.moves) tickets_.push_back(move[0]);
    for (std::size_t i = 0; i < plan_.probe_ids.size(); ++i) {
      probes_.emplace_back(plan_.probe_ids[i], plan_.probe_indptr[i + 1] - plan_.probe_indptr[i]);
    }
    for (const Admission& admission : plan_.admissions) {
      if (admission.remote) remote_.push_back(admission.request_id);
      num_remote_ += admission.remote ? 1 : 0;
      num_lower_hits_ += admission.cached_l2 + admission.cached_l3 > 0 ? 1 : 0;
    }
    if (plan_.step_id < 0) return;
    flights_.emplace_back(plan_, static_cast<TokenId>(next() % 2));
    const std::size_t row = next() % plan_.row_slots.size();
    const std::uint8_t fate = next();
    if (fate < 16 && flights_.back().num_accepted[row] == 1) flights_.back().finished[row] = 1;
    if (fate > 250) flights_.back().failed[row] = 1;
  }

  void commit() {
    if (flights_.empty()) return;
    Results results = std::move(flights_.front());
    flights_.pop_front();
    end_loads(results);
    advance({results.view()});
  }

  void advance(const std::vector<InputEvent>& events) {
    for (const EndedRequest& ended : scheduler_.advance(events)) {
      std::erase(live_, ended.request_id);
      ++num_ended_;
    }
    for (const Send& send : scheduler_.drain_sends()) {
      require(send.pages.size() == static_cast<std::size_t>((send.num_tokens + 3) / 4),
              "a send lacks pages");
      sends_.push_back(send.request_id);
      ++num_sends_;
    }
  }

  void finish() {
    for (int i = 0; i < 5000 && !live_.empty(); ++i) {
      plan();
      commit();
      while (!tickets_.empty()) {
        advance({TransferAckInput{tickets_.back(), true}});
        tickets_.pop_back();
      }
      while (!remote_.empty()) end_remote(true);
      while (!probes_.empty()) end_probe(255);
      while (!sends_.empty()) end_send(true);
      check();
    }
    require(live_.empty(), "no progress");
  }

  void check() {
    const std::string broken = scheduler_.find_broken_invariant();
    require(broken.empty(), broken.c_str());
  }

  static void require(bool holds, const char* what) {
    if (holds) return;
    std::cerr << what << std::endl;
    std::abort();
  }

  std::span<const std::uint8_t> bytes_;
  Scheduler scheduler_;
  Plan plan_;
  std::deque<Results> flights_;
  std::vector<std::int64_t> live_;
  std::vector<std::int64_t> tickets_;
  std::vector<std::int64_t> remote_;
  std::vector<std::pair<std::int64_t, std::int32_t>> probes_;
  std::vector<std::int64_t> sends_;
  std::set<std::int64_t> lost_;
  std::int64_t num_rows_while_loading_ = 0;
  std::int64_t num_void_rows_ = 0;
  std::int64_t num_sends_ = 0;
  std::int64_t num_lower_hits_ = 0;
  std::int64_t num_remote_ = 0;
  std::int64_t next_id_ = 0;
  std::int64_t num_ended_ = 0;
  TimeMs now_ = 0;
};

}  // namespace moorage
