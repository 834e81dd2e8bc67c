// SPDX-License-Identifier: Apache-2.0
// Rows of the persistent page table: who holds which. Knows no request.
#pragma once

#include <utility>
#include <vector>

#include "core/check.h"
#include "core/ids.h"

namespace moorage {

class SlotPool;

// Move-only; the destructor gives the slot back. Lifetime: the pool outlives it.
class OwnedSlot {
 public:
  OwnedSlot(OwnedSlot&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), id_(other.id_) {}
  OwnedSlot& operator=(OwnedSlot&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(id_, other.id_);
    return *this;
  }
  OwnedSlot(const OwnedSlot&) = delete;
  OwnedSlot& operator=(const OwnedSlot&) = delete;
  inline ~OwnedSlot();

  SlotId id() const { return id_; }

 private:
  friend class SlotPool;
  OwnedSlot(SlotPool& pool, SlotId id) : pool_(&pool), id_(id) {}

  SlotPool* pool_;
  SlotId id_;
};

class SlotPool {
 public:
  explicit SlotPool(std::int32_t num_slots) : num_slots_(num_slots) {
    for (std::int32_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(SlotId{slot});
  }
  ~SlotPool() {
    MOORAGE_CHECK(num_free() == num_slots_, "a slot outlived its pool");
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }

  OwnedSlot take() {  // Requires: num_free() > 0
    MOORAGE_CHECK(!free_.empty(), "took a slot from an empty pool");
    const SlotId id = free_.back();
    free_.pop_back();
    return OwnedSlot(*this, id);
  }

 private:
  friend class OwnedSlot;

  std::vector<SlotId> free_;
  std::int32_t num_slots_;
};

OwnedSlot::~OwnedSlot() {
  if (pool_ != nullptr) pool_->free_.push_back(id_);
}

}  // namespace moorage
