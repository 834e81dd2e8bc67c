// SPDX-License-Identifier: Apache-2.0
#include "pages/page_pool.h"

#include <gtest/gtest.h>

#include <optional>
#include <type_traits>

#include "pages/owned_pages.h"
#include "prefix/node.h"
#include "schedule/slots.h"

namespace moorage {
namespace {

static_assert(!std::is_copy_constructible_v<OwnedPages> && !std::is_copy_assignable_v<OwnedPages>);
static_assert(!std::is_copy_constructible_v<NodeRef> && !std::is_copy_assignable_v<NodeRef>);
static_assert(!std::is_copy_constructible_v<OwnedSlot> && !std::is_copy_assignable_v<OwnedSlot>);
static_assert(std::is_nothrow_move_constructible_v<OwnedPages>);
static_assert(std::is_nothrow_move_constructible_v<NodeRef>);

OwnedPages take(PagePool& pool, int count, PageOwner owner = PageOwner::kRequest) {
  OwnedPages pages(pool, owner);
  for (int i = 0; i < count; ++i) pages.grow();
  return pages;
}

TEST(PagePool, HandsOutEveryPageOnce) {
  PagePool pool(5);
  const OwnedPages pages = take(pool, 5);
  std::vector<bool> seen(5);
  for (const PageId page : pages.view()) seen[static_cast<std::size_t>(page.value)] = true;
  EXPECT_EQ(seen, std::vector<bool>(5, true));
  EXPECT_EQ(pool.num_free(), 0);
}

TEST(PagePool, ReturnsPagesWhenHandleDies) {
  PagePool pool(4);
  {
    const OwnedPages pages = take(pool, 3);
    EXPECT_EQ(pool.count(PageOwner::kRequest), 3);
  }
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_EQ(pool.count(PageOwner::kRequest), 0);
}

TEST(PagePool, CountsFollowThePagesThroughEveryMove) {
  PagePool pool(6);
  OwnedPages tail = take(pool, 4);
  OwnedPages node(pool, PageOwner::kTree);
  node.append(tail.split_front(2));
  EXPECT_EQ(pool.count(PageOwner::kRequest), 2);
  EXPECT_EQ(pool.count(PageOwner::kTree), 2);
  tail.hand_to(PageOwner::kInFlight);
  EXPECT_EQ(pool.count(PageOwner::kInFlight), 2);
  OwnedPages moved = std::move(tail);
  EXPECT_TRUE(tail.is_empty());  // NOLINT(bugprone-use-after-move): a moved-from run is empty
  moved = std::move(node);       // what it held goes back
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_EQ(moved.owner(), PageOwner::kTree);
}

TEST(PagePool, SplitsKeepTheOrderOfPages) {
  PagePool pool(5);
  OwnedPages pages = take(pool, 5);
  const std::vector<PageId> before(pages.view().begin(), pages.view().end());
  const OwnedPages back = pages.split_back(2);
  const OwnedPages front = pages.split_front(1);
  EXPECT_EQ(front[0], before[0]);
  EXPECT_EQ(pages[0], before[1]);
  EXPECT_EQ(pages[1], before[2]);
  EXPECT_EQ(back[0], before[3]);
  EXPECT_EQ(back[1], before[4]);
}

using PagePoolDeathTest = testing::Test;

TEST(PagePoolDeathTest, AbortsWhenAPageOutlivesItsPool) {
  EXPECT_DEATH(
      {
        auto pool = std::make_unique<PagePool>(2);
        OwnedPages pages(*pool, PageOwner::kRequest);
        pages.grow();
        pool.reset();
      },
      "a page outlived its pool");
}

TEST(PagePoolDeathTest, AbortsWhenMorePagesAreTakenThanThereAre) {
  EXPECT_DEATH(
      {
        PagePool pool(1);
        take(pool, 2);
      },
      "empty pool");
}

TEST(SlotPool, ReturnsSlotsWhenHandleDies) {
  SlotPool slots(2);
  {
    const OwnedSlot first = slots.take();
    OwnedSlot second = slots.take();
    EXPECT_NE(first.id(), second.id());
    EXPECT_EQ(slots.num_free(), 0);
    OwnedSlot moved = std::move(second);
    EXPECT_EQ(slots.num_free(), 0);
  }
  EXPECT_EQ(slots.num_free(), 2);
}

}  // namespace
}  // namespace moorage
