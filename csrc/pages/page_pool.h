// SPDX-License-Identifier: Apache-2.0
// The device pool's page ids: a free list and the owner class of every page. Knows no bytes.
//
// Invariants:
//   count(kFree) + count(kRequest) + count(kTree) + count(kInFlight) == num_pages
//   a page changes owner only through OwnedPages; giving back a free page aborts the process
//   a page given back while somebody holds it stays in flight until the last PageHold ends
// Thread rule: one thread.
#pragma once

#include <array>
#include <span>
#include <utility>
#include <vector>

#include "core/ids.h"

namespace moorage {

enum class PageOwner : std::uint8_t {
  kFree,
  kRequest,   // the private tail of a running request
  kTree,      // a node of the radix tree
  kInFlight,  // held only because a planned step may still touch it
};

class PagePool {
 public:
  explicit PagePool(std::int32_t num_pages);
  ~PagePool();  // Requires: every page is free again
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  std::int32_t num_pages() const { return static_cast<std::int32_t>(owner_.size()); }
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t count(PageOwner owner) const { return counts_[static_cast<std::size_t>(owner)]; }
  PageOwner owner_of(PageId page) const { return owner_[static_cast<std::size_t>(page.value)]; }
  const std::vector<PageId>& free_list() const { return free_; }
  std::int32_t num_held() const { return num_held_; }
  std::vector<PageId> orphans() const;  // given back, but still held

 private:
  friend class OwnedPages;
  friend class PageHold;

  PageId take(PageOwner owner);  // Requires: num_free() > 0
  void take_these(std::span<const PageId> pages, PageOwner owner);  // Requires: all are free
  void hold(PageId page);
  void end_hold(PageId page);
  void give_back(PageId page, PageOwner from);
  void change_owner(PageId page, PageOwner from, PageOwner to);

  std::vector<PageId> free_;  // a stack: the page freed last is warm in cache
  std::vector<PageOwner> owner_;
  std::array<std::int32_t, 4> counts_{};
  std::vector<std::uint32_t> holds_;
  std::int32_t num_held_ = 0;  // pages with a hold
};

// A transfer or a step reads this page at a time of its own: whoever owns it may let go of it, but
// nobody gets it who would write to it before that.
class PageHold {
 public:
  PageHold() = default;
  PageHold(PagePool& pool, PageId page) : pool_(&pool), page_(page) { pool.hold(page); }
  PageHold(PageHold&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), page_(other.page_) {}
  PageHold& operator=(PageHold&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(page_, other.page_);
    return *this;
  }
  PageHold(const PageHold&) = delete;
  PageHold& operator=(const PageHold&) = delete;
  ~PageHold() {
    if (pool_ != nullptr) pool_->end_hold(page_);
  }

  PageId page() const { return page_; }

 private:
  PagePool* pool_ = nullptr;
  PageId page_;
};

}  // namespace moorage
