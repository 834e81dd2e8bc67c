// SPDX-License-Identifier: Apache-2.0
#include "pages/page_pool.h"

#include "core/check.h"

namespace moorage {

PagePool::PagePool(std::int32_t num_pages)
    : owner_(static_cast<std::size_t>(num_pages), PageOwner::kFree), holds_(owner_.size()) {
  free_.reserve(owner_.size());
  for (std::int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(PageId{page});
  counts_[static_cast<std::size_t>(PageOwner::kFree)] = num_pages;
}

PagePool::~PagePool() {
  MOORAGE_CHECK(num_free() == num_pages(), "a page outlived its pool");
}

PageId PagePool::take(PageOwner owner) {
  MOORAGE_CHECK(!free_.empty(), "took a page from an empty pool");
  const PageId page = free_.back();
  free_.pop_back();
  change_owner(page, PageOwner::kFree, owner);
  return page;
}

void PagePool::give_back(PageId page, PageOwner from) {
  if (holds_[static_cast<std::size_t>(page.value)] > 0) {
    return change_owner(page, from, PageOwner::kInFlight);
  }
  change_owner(page, from, PageOwner::kFree);
  free_.push_back(page);
}

void PagePool::take_these(std::span<const PageId> pages, PageOwner owner) {
  for (const PageId page : pages) change_owner(page, PageOwner::kFree, owner);
  std::erase_if(free_, [this](PageId page) { return owner_of(page) != PageOwner::kFree; });
}

void PagePool::hold(PageId page) {
  std::uint32_t& holds = holds_[static_cast<std::size_t>(page.value)];
  MOORAGE_CHECK(owner_of(page) == PageOwner::kTree, "held what is not cached");
  num_held_ += holds++ == 0 ? 1 : 0;
}

void PagePool::end_hold(PageId page) {
  std::uint32_t& holds = holds_[static_cast<std::size_t>(page.value)];
  MOORAGE_CHECK(holds > 0, "a hold ended twice");
  if (--holds > 0) return;
  num_held_ -= 1;
  if (owner_of(page) == PageOwner::kInFlight) give_back(page, PageOwner::kInFlight);
}

std::vector<PageId> PagePool::orphans() const {
  std::vector<PageId> pages;
  for (std::int32_t i = 0; i < num_pages(); ++i) {
    const PageId page{i};
    if (holds_[static_cast<std::size_t>(i)] > 0 && owner_of(page) == PageOwner::kInFlight) {
      pages.push_back(page);
    }
  }
  return pages;
}

void PagePool::change_owner(PageId page, PageOwner from, PageOwner to) {
  PageOwner& owner = owner_[static_cast<std::size_t>(page.value)];
  MOORAGE_CHECK(owner == from, "a page has another owner than its holder says");
  owner = to;
  --counts_[static_cast<std::size_t>(from)];
  ++counts_[static_cast<std::size_t>(to)];
}

}  // namespace moorage
