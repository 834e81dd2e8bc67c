// SPDX-License-Identifier: Apache-2.0
#include "prefix/reuse.h"

#include <gtest/gtest.h>

#include <vector>

#include "prefix/page_hash.h"

namespace moorage {
namespace {

PageHash name(int value) { return hash_page({}, {}, std::vector<TokenId>{value}); }

TEST(ReuseHistory, SaysHowLongAgoALostPageWasUsedAndSaysItOnce) {
  ReuseHistory reuse(10);
  reuse.tick(5);
  reuse.lose(name(1), reuse.now());
  reuse.tick(30);
  EXPECT_FALSE(reuse.find_lost(name(2)).was_lost);
  const ReuseHistory::Found found = reuse.find_lost(name(1));
  EXPECT_TRUE(found.was_lost);
  EXPECT_EQ(found.distance, 30);
  EXPECT_FALSE(reuse.find_lost(name(1)).was_lost);
}

TEST(ReuseHistory, RemembersTheLatestLossesHoweverOftenAPageWasLost) {
  ReuseHistory reuse(100);
  int num_found = 0;
  for (int round = 0; round < 5; ++round) {
    for (int page = 0; page < 300; ++page) {
      const bool was_lost = reuse.find_lost(name(page)).was_lost;
      EXPECT_FALSE(was_lost && round == 0);
      num_found += was_lost ? 1 : 0;
      reuse.tick(1);
      reuse.lose(name(page), reuse.now());
    }
  }
  EXPECT_GT(num_found, 1150) << "of 1200";
  for (int page = 1000; page < 6000; ++page) {
    reuse.tick(1);
    reuse.lose(name(page), reuse.now());
  }
  EXPECT_TRUE(reuse.find_lost(name(5999)).was_lost);
  for (int page = 0; page < 300; ++page) EXPECT_FALSE(reuse.find_lost(name(page)).was_lost);
}

TEST(ReuseHistory, ALoopIsWhatComesBackTooLateMoreOftenThanInTime) {
  ReuseHistory reuse(100);
  reuse.note(300, 3);
  EXPECT_FALSE(reuse.is_looping()) << "three pages are no loop";
  reuse.note(300, 60);
  EXPECT_TRUE(reuse.is_looping());
  reuse.note(100, 40);
  EXPECT_FALSE(reuse.is_looping());
  for (int i = 0; i < 100; ++i) reuse.note(300, 50);
  EXPECT_TRUE(reuse.is_looping()) << "what was long ago counts less and less";
}

// As the file store's index (tests/kvtiers/test_file_store_index.py).
TEST(ReuseHistory, LateUsesMustOutweighTheOthersByHalf) {
  ReuseHistory reuse(100);
  reuse.note(100, 20);
  reuse.note(200, 60);  // half of what is used so late could be served: 30
  EXPECT_FALSE(reuse.is_looping());
  reuse.note(200, 1);
  EXPECT_TRUE(reuse.is_looping());
}

}  // namespace
}  // namespace moorage
