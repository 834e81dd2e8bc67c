// SPDX-License-Identifier: Apache-2.0
// The scheduler under the sanitizers: the behaviour itself is tested from Python.
#include "schedule/scheduler.h"

#include <gtest/gtest.h>

#include <random>

#include "scheduler_driver.h"

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

TEST(Scheduler, RunsARequestToItsEnd) {
  Scheduler scheduler(small_config());
  submit(scheduler, spec(1, {1, 2, 3, 4, 5}));
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
  const RequestSpec good = spec(1, {1}), empty = spec(2, {});
  const RequestSpec* const batch[] = {&good, &empty};
  EXPECT_THROW(scheduler.submit(batch), std::invalid_argument);
  EXPECT_EQ(scheduler.num_waiting(), 0);
}

TEST(Scheduler, MayBeDestroyedWithStepsInFlight) {
  Scheduler scheduler(small_config());
  submit(scheduler, spec(1, {1, 2, 3, 4, 5}));
  submit(scheduler, spec(2, {1, 2, 3, 4, 5, 6}));
  Plan plan;
  scheduler.next_plan(0, plan);
  scheduler.next_plan(0, plan);
  EXPECT_EQ(scheduler.num_steps_in_flight(), 2);
}

// Nineteen of 24 pages are for the long prompt: streams have three steps to each one of its.
TEST(Scheduler, WhileMemoryIsShortALongPromptRunsInEveryFourthStep) {
  Scheduler scheduler(small_config());
  Plan plan;
  const auto step = [&] {
    scheduler.next_plan(0, plan);
    const Results results(plan);
    scheduler.advance(std::vector<InputEvent>{results.view()});
    EXPECT_EQ(scheduler.find_broken_invariant(), "");
    return plan.row_lens;
  };
  submit(scheduler, spec(1, {1}, 16));
  step();
  submit(scheduler, spec(2, std::vector<TokenId>(76, 2), 1));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(step(), (std::vector<std::int32_t>{11, 1}));
    for (int k = 0; k < Scheduler::kStreamSteps; ++k) {
      EXPECT_EQ(step(), std::vector<std::int32_t>{1});
    }
  }
}

TEST(Scheduler, APromptThatIsAloneHasLargerStepsUntilSomebodyComes) {
  SchedulerConfig config = small_config();
  config.lone_token_budget = 30;
  config.attention_len = 10;  // from 15 tokens on a step of 30 would take longer than one there
  config.spare_percent = 0;
  Scheduler scheduler(config);
  Plan plan;
  const auto step = [&] {
    scheduler.next_plan(0, plan);
    const Results results(plan);
    scheduler.advance(std::vector<InputEvent>{results.view()});
    EXPECT_EQ(scheduler.find_broken_invariant(), "");
    return plan.row_lens;
  };
  submit(scheduler, spec(1, std::vector<TokenId>(75, 1), 1));
  EXPECT_EQ(step(), std::vector<std::int32_t>{30});
  EXPECT_EQ(step(), std::vector<std::int32_t>{18});  // 2.5 * 30 * 10 / (10 + 30)
  submit(scheduler, spec(2, {2}, 2));
  EXPECT_EQ(step(), (std::vector<std::int32_t>{11, 1}));
  EXPECT_EQ(step(), (std::vector<std::int32_t>{11, 1}));
  EXPECT_EQ(step(), std::vector<std::int32_t>{5});  // all there was
}

