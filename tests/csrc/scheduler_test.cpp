// SPDX-License-Identifier: Apache-2.0
// The scheduler under the sanitizers: the behaviour itself is tested from Python.
#include "schedule/scheduler.h"

#include <gtest/gtest.h>

#include <random>

namespace moorage {
namespace {

SchedulerConfig small_config() {
  SchedulerConfig config;
  config.page_size = 4;
  config.num_pages = 24;
  config.max_slots = 4;
  config.max_context_len = 80;
  config.token_budget = 12;
  return config;
}

RequestSpec spec(std::int64_t id, std::vector<TokenId> tokens, std::int64_t max_new = 4) {
  return {RequestId{id}, std::move(tokens), max_new, 0, "default", ""};
}

// Owns the arrays of a step's results; every sampled row gets one token.
struct Results {
  explicit Results(const Plan& plan, TokenId token = 1)
      : step_id(plan.step_id),
        num_accepted(plan.row_samples.begin(), plan.row_samples.end()),
        tokens(plan.row_samples.size(), token),
        finished(plan.row_samples.size()),
        failed(plan.row_samples.size()) {}

  StepResult view() const {
    return {StepId{step_id}, static_cast<std::int32_t>(num_accepted.size()), 1,
            num_accepted.data(), tokens.data(), finished.data(), failed.data()};
  }

  std::int64_t step_id;
  std::vector<std::int32_t> num_accepted;
  std::vector<TokenId> tokens;
  std::vector<std::uint8_t> finished;
  std::vector<std::uint8_t> failed;
};

TEST(Scheduler, RunsARequestToItsEnd) {
  Scheduler scheduler(small_config());
  scheduler.submit(std::vector{spec(1, {1, 2, 3, 4, 5})});
  Plan plan;
  std::vector<EndedRequest> ended;
  for (TimeMs now = 0; ended.empty(); ++now) {
    scheduler.next_plan(now, plan);
    ASSERT_GE(plan.step_id, 0);
    const Results results(plan);
    ended = scheduler.advance(std::vector<InputEvent>{results.view()});
    EXPECT_EQ(scheduler.find_broken_invariant(), "");
  }
  EXPECT_EQ(ended[0].status, EndStatus::kFinished);
  EXPECT_EQ(ended[0].num_cached_tokens, 5 + 4 - 1);
  EXPECT_EQ(ended[0].page_hashes.size(), 2u);
}

TEST(Scheduler, ARefusedBatchInsertsNothing) {
  Scheduler scheduler(small_config());
  EXPECT_THROW(scheduler.submit(std::vector{spec(1, {1}), spec(2, {})}), std::invalid_argument);
  EXPECT_EQ(scheduler.num_waiting(), 0);
}

TEST(Scheduler, MayBeDestroyedWithStepsInFlight) {
  Scheduler scheduler(small_config());
  scheduler.submit(std::vector{spec(1, {1, 2, 3, 4, 5}), spec(2, {1, 2, 3, 4, 5, 6})});
  Plan plan;
  scheduler.next_plan(0, plan);
  scheduler.next_plan(0, plan);
  EXPECT_EQ(scheduler.num_steps_in_flight(), 2);
}

TEST(Scheduler, TwoSchedulersOnOneInputAgreeBitForBit) {
  Scheduler first(small_config()), second(small_config());
  std::mt19937 random(3);
  Plan a, b;
  std::int64_t next_id = 0;
  for (TimeMs now = 0; now < 500; ++now) {
    if (random() % 3 == 0) {
      std::vector<TokenId> tokens(1 + random() % 20);
      for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 3);
      const std::vector specs{spec(next_id++, tokens, 1 + random() % 20)};
      first.submit(specs), second.submit(specs);
    }
    first.next_plan(now, a), second.next_plan(now, b);
    ASSERT_EQ(a.step_id, b.step_id);
    ASSERT_EQ(a.row_request_ids, b.row_request_ids);
    ASSERT_EQ(a.input_ids, b.input_ids);
    ASSERT_EQ(a.slot_mapping, b.slot_mapping);
    ASSERT_EQ(a.page_deltas, b.page_deltas);
    ASSERT_EQ(a.page_copies, b.page_copies);
    ASSERT_EQ(a.retracted, b.retracted);
    if (a.step_id < 0) continue;
    const Results results(a, static_cast<TokenId>(random() % 3));
    const std::vector<InputEvent> events{results.view()};
    first.advance(events), second.advance(events);
    ASSERT_EQ(first.find_broken_invariant(), "");
  }
}

}  // namespace
}  // namespace moorage
