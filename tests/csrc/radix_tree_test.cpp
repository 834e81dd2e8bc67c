// SPDX-License-Identifier: Apache-2.0
#include "prefix/radix_tree.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace moorage {
namespace {

constexpr std::int32_t kPage = 4;

using Tokens = std::vector<TokenId>;

Tokens range(TokenId from, TokenId to) {
  Tokens tokens(static_cast<std::size_t>(to - from));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class RadixTreeTest : public testing::Test {
 protected:
  OwnedPages take(std::int64_t num_tokens) {
    OwnedPages pages(pool_, PageOwner::kRequest);
    for (std::int64_t at = 0; at < num_tokens; at += kPage) pages.grow();
    return pages;
  }

  // Caches `tokens` as a finished request would; returns the pages that were duplicates.
  std::int32_t insert(const Tokens& tokens) {
    tree_.set_now(++now_);
    PrefixMatch match = tree_.find("", tokens);
    match.partial_node = nullptr, match.partial_len = 0;
    NodeRef ref = tree_.pin("", match);
    return grow(ref, tokens, match.full_len);
  }

  std::int32_t grow(NodeRef& ref, const Tokens& tokens, std::int32_t from) {
    const std::int32_t full = static_cast<std::int32_t>(tokens.size()) / kPage * kPage;
    std::vector<RadixTree::Adopted> adopted;
    const OwnedPages duplicates = tree_.publish(
        ref, TokenSpan(tokens).subspan(from, full - from), take(full - from), adopted);
    EXPECT_EQ(static_cast<std::int32_t>(adopted.size()), duplicates.size());
    const TokenSpan rest = TokenSpan(tokens).subspan(full);
    if (!rest.empty()) tree_.publish_partial(ref, rest, take(1));
    return duplicates.size();
  }

  NodeRef pin(const Tokens& tokens) {
    PrefixMatch match = tree_.find("", tokens);
    return tree_.pin("", match);
  }

  std::int32_t hit(const Tokens& tokens) { return tree_.find("", tokens).len(); }

  void TearDown() override { EXPECT_EQ(tree_.find_broken_invariant(), ""); }

  TimeMs now_ = 0;
  PagePool pool_{64};
  KvEventLog log_;
  RadixTree tree_{pool_, {kPage, "model", EvictionPolicy::kLru, 1024}, log_};
};

TEST_F(RadixTreeTest, FindsNothingInAnEmptyTree) { EXPECT_EQ(hit(range(0, 9)), 0); }

TEST_F(RadixTreeTest, MatchesToTheExactToken) {
  insert(range(0, 10));
  EXPECT_EQ(hit(range(0, 10)), 10);
  EXPECT_EQ(hit(range(0, 30)), 10);
  EXPECT_EQ(hit(range(0, 7)), 7);
  EXPECT_EQ(hit(range(0, 9) + Tokens{99}), 9);
  EXPECT_EQ(hit(range(0, 5) + Tokens{99}), 5);
  EXPECT_EQ(hit(range(1, 9)), 0);
}

TEST_F(RadixTreeTest, SplitsOnlyAtPageBoundaries) {
  insert(range(0, 12));
  insert(range(0, 6) + range(50, 56));
  EXPECT_EQ(hit(range(0, 12)), 12);
  EXPECT_EQ(hit(range(0, 6) + range(50, 56)), 12);
  for (const Node* node : tree_.snapshot(100)) EXPECT_EQ(node->start % kPage, 0);
}

TEST_F(RadixTreeTest, AReferenceStillMeansItsWholePathAfterASplit) {
  insert(range(0, 16));
  const NodeRef whole = pin(range(0, 16));
  const NodeRef front = pin(range(0, 8));
  EXPECT_EQ(whole.node().end(), 16);
  EXPECT_EQ(front.node().end(), 8);
  EXPECT_EQ(tree_.evict(100), 0);
  EXPECT_EQ(tree_.pages_of(whole.node()).size(), 4u);
}

TEST_F(RadixTreeTest, NeverEvictsWhatSomebodyHolds) {
  insert(range(0, 8));
  insert(range(0, 4) + range(50, 54));
  const NodeRef held = pin(range(0, 8));
  EXPECT_EQ(tree_.pages().evictable, 1);
  EXPECT_EQ(tree_.evict(100), 1);
  EXPECT_EQ(hit(range(0, 8)), 8);
  EXPECT_EQ(hit(range(0, 4) + range(50, 54)), 4);
}

TEST_F(RadixTreeTest, ShareHoldsThePrefixASecondTime) {
  insert(range(0, 8));
  auto first = std::make_unique<NodeRef>(pin(range(0, 8)));
  const NodeRef second = first->share();
  first.reset();
  EXPECT_EQ(tree_.evict(100), 0);
  EXPECT_EQ(second.node().num_users, 1);
}

TEST_F(RadixTreeTest, EvictsLeastRecentlyUsedFirstAndNoMoreThanAsked) {
  insert(range(0, 12));
  insert(range(100, 112));
  { const NodeRef touched = (tree_.set_now(++now_), pin(range(0, 12))); }
  EXPECT_EQ(tree_.evict(2), 2);
  EXPECT_EQ(hit(range(0, 12)), 12);
  EXPECT_EQ(hit(range(100, 112)), 4);
}

TEST_F(RadixTreeTest, TiesAreBrokenByOrderOfConstruction) {
  tree_.set_now(5);
  for (TokenId branch = 0; branch < 3; ++branch) {
    PrefixMatch match = tree_.find("", {});
    NodeRef ref = tree_.pin("", match);
    grow(ref, range(branch * 100, branch * 100 + 4), 0);
  }
  EXPECT_EQ(tree_.evict(1), 1);
  EXPECT_EQ(hit(range(0, 4)), 0);
  EXPECT_EQ(hit(range(100, 104)), 4);
  EXPECT_EQ(hit(range(200, 204)), 4);
}

TEST_F(RadixTreeTest, DuplicatesComeBackToTheirOwner) {
  insert(range(0, 12));
  NodeRef ref = pin({});
  const std::int32_t free_before = pool_.num_free();
  EXPECT_EQ(grow(ref, range(0, 16), 0), 3);
  EXPECT_EQ(pool_.num_free(), free_before - 1);
  EXPECT_EQ(ref.node().end(), 16);
}

TEST_F(RadixTreeTest, APartialPageIsTakenOnlyWhenNobodyHoldsIt) {
  insert(range(0, 6));
  PrefixMatch match = tree_.find("", range(0, 8));
  EXPECT_EQ(match.partial_len, 2);
  EXPECT_TRUE(tree_.can_take_partial(match));
  {
    const NodeRef reader = tree_.pin_partial(match);
    EXPECT_FALSE(tree_.can_take_partial(match));
  }
  match = tree_.find("", range(0, 5));  // only a part of what the page holds
  EXPECT_EQ(match.partial_len, 1);
  EXPECT_FALSE(tree_.can_take_partial(match));
  match = tree_.find("", range(0, 8));
  NodeRef ref = tree_.pin("", match);
  const OwnedPages page = tree_.take_partial(match);
  EXPECT_EQ(page.size(), 1);
  EXPECT_EQ(hit(range(0, 8)), 4);
}

TEST_F(RadixTreeTest, ALongerPageReplacesThePartialOneItBeginsWith) {
  insert(range(0, 6));
  insert(range(0, 8));
  std::int32_t cached = pool_.count(PageOwner::kTree);
  EXPECT_EQ(cached, 2);
  EXPECT_EQ(hit(range(0, 8)), 8);
}

TEST_F(RadixTreeTest, ChainsOfOneSessionMergeIntoOneNode) {
  {
    NodeRef ref = pin({});
    std::vector<RadixTree::Adopted> adopted;
    for (TokenId at = 0; at < 40; at += kPage) {
      const NodeRef watcher = ref.share();  // forces a new node for each page
      const Tokens page = range(at, at + kPage);
      EXPECT_TRUE(tree_.publish(ref, page, take(kPage), adopted).is_empty());
    }
    EXPECT_EQ(tree_.num_nodes(), 10);
  }
  EXPECT_EQ(tree_.num_nodes(), 1);
  EXPECT_EQ(hit(range(0, 40)), 40);
}

TEST_F(RadixTreeTest, DropFreesTheUnsharedEndOnly) {
  insert(range(0, 12));
  insert(range(0, 4) + range(50, 58));
  EXPECT_EQ(tree_.drop("", range(0, 12), 9), 0);
  EXPECT_EQ(tree_.drop("", range(0, 12), 6), 1);
  EXPECT_EQ(tree_.drop("", range(0, 4), 0), 0);
  EXPECT_EQ(tree_.drop("", range(0, 8), 0), 1);
  EXPECT_EQ(tree_.drop("", range(0, 4) + range(50, 58), 0), 3);
  EXPECT_EQ(pool_.num_free(), pool_.num_pages());
  EXPECT_TRUE(tree_.snapshot(10).empty()) << "an empty namespace is forgotten";
}

TEST_F(RadixTreeTest, AgreesWithABruteForceSearch) {
  std::mt19937 random(7);
  std::vector<Tokens> known;
  for (int round = 0; round < 400; ++round) {
    Tokens tokens;
    if (!known.empty() && random() % 4 != 0) {
      const Tokens& base = known[random() % known.size()];
      tokens.assign(base.begin(), base.begin() + static_cast<int>(random() % (base.size() + 1)));
    }
    for (int i = static_cast<int>(random() % 6) + 1; i > 0; --i) {
      tokens.push_back(static_cast<TokenId>(random() % 3));
    }
    if (tokens.size() > 24) tokens.resize(24);
    std::int32_t best = 0;
    for (const Tokens& other : known) best = std::max(best, common_prefix_len(tokens, other));
    ASSERT_EQ(hit(tokens), best);
    if (pool_.num_free() < 8) {
      tree_.evict(1000);
      known.clear();
      EXPECT_EQ(pool_.num_free(), pool_.num_pages());
    }
    insert(tokens);
    known.push_back(tokens);
    ASSERT_EQ(tree_.find_broken_invariant(), "");
  }
}

}  // namespace
}  // namespace moorage
