// SPDX-License-Identifier: Apache-2.0
#include "tiers/lower_tiers.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

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

TEST_F(LowerTiersTest, WhatItsOwnerWishesThereGoesAfterWhatNobodyDoes) {
  write_chain(1);
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[2], page(2, kRootHash)));
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[3], page(3, kRootHash)));
  while (tiers_.num_in_flight() > 0) {
    for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  }
  tiers_.hold(name(1), 100, 0);
  tiers_.value(name(3), 0);
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[4], page(4, kRootHash)));
  EXPECT_FALSE(tiers_.is_in_l2(name(3))) << "nobody comes back to it";
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[5], page(5, kRootHash)));
  EXPECT_FALSE(tiers_.is_in_l2(name(2)));
  EXPECT_TRUE(tiers_.is_in_l2(name(1)));
  tiers_.set_now(100);
  EXPECT_FALSE(tiers_.is_in_l2(name(1))) << "its time is over, and L3 has it";
  EXPECT_TRUE(tiers_.is_in_l3(name(1)));
}

TEST_F(LowerTiersTest, ALeasedPageStaysAndCountsOnce) {
  write_chain(2);
  while (tiers_.num_in_flight() > 0) {
    for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  }
  for (int times = 0; times < 2; ++times) {
    tiers_.lease(Tier::kL2, name(1));
    tiers_.lease(Tier::kL2, name(2));
  }
  EXPECT_EQ(tiers_.num_leased(Tier::kL2), 2);
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[3], page(3, kRootHash)));
  EXPECT_FALSE(tiers_.write_back(l1_, cached_[4], page(4, kRootHash)));
  EXPECT_EQ(tiers_.drop(std::vector{name(1), name(2)}).num_pages, 0);
  for (int times = 0; times < 2; ++times) {
    tiers_.unlease(Tier::kL2, name(1));
    tiers_.unlease(Tier::kL2, name(2));
  }
  EXPECT_EQ(tiers_.num_leased(Tier::kL2), 0);
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[4], page(4, kRootHash)));
  EXPECT_FALSE(tiers_.is_in_l2(name(2)));
}

TEST_F(LowerTiersTest, ADroppedEndGoesAndWhatOthersGoOnFromStays) {
  write_chain(2);
  EXPECT_TRUE(tiers_.write_back(l1_, cached_[3], page(3, name(1))));
  while (tiers_.num_in_flight() > 0) {
    for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  }
  const std::vector chain{name(1), name(2)};
  EXPECT_EQ(tiers_.drop(chain).num_pages, 1) << "page 3 goes on from page 1";
  EXPECT_FALSE(tiers_.is_in_l2(name(2)));
  EXPECT_FALSE(tiers_.is_in_l3(name(2)));
  EXPECT_TRUE(tiers_.is_in_l2(name(1)));
  EXPECT_TRUE(tiers_.let_go_of_l2(name(3)));
  EXPECT_EQ(tiers_.drop(chain).num_pages, 0) << "in L3 it still does";
  EXPECT_EQ(tiers_.drop(std::vector{name(1), name(3)}).num_pages, 2);
  EXPECT_EQ(tiers_.num_l3_pages(), 0);
  EXPECT_EQ(tiers_.pool().num_free(), 3);
}

TEST_F(LowerTiersTest, WhatIsOnItsWayIsDroppedWithItsLastTicketUnlessItIsUsed) {
  write_chain(2);  // the stores are under way
  const std::vector chain{name(1), name(2)};
  EXPECT_EQ(tiers_.drop(chain).num_unwanted, 2);
  EXPECT_TRUE(tiers_.is_in_l2(name(2)));
  for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  EXPECT_EQ(tiers_.pool().num_free(), 3);
  EXPECT_EQ(tiers_.num_l3_pages(), 0);
  write_chain(2);
  EXPECT_EQ(tiers_.drop(chain).num_unwanted, 2);
  tiers_.touch(name(2));
  for (const Move& move : tiers_.drain_moves()) tiers_.ack(move.ticket, true);
  EXPECT_TRUE(tiers_.is_in_l2(name(1)) && tiers_.is_in_l2(name(2)));
}

// ---- the order of eviction, against a model that scans everything ------------------------------

struct NaivePage {
  std::uint8_t parent = 0;
  std::int32_t end = 0;
  std::int32_t permille = kDefaultReturnPermille;
  TimeMs until = 0, used = 0;
  std::int64_t value = 0, sequence = 0;
  int leases = 0;
};

class NaiveL2 {
 public:
  static constexpr std::int64_t kUnit = 1'000'000, kAttention = 16;

