// SPDX-License-Identifier: Apache-2.0
// Move-only ownership of a run of pages; the destructor gives them back to the pool.
//
// There is no share(): a page has one owner. What is shared is a prefix, by NodeRef::share().
// Lifetime: the pool outlives every OwnedPages made from it.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "core/check.h"
#include "pages/page_pool.h"

namespace moorage {

class OwnedPages {
 public:
  OwnedPages(PagePool& pool, PageOwner owner) : pool_(&pool), owner_(owner) {}
  ~OwnedPages() { free_back(size()); }

  OwnedPages(OwnedPages&& other) noexcept
      : pool_(other.pool_), owner_(other.owner_), pages_(std::exchange(other.pages_, {})) {}
  OwnedPages& operator=(OwnedPages&& other) noexcept {
    if (this == &other) return *this;
    free_back(size());
    pool_ = other.pool_;
    owner_ = other.owner_;
    pages_ = std::exchange(other.pages_, {});
    return *this;
  }
  OwnedPages(const OwnedPages&) = delete;
  OwnedPages& operator=(const OwnedPages&) = delete;

  std::int32_t size() const { return static_cast<std::int32_t>(pages_.size()); }
  bool is_empty() const { return pages_.empty(); }
  PageId operator[](std::int32_t index) const { return pages_[static_cast<std::size_t>(index)]; }
  std::span<const PageId> view() const { return pages_; }
  PageOwner owner() const { return owner_; }

  // Takes one page. Requires: the pool has a free one.
  PageId grow() {
    pages_.push_back(pool_->take(owner_));
    return pages_.back();
  }

  // Takes exactly these. Requires: they are free.
  void take(std::span<const PageId> pages) {
    pool_->take_these(pages, owner_);
    pages_.insert(pages_.end(), pages.begin(), pages.end());
  }

  // Takes over every page of `other`, which is empty afterwards.
  void append(OwnedPages&& other) {
    for (const PageId page : other.pages_) {
      pool_->change_owner(page, other.owner_, owner_);
      pages_.push_back(page);
    }
    other.pages_.clear();
  }

  OwnedPages split_front(std::int32_t count) {
    MOORAGE_CHECK(count >= 0 && count <= size(), "split beyond the end");
    OwnedPages front(*pool_, owner_);
    front.pages_.assign(pages_.begin(), pages_.begin() + count);
    pages_.erase(pages_.begin(), pages_.begin() + count);
    return front;
  }

  OwnedPages split_back(std::int32_t count) {
    MOORAGE_CHECK(count >= 0 && count <= size(), "split beyond the start");
    OwnedPages back(*pool_, owner_);
    back.pages_.assign(pages_.end() - count, pages_.end());
    pages_.erase(pages_.end() - count, pages_.end());
    return back;
  }

  void free_back(std::int32_t count) {
    for (; count > 0; --count) {
      pool_->give_back(pages_.back(), owner_);
      pages_.pop_back();
    }
  }

  void hand_to(PageOwner owner) {
    for (const PageId page : pages_) pool_->change_owner(page, owner_, owner);
    owner_ = owner;
  }

 private:
  PagePool* pool_;
  PageOwner owner_;
  std::vector<PageId> pages_;
};

}  // namespace moorage
