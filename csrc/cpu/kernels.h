// SPDX-License-Identifier: Apache-2.0
// What each instruction level implements: one table of plain functions per level.
// Does not know: models, threads, Python.
//
// The translation units of a level are compiled with its target flags. They must not use inline
// functions or templates of the standard library: the linker keeps one copy of those for the whole
// extension, and a copy compiled for AVX-512 would crash an older CPU.
//
// Thread rule: every function is pure over its arguments; callers give each thread its own outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "level.h"
#include "weights.h"

namespace moorage::cpu {

// Activations prepared for panel(). Which arrays a level fills is its own business; all are
// allocated. Row r starts at r * cols (scale, sum: r * cols / 32).
struct ActRows {
  int cols = 0;
  float* f32 = nullptr;
  int8_t* quants = nullptr;   // x ~ quants * scale, blocks of 32
  float* scale = nullptr;
  float* sum = nullptr;       // scale * sum(quants) per block
  uint16_t* bf16 = nullptr;
};

// One layer of the paged pool, bf16. Strides in elements; the heads of a token are contiguous.
struct KvLayer {
  uint16_t* base = nullptr;
  size_t page_stride = 0;
  size_t value_offset = 0;  // from a page's K to its V
  int page_size = 0;
  int num_kv_heads = 0;
  int head_dim = 0;

  size_t token_stride() const { return static_cast<size_t>(num_kv_heads) * head_dim; }
};

// Query heads that attend() takes: their scores of one block of keys lie on its stack.
constexpr int kMaxAttendHeads = 128;

// One query token against keys [begin, end): unnormalised partial softmax, base 2.
struct AttendTask {
  const float* query = nullptr;  // [num_heads, D], already times scale * log2(e)
  const int32_t* pages = nullptr;
  int begin = 0;
  int end = 0;
  int group = 0;           // query heads per KV head
  float* maximum = nullptr;  // [num_heads]
  float* total = nullptr;    // [num_heads]
  float* out = nullptr;      // [num_heads, D]
};

struct KernelTable {
  // Prepares row `row` of `acts` from x [cols].
  void (*prepare_row)(const float* x, WeightFormat format, const ActRows& acts, int row);
  // Same for one block of 32 columns.
  void (*prepare_block)(const float* x32, WeightFormat format, const ActRows& acts, int row,
                        int block);
  // out[t * 16 + r] = rows of the panel times activation rows [first, first + count).
  // Requires: count <= 16.
  void (*panel)(const PackedMatrix& matrix, int panel, const ActRows& acts, int first, int count,
                float* out);
  // out = x / rms(x) * weight.
  void (*norm_row)(const float* x, const float* weight, int n, float eps, float* out);
  // Rotate-half in place, cos_sin [D].
  void (*rope_row)(float* x, const float* cos_sin, int head_dim);
  // gate := silu(gate) * up.
  void (*silu_mul)(float* gate, const float* up, int n);
  // bf16 := x, round to nearest even.
  void (*to_bf16)(const float* x, uint16_t* out, int n);
  void (*attend)(const KvLayer& kv, const AttendTask& task);
  // First index of the maximum, -1 where a NaN is found.
  int (*argmax)(const float* x, int n);
  // -inf where the bit is clear.
  void (*apply_bitmask)(float* x, const int32_t* mask, int n);
};

const KernelTable& portable_table();
const KernelTable& avx512_table();

inline const KernelTable& table_of(CpuLevel level) {
  return level == CpuLevel::kPortable ? portable_table() : avx512_table();
}

// ---- AVX-512, declared here for avx512_table() ----
namespace avx512 {
void prepare_row(const float* x, WeightFormat format, const ActRows& acts, int row);
void prepare_block(const float* x32, WeightFormat format, const ActRows& acts, int row, int block);
void panel(const PackedMatrix& matrix, int panel, const ActRows& acts, int first, int count,
           float* out);
void norm_row(const float* x, const float* weight, int n, float eps, float* out);
void rope_row(float* x, const float* cos_sin, int head_dim);
void silu_mul(float* gate, const float* up, int n);
void to_bf16(const float* x, uint16_t* out, int n);
void attend(const KvLayer& kv, const AttendTask& task);
int argmax(const float* x, int n);
void apply_bitmask(float* x, const int32_t* mask, int n);
}  // namespace avx512

}  // namespace moorage::cpu
