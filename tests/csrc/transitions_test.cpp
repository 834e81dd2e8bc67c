// SPDX-License-Identifier: Apache-2.0
#include "requests/transitions.h"

#include <gtest/gtest.h>

#include "prefix/radix_tree.h"

namespace moorage {
namespace {

class TransitionsTest : public testing::Test {
 protected:
  Holdings hold(std::int32_t num_pages) {
    PrefixMatch match = tree_.find("", {});
    OwnedPages tail(pool_, PageOwner::kRequest);
    for (std::int32_t i = 0; i < num_pages; ++i) tail.grow();
    return Holdings{slots_.take(), tree_.pin("", match), std::move(tail)};
  }

  PagePool pool_{8};
  SlotPool slots_{2};
  KvEventLog log_;
  RadixTree tree_{pool_, {4, "model"}, log_};
};

TEST_F(TransitionsTest, ARequestRunsThroughToItsEnd) {
  State state = Waiting{};
  EXPECT_FALSE(apply(state, Admit{hold(3)}));
  EXPECT_FALSE(apply(state, PrefillDone{}));
  EXPECT_EQ(pool_.count(PageOwner::kRequest), 3);
  EXPECT_FALSE(apply(state, Finish{}));
  EXPECT_EQ(pool_.count(PageOwner::kInFlight), 3);
  EXPECT_EQ(slots_.num_free(), 1);
  EXPECT_FALSE(apply(state, Drained{}));
  EXPECT_EQ(pool_.num_free(), 8) << "leaving a state gives back what the next may not hold";
  EXPECT_EQ(slots_.num_free(), 2);
  EXPECT_EQ(std::get<Ended>(state).status, EndStatus::kFinished);
}

TEST_F(TransitionsTest, ARetractedRequestHoldsNothing) {
  State state = Waiting{};
  EXPECT_FALSE(apply(state, Admit{hold(2)}));
  EXPECT_FALSE(apply(state, Retract{}));
  EXPECT_EQ(pool_.count(PageOwner::kInFlight), 2);
  EXPECT_FALSE(apply(state, Drained{}));
  EXPECT_TRUE(std::holds_alternative<Waiting>(state));
  EXPECT_EQ(pool_.num_free(), 8);
}

TEST_F(TransitionsTest, WhatAnotherEngineReadsStaysUntilItHasIt) {
  State state = Waiting{};
  EXPECT_FALSE(apply(state, Admit{hold(2)}));
  EXPECT_FALSE(apply(state, PrefillDone{}));
  EXPECT_FALSE(apply(state, HandOver{}));
  EXPECT_TRUE(std::holds_alternative<Sending>(state));
  EXPECT_EQ(pool_.count(PageOwner::kRequest), 2);
  EXPECT_TRUE(apply(state, Retract{})) << "it runs no longer";
  EXPECT_FALSE(apply(state, Sent{}));
  EXPECT_FALSE(apply(state, Drained{}));
  EXPECT_EQ(std::get<Ended>(state).status, EndStatus::kFinished);
  EXPECT_EQ(pool_.num_free(), 8);
}

TEST_F(TransitionsTest, AnIllegalEventLeavesTheStateAndNamesBoth) {
  State state = Waiting{};
  const auto illegal = apply(state, Finish{});
  ASSERT_TRUE(illegal);
  EXPECT_EQ(illegal->state, "Waiting");
  EXPECT_EQ(illegal->event, "Finish");
  EXPECT_TRUE(std::holds_alternative<Waiting>(state));
}

TEST_F(TransitionsTest, TheFirstReasonToEndStands) {
  State state = Waiting{};
  EXPECT_FALSE(apply(state, Admit{hold(1)}));
  EXPECT_FALSE(apply(state, Fail{"NaN"}));
  EXPECT_FALSE(apply(state, Abort{}));
  EXPECT_FALSE(apply(state, Drained{}));
  EXPECT_EQ(std::get<Ended>(state).status, EndStatus::kFailed);
  EXPECT_EQ(std::get<Ended>(state).message, "NaN");
}

TEST(FsmTable, CoversEveryPairOnce) {
  const std::vector<FsmRow> table = fsm_table();
  EXPECT_EQ(table.size(), std::variant_size_v<State> * 13);
  std::size_t num_illegal = 0;
  for (const FsmRow& row : table) num_illegal += row.next.empty() ? 1 : 0;
  EXPECT_EQ(num_illegal, kIllegalPairs.size());
}

TEST(FsmTable, OnlyWaitingAndEndedHoldNoMemory) {
  for (const FsmRow& row : fsm_table()) {
    if (row.event == "Drained" && !row.next.empty()) {
      EXPECT_TRUE(row.next == "Waiting" || row.next == "Ended");
    }
  }
}

}  // namespace
}  // namespace moorage