  void revalue(NaivePage& page) const {
    const std::int64_t cost = kUnit + kUnit * page.end / kAttention;
    page.value = pressure + cost * (page.permille + (page.until > 0 ? 1000 : 0)) / 1000;
  }
  bool is_end(std::uint8_t id) const {
    for (const auto& [other, page] : pages) {
      if (page.parent == id) return false;
    }
    return pages.at(id).leases == 0;
  }
  // 0: nobody can go. `kept` gets a child and is no end.
  std::uint8_t victim(std::uint8_t kept) const {
    std::uint8_t best = 0;
    for (const auto& [id, page] : pages) {
      if (id == kept || !is_end(id)) continue;
      if (best == 0) best = id;
      const NaivePage& other = pages.at(best);
      if (std::tie(page.value, page.used, page.sequence) <
          std::tie(other.value, other.used, other.sequence)) {
        best = id;
      }
    }
    return best;
  }
  void lose(std::uint8_t id, std::uint8_t kept) {
    const NaivePage gone = pages.at(id);
    pages.erase(id);
    if (gone.parent == kept) return;  // what comes is a child of it, too
    const auto parent = pages.find(gone.parent);
    if (parent == pages.end() || parent->second.used > gone.used) return;
    for (const auto& [other, page] : pages) {
      if (page.parent == gone.parent) return;  // a fork
    }
    parent->second.permille = gone.permille;
    parent->second.value = gone.value;
    parent->second.until = std::max(parent->second.until, gone.until);
  }

  std::map<std::uint8_t, NaivePage> pages;
  std::int64_t pressure = 0;
};

TEST(LowerTiers, EvictsInTheOrderThatAScanOfAllPagesGives) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    PagePool l1(1);
    OwnedPages source(l1, PageOwner::kTree);
    source.grow();
    KvEventLog log;
    LowerTiers tiers({.num_l2_pages = 6, .page_size = 4, .attention_len = NaiveL2::kAttention},
                     log);
    NaiveL2 naive;
    TimeMs now = 1;
    std::int64_t next_sequence = 0;
    for (int step = 0; step < 300; ++step) {
      now += random() % 3;
      tiers.set_now(now);
      const auto id = static_cast<std::uint8_t>(1 + random() % 20);
      const auto known = naive.pages.find(id);
      switch (random() % 5) {
        case 0:
        case 1: {
          if (known != naive.pages.end()) break;
          const auto at = static_cast<std::uint8_t>(random() % 21);
          const bool has_parent = naive.pages.contains(at);
          const std::uint8_t parent = has_parent ? at : 0;
          const std::int32_t end = 4 + (has_parent ? naive.pages.at(parent).end : 0);
          const bool is_full = naive.pages.size() == 6;
          const std::uint8_t victim = is_full ? naive.victim(parent) : 0;
          const bool fits =
              tiers.write_back(l1, source[0], {name(id), parent > 0 ? name(parent) : kRootHash, end});
          next_sequence += 1;
          ASSERT_EQ(fits, !is_full || victim != 0);
          if (victim != 0) {
            ASSERT_FALSE(tiers.is_in_l2(name(victim))) << "seed " << seed << " step " << step;
            naive.pressure = std::max(naive.pressure, naive.pages.at(victim).value);
            naive.lose(victim, parent);
          }
          if (!fits) break;
          for (const Move& move : tiers.drain_moves()) tiers.ack(move.ticket, true);
          NaivePage page{.parent = parent, .end = end, .used = now, .sequence = next_sequence};
          naive.revalue(page);
          naive.pages[id] = page;
          break;
        }
        case 2:
          tiers.touch(name(id));
          if (known == naive.pages.end()) break;
          known->second.used = now;
          naive.revalue(known->second);
          break;
        case 3: {
          const auto permille = static_cast<std::int32_t>(random() % 1001);
          const TimeMs until = random() % 2 == 0 ? 0 : 1'000'000;
          tiers.value(name(id), permille);
          tiers.hold(name(id), until, 0);
          if (known == naive.pages.end()) break;
          known->second.permille = permille;
          known->second.until = until;
          naive.revalue(known->second);
          break;
        }
        default:
          if (known == naive.pages.end()) break;
          if (known->second.leases == 0) {
            tiers.lease(Tier::kL2, name(id)), known->second.leases = 1;
          } else {
            tiers.unlease(Tier::kL2, name(id)), known->second.leases = 0;
          }
      }
      for (std::uint8_t other = 1; other <= 20; ++other) {
        ASSERT_EQ(tiers.is_in_l2(name(other)), naive.pages.contains(other)) << "seed " << seed;
      }
      ASSERT_EQ(tiers.find_broken_invariant(), "");
    }
    for (auto& [id, page] : naive.pages) {
      if (page.leases > 0) tiers.unlease(Tier::kL2, name(id));
    }
  }
}

}  // namespace
}  // namespace moorage
