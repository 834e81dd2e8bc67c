// SPDX-License-Identifier: Apache-2.0
#include "pages/page_pool.h"

#include "core/check.h"

namespace moorage {

PagePool::PagePool(std::int32_t num_pages)
    : owner_(static_cast<std::size_t>(num_pages), PageOwner::kFree) {
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
  change_owner(page, from, PageOwner::kFree);
  free_.push_back(page);
}

void PagePool::change_owner(PageId page, PageOwner from, PageOwner to) {
  PageOwner& owner = owner_[static_cast<std::size_t>(page.value)];
  MOORAGE_CHECK(owner == from, "a page has another owner than its holder says");
  owner = to;
  --counts_[static_cast<std::size_t>(from)];
  ++counts_[static_cast<std::size_t>(to)];
}

}  // namespace moorage
