// SPDX-License-Identifier: Apache-2.0
// Single ops over plain arrays, threaded, for callers that compose a model themselves.
// Does not know: models, Python. Thread rule: each call uses the global pool, callers take turns.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"

namespace moorage::cpu {

// out[t, n] = x[t] . row n of the matrix; x [num_tokens, num_cols], out [num_tokens, num_rows].
void linear(const PackedMatrix& matrix, const float* x, int num_tokens, float* out,
            CpuLevel level,
            ThreadPool& pool);

struct AttentionCall {
  const float* query = nullptr;  // [num_tokens, num_heads, D]
  float* out = nullptr;          // same shape
  int num_rows = 0;
  int group = 0;
  int pages_per_slot = 0;
  const int32_t* page_table = nullptr;
  const int32_t* row_slots = nullptr;
  const int32_t* row_indptr = nullptr;
  const int32_t* seq_lens = nullptr;
  float scale = 0.0F;
  KvLayer kv;
};

// Requires: the caller has checked row_indptr, seq_lens and every page index.
void paged_attention(const AttentionCall& call, CpuLevel level, ThreadPool& pool);

void argmax_rows(const float* logits, int num_rows, int num_cols, int32_t* out, CpuLevel level,
                 ThreadPool& pool);
void mask_rows(float* logits, const int32_t* mask, int num_rows, int num_cols, CpuLevel level,
               ThreadPool& pool);

// copies [num_copies, 3]: source page, target page, tokens. `num_planes` = layers * 2 (K and V).
struct PageCopyCall {
  std::byte* pool = nullptr;
  const int32_t* copies = nullptr;
  int num_copies = 0;
  int num_planes = 0;
  size_t plane_bytes = 0;
  size_t token_bytes = 0;
};
void copy_pages(const PageCopyCall& call);

}  // namespace moorage::cpu
