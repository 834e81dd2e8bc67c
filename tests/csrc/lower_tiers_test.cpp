// SPDX-License-Identifier: Apache-2.0
#include "tiers/lower_tiers.h"

#include <gtest/gtest.h>

namespace moorage {
namespace {

PageHash name(std::uint8_t value) {
  PageHash hash{};
  hash[0] = value;
  return hash;
}

PageName page(std::uint8_t value, const PageHash& parent) { return {name(value), parent, 4 * value}; }

class LowerTiersTest : public testing::Test {
 protected:
  // Writes pages 1..last back as one chain; their stores are not told of yet.
  void write_chain(std::uint8_t last) {
    for (std::uint8_t i = 1; i <= last; ++i) {
      EXPECT_TRUE(tiers_.write_back(l1_, cached_[i], page(i, name(i - 1))));
    }
    for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  }

  void SetUp() override {
    for (int i = 0; i < 6; ++i) cached_.grow();
  }
  void TearDown() override { EXPECT_EQ(tiers_.find_broken_invariant(), ""); }

  PagePool l1_{6};
  KvEventLog log_;
  LowerTiers tiers_{{.num_l2_pages = 3, .use_l3 = true, .page_size = 4}, log_};
  OwnedPages cached_{l1_, PageOwner::kTree};
};

TEST_F(LowerTiersTest, ATicketHoldsWhatItReadsUntilItIsAcked) {
  ASSERT_TRUE(tiers_.write_back(l1_, cached_[5], page(1, kRootHash)));
  const std::vector<Move> moves = tiers_.drain_moves();
  cached_.free_back(1);
  EXPECT_EQ(l1_.num_free(), 0) << "the page was let go of, but a transfer still reads it";
  EXPECT_EQ(l1_.orphans().size(), 1u);
  tiers_.ack(moves[0].ticket, true);
  EXPECT_EQ(l1_.num_free(), 1);
  EXPECT_TRUE(tiers_.is_in_l2(name(1)));
}

TEST_F(LowerTiersTest, ATicketThatWasLostLeavesNothingBehind) {
  ASSERT_TRUE(tiers_.write_back(l1_, cached_[1], page(1, kRootHash)));
  EXPECT_FALSE(tiers_.is_in_flight(0)) << "nobody was told of it yet";
  tiers_.drain_moves();
  ASSERT_TRUE(tiers_.is_in_flight(0));
  tiers_.ack(0, false);
  EXPECT_FALSE(tiers_.is_in_l2(name(1)));
  EXPECT_EQ(tiers_.pool().num_free(), 3);
  EXPECT_EQ(tiers_.num_lost(), 1);
}

TEST_F(LowerTiersTest, RoomIsMadeOfEndsOfChainsThatNoTicketTouches) {
  write_chain(3);
  EXPECT_FALSE(tiers_.write_back(l1_, cached_[4], page(4, name(3))))
      << "the end is being stored in L3, the others have a child";
  for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  EXPECT_EQ(tiers_.num_l3_pages(), 3);
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[4], page(4, kRootHash)));
  EXPECT_FALSE(tiers_.is_in_l2(name(3)));
  EXPECT_TRUE(tiers_.is_in_l2(name(1)));
  EXPECT_TRUE(tiers_.is_in_l3(name(3)));
}

TEST_F(LowerTiersTest, AFailedLoadForgetsL2AndAFailedFetchL3) {
  write_chain(1);
  for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  const std::int64_t load = tiers_.load_back(name(1), PageId{0});
  tiers_.drain_moves();
  tiers_.ack(load, false);
  EXPECT_FALSE(tiers_.is_in_l2(name(1)));
  const std::int64_t fetch = tiers_.fetch(name(1));
  tiers_.drain_moves();
  tiers_.ack(fetch, false);
  EXPECT_FALSE(tiers_.is_in_l3(name(1)));
  EXPECT_EQ(tiers_.num_l3_pages(), 0);
}

}  // namespace
}  // namespace moorage