TEST(Scheduler, ALoneBudgetIsCheckedAndNeverLess) {
  SchedulerConfig config = small_config();
  EXPECT_EQ(config.most_step_tokens(), 12);
  for (const std::int32_t wrong : {-1, (1 << 24) + 1}) {
    config.lone_token_budget = wrong;
    EXPECT_THROW(config.validate(), std::invalid_argument);
  }
  for (const auto& [lone, most] : {std::pair{5, 12}, std::pair{12, 12}, std::pair{40, 40}}) {
    config.lone_token_budget = lone;
    EXPECT_NO_THROW(config.validate());
    EXPECT_EQ(config.most_step_tokens(), most);
    Scheduler scheduler(config);
    submit(scheduler, spec(1, std::vector<TokenId>(60, 1), 1));
    Plan plan;
    scheduler.next_plan(0, plan);
    EXPECT_EQ(plan.row_lens, std::vector<std::int32_t>{most});
  }
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
      const RequestSpec next = spec(next_id++, tokens, 1 + random() % 20);
      submit(first, next), submit(second, next);
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

TEST(Scheduler, MayBeDestroyedWithTransfersInFlight) {
  SchedulerConfig config = small_config();
  config.num_l2_pages = 8;
  Scheduler scheduler(config);
  submit(scheduler, spec(1, {1, 2, 3, 4, 5, 6, 7, 8, 9}));
  Plan plan;
  scheduler.next_plan(0, plan);
  const Results results(plan);
  scheduler.advance(std::vector<InputEvent>{results.view()});
  scheduler.next_plan(1, plan);
  ASSERT_EQ(plan.moves.size(), 2u);
  EXPECT_EQ(plan.moves[0][1], static_cast<std::int64_t>(MoveKind::kWriteBack));
  EXPECT_EQ(scheduler.pool().num_held(), 2);
  EXPECT_EQ(scheduler.find_broken_invariant(), "");
}

TEST(Scheduler, AnAckOfNoTicketOrTwiceIsRefusedWhole) {
  SchedulerConfig config = small_config();
  config.num_l2_pages = 8;
  Scheduler scheduler(config);
  submit(scheduler, spec(1, {1, 2, 3, 4, 5}));
  Plan plan;
  scheduler.next_plan(0, plan);
  const Results results(plan);
  scheduler.advance(std::vector<InputEvent>{results.view()});
  const std::vector<InputEvent> early{TransferAckInput{0, true}};
  EXPECT_THROW(scheduler.advance(early), std::invalid_argument) << "nobody was told of it yet";
  scheduler.next_plan(1, plan);
  const std::vector<InputEvent> twice{TransferAckInput{0, true}, TransferAckInput{0, true}};
  EXPECT_THROW(scheduler.advance(twice), std::invalid_argument);
  EXPECT_EQ(scheduler.tiers().num_in_flight(), 1);
  scheduler.advance(early);
  EXPECT_EQ(scheduler.tiers().num_in_flight(), 0);
  EXPECT_EQ(scheduler.tiers().pool().count(PageOwner::kTree), 1);
}

// A prefix of two pages that lies in L2 alone, and a request that goes on from it.
class WhileLoading : public testing::Test {
 protected:
  static SchedulerConfig config() {
    SchedulerConfig config = small_config();
    config.num_l2_pages = 8;
    config.overlap_loads = true;
    return config;
  }

  void SetUp() override {
    submit(scheduler_, spec(1, {1, 2, 3, 4, 5, 6, 7, 8}, 1));
    scheduler_.next_plan(0, plan_);
    const Results results(plan_);
    scheduler_.advance(std::vector<InputEvent>{results.view()});
    scheduler_.next_plan(1, plan_);
    for (const auto& move : plan_.moves) advance({TransferAckInput{move[0], true}});
    scheduler_.move(std::vector<TokenId>{1, 2, 3, 4, 5, 6, 7, 8}, MoveTarget::kL2, "");
    ASSERT_EQ(scheduler_.pool().num_free(), 24);
    submit(scheduler_, spec(2, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
    scheduler_.next_plan(2, plan_);
    ASSERT_EQ(plan_.moves.size(), 2u);
    ASSERT_EQ(plan_.row_starts, std::vector<std::int32_t>{8});
    first_ = plan_.moves[0][0];
    ASSERT_EQ(plan_.row_loads[0], (std::array<std::int64_t, 2>{first_, first_ + 2}));
  }

  void advance(const std::vector<InputEvent>& events) {
    scheduler_.advance(events);
    EXPECT_EQ(scheduler_.find_broken_invariant(), "");
  }

  Scheduler scheduler_{config()};
  Plan plan_;
  std::int64_t first_ = -1;
};

TEST_F(WhileLoading, ResultsComeBehindTheAcksOfWhatTheirStepRead) {
  const Results results(plan_);
  EXPECT_THROW(advance({results.view()}), std::invalid_argument);
  EXPECT_THROW(advance({TransferAckInput{first_, true}, results.view()}), std::invalid_argument);
  EXPECT_THROW(advance({results.view(), TransferAckInput{first_, true},
                        TransferAckInput{first_ + 1, true}}),
               std::invalid_argument);
  advance({TransferAckInput{first_ + 1, true}, TransferAckInput{first_, true}, results.view()});
  scheduler_.next_plan(3, plan_);
  EXPECT_EQ(plan_.row_starts, std::vector<std::int32_t>{10});
  EXPECT_EQ(plan_.row_loads[0], (std::array<std::int64_t, 2>{-1, -1}));
}

TEST_F(WhileLoading, ARowThatReadABadPageHasNoTokenAndIsComputedFromThatPageOn) {
  Results results(plan_);
  const std::vector<InputEvent> acks{TransferAckInput{first_, true},
                                     TransferAckInput{first_ + 1, false}};
  EXPECT_THROW(advance({acks[0], acks[1], results.view()}), std::invalid_argument);
  advance(acks);
  EXPECT_THROW(advance({results.view()}), std::invalid_argument);
  results.num_accepted[0] = 0;
  results.finished[0] = results.failed[0] = 1;  // of rubbish: not taken either
  advance({results.view()});
  scheduler_.next_plan(3, plan_);
  EXPECT_EQ(plan_.row_starts, std::vector<std::int32_t>{4});
  EXPECT_EQ(plan_.row_lens, std::vector<std::int32_t>{6});
  EXPECT_EQ(scheduler_.tree().find("", std::vector<TokenId>{1, 2, 3, 4, 5, 6, 7, 8}).full_len, 4);
}

TEST_F(WhileLoading, NobodyElseFindsWhatIsStillOnItsWay) {
  submit(scheduler_, spec(3, {1, 2, 3, 4, 5, 6, 7, 8, 11, 12}));
  scheduler_.next_plan(3, plan_);
  EXPECT_EQ(scheduler_.tree().find("", std::vector<TokenId>{1, 2, 3, 4}).len(), 0);
  for (const std::int64_t id : plan_.row_request_ids) EXPECT_EQ(id, 2);
  EXPECT_TRUE(plan_.moves.empty()) << "what is on its way is not loaded twice";
}

TEST_F(WhileLoading, AnAbortKeepsThePagesUntilNothingWritesToThem) {
  const std::vector<EndedRequest> at_once =
      scheduler_.advance(std::vector<InputEvent>{AbortInput{RequestId{2}}});
  EXPECT_TRUE(at_once.empty());
  Results results(plan_);
  advance({TransferAckInput{first_, true}, TransferAckInput{first_ + 1, true}});
  EXPECT_EQ(scheduler_.num_leaving(), 1) << "the step may still write";
  results.num_accepted[0] = 0;
  advance({results.view()});
  EXPECT_EQ(scheduler_.num_leaving(), 0);
  EXPECT_EQ(scheduler_.tree().find("", std::vector<TokenId>{1, 2, 3, 4, 5, 6, 7, 8}).len(), 8);
}

TEST_F(WhileLoading, MayBeDestroyedMeanwhile) {
  EXPECT_EQ(scheduler_.num_steps_in_flight(), 1);
}

// The same walk the fuzzer takes, over seeded bytes, so that it runs where there is no clang.
TEST(Scheduler, SurvivesRandomCallSequences) {
  std::int64_t num_ended = 0, num_retractions = 0, num_lower_hits = 0, num_remote = 0;
  std::int64_t num_rows_while_loading = 0, num_void_rows = 0;
  std::int64_t num_sends = 0, num_preemptions = 0, num_probes = 0, num_declined = 0;
  for (std::uint32_t seed = 0; seed < 240; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(1500);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    SchedulerDriver driver(bytes);
    driver.run();
    num_ended += driver.num_ended();
    num_retractions += driver.num_retractions();
    num_lower_hits += driver.num_lower_hits();
    num_remote += driver.num_remote();
    num_sends += driver.num_sends();
    num_preemptions += driver.stats().num_preemptions;
    num_probes += driver.stats().num_probes;
    num_declined += driver.stats().num_declined_pages;
    num_rows_while_loading += driver.num_rows_while_loading();
    num_void_rows += driver.num_void_rows();
  }
  EXPECT_GT(num_ended, 5000);
  EXPECT_GT(num_retractions, 100);
  EXPECT_GT(num_lower_hits, 100);
  EXPECT_GT(num_remote, 100);
  EXPECT_GT(num_sends, 100);
  EXPECT_GT(num_preemptions, 100);
  EXPECT_GT(num_probes, 100);
  EXPECT_GT(num_declined, 50);
  EXPECT_GT(num_rows_while_loading, 50);
  EXPECT_GT(num_void_rows, 10);
}

}  // namespace
}  // namespace moorage
