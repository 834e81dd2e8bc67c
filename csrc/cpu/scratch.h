// SPDX-License-Identifier: Apache-2.0
// Aligned temporary arrays of one step. Does not know: what they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "kernels.h"

namespace moorage::cpu {

// A 64-byte aligned array that lives as long as its owner. Contents start undefined.
template <typename T>
class AlignedArray {
 public:
  AlignedArray() = default;
  explicit AlignedArray(size_t count) { resize(count); }
  ~AlignedArray() { std::free(data_); }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;

  // Grows only; contents are lost when it does.
  void resize(size_t count) {
    if (count <= count_) return;
    std::free(data_);
    const size_t num_bytes = (count * sizeof(T) + 63) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, num_bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    count_ = count;
  }
  T* data() const { return data_; }
  T& operator[](size_t index) const { return data_[index]; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

// Memory behind an ActRows of `rows` x `cols`.
class ActBuffer {
 public:
  ActBuffer(int rows, int cols) {
    const size_t size = static_cast<size_t>(rows) * cols;
    f32_.resize(size);
    quants_.resize(size);
    bf16_.resize(size);
    scale_.resize(size / kTileCols);
    sum_.resize(size / kTileCols);
    rows_ = {cols, f32_.data(), quants_.data(), scale_.data(), sum_.data(), bf16_.data()};
  }
  const ActRows& rows() const { return rows_; }

 private:
  AlignedArray<float> f32_;
  AlignedArray<int8_t> quants_;
  AlignedArray<float> scale_;
  AlignedArray<float> sum_;
  AlignedArray<uint16_t> bf16_;
  ActRows rows_;
};

}  // namespace moorage::cpu
