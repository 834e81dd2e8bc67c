// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "amx.h"
#include "paged_prefill.h"
#include "scratch.h"

namespace moorage::cpu {
namespace {

constexpr int kTokensPerPass = 16;
constexpr float kLog2E = 1.44269504F;

// Row of each token of a ragged step.
std::vector<int> rows_of_tokens(const AttentionCall& call) {
  std::vector<int> rows;
  for (int row = 0; row < call.num_rows; ++row) {
    rows.insert(rows.end(), static_cast<size_t>(call.row_indptr[row + 1] - call.row_indptr[row]),
                row);
  }
  return rows;
}

void attend_token(const AttentionCall& call, const KernelTable& k, int token, int row,
                  AlignedArray<float>& scratch) {
  const int num_heads = call.kv.num_kv_heads * call.group;
  const int width = num_heads * call.kv.head_dim;
  scratch.resize(static_cast<size_t>(2 * width + 2 * num_heads));
  float* query = scratch.data();
  float* partial = query + width;
  float* maximum = partial + width;
  float* total = maximum + num_heads;
  const float* from = call.query + static_cast<size_t>(token) * width;
  for (int i = 0; i < width; ++i) query[i] = from[i] * call.scale * kLog2E;
  AttendTask task;
  task.query = query;
  task.pages = call.page_table + static_cast<size_t>(call.row_slots[row]) * call.pages_per_slot;
  task.end = call.seq_lens[row] - (call.row_indptr[row + 1] - 1 - token);
  task.group = call.group;
  task.maximum = maximum;
  task.total = total;
  task.out = partial;
  k.attend(call.kv, task);
  float* out = call.out + static_cast<size_t>(token) * width;
  for (int head = 0; head < num_heads; ++head) {
    const float inverse = 1.0F / total[head];
    for (int d = 0; d < call.kv.head_dim; ++d) {
      const int at = head * call.kv.head_dim + d;
      out[at] = partial[at] * inverse;
    }
  }
}

}  // namespace

namespace {

void linear_amx(const PackedMatrix& matrix, const float* x, int num_tokens, float* out,
                ThreadPool& pool) {
  const size_t padded = static_cast<size_t>(num_tokens + 2 * amx::kTileRows);
  AlignedArray<uint16_t> tiles(padded * matrix.num_cols);
  std::vector<AlignedArray<uint16_t>> scratch(static_cast<size_t>(pool.size()));
  const int items = (matrix.num_panels() + 1) / 2;
  pool.run(num_tokens, [&](Team& team, int me) {
    amx::begin();
    for (int token; (token = team.claim(me)) >= 0;) {
      amx::pack_row(x + static_cast<size_t>(token) * matrix.num_cols, matrix.num_cols,
                    tiles.data(), token);
    }
    team.meet(me, items);
    scratch[me].resize(amx::scratch_elements(matrix.num_cols, false));
    for (int item; (item = team.claim(me)) >= 0;) {
      amx::PairProduct product;
      product.matrix = &matrix;
      product.panels[0] = 2 * item;
      // An odd last panel is multiplied twice and stored once.
      product.panels[1] = std::min(2 * item + 1, matrix.num_panels() - 1);
      product.tokens = tiles.data();
      product.num_tokens = num_tokens;
      product.scratch = scratch[me].data();
      amx::product_store(product, {out, matrix.num_rows, item * 2 * kPanelRows});
    }
    amx::end();
  });
}

}  // namespace

void linear(const PackedMatrix& matrix, const float* x, int num_tokens, float* out,
            CpuLevel level, ThreadPool& pool) {
  if (level == CpuLevel::kAmx && num_tokens > kTokensPerPass) {
    linear_amx(matrix, x, num_tokens, out, pool);
    return;
  }
  const KernelTable& k = table_of(level);
  ActBuffer acts(std::max(num_tokens, 1), matrix.num_cols);
  pool.run(num_tokens, [&](Team& team, int me) {
    for (int token; (token = team.claim(me)) >= 0;) {
      k.prepare_row(x + static_cast<size_t>(token) * matrix.num_cols, matrix.format, acts.rows(),
                    token);
    }
    team.meet(me, matrix.num_panels());
    alignas(64) float tile[kTokensPerPass * kPanelRows];
    for (int panel; (panel = team.claim(me)) >= 0;) {
      const int width = std::min(kPanelRows, matrix.num_rows - panel * kPanelRows);
      for (int first = 0; first < num_tokens; first += kTokensPerPass) {
        const int count = std::min(kTokensPerPass, num_tokens - first);
        k.panel(matrix, panel, acts.rows(), first, count, tile);
        for (int i = 0; i < count; ++i) {
          std::memcpy(out + static_cast<size_t>(first + i) * matrix.num_rows + panel * kPanelRows,
                      tile + i * kPanelRows, sizeof(float) * width);
        }
      }
    }
  });
}

namespace {

std::vector<RowSpan> spans_of(const AttentionCall& call) {
  std::vector<RowSpan> spans;
  for (int row = 0; row < call.num_rows; ++row) {
    const int first = call.row_indptr[row];
    const int count = call.row_indptr[row + 1] - first;
    if (count == 0) continue;
    spans.push_back({first, count, call.seq_lens[row],
                     call.page_table +
                         static_cast<size_t>(call.row_slots[row]) * call.pages_per_slot});
  }
  return spans;
}

void attention_amx(const AttentionCall& call, ThreadPool& pool) {
  const int num_tokens = call.row_indptr[call.num_rows];
  const int dim = call.kv.head_dim;
  const int num_heads = call.kv.num_kv_heads * call.group;
  const int width = num_heads * dim;
  const KernelTable& k = table_of(CpuLevel::kAmx);
  const PagedPrefill prefill({num_heads, call.kv.num_kv_heads, dim}, spans_of(call), num_tokens);
  AlignedArray<uint16_t> tiles(static_cast<size_t>(num_tokens + amx::kTileRows) * width);
  std::vector<AlignedArray<float>> rows(static_cast<size_t>(pool.size()));
  pool.run(num_tokens, [&](Team& team, int me) {
    amx::begin();
    rows[me].resize(static_cast<size_t>(width));
    for (int token; (token = team.claim(me)) >= 0;) {
      const float* from = call.query + static_cast<size_t>(token) * width;
      for (int i = 0; i < width; ++i) rows[me][i] = from[i] * call.scale * kLog2E;
      for (int head = 0; head < num_heads; ++head) {
        k.to_bf16(rows[me].data() + head * dim, prefill.query(head, token), dim);
      }
    }
    team.meet(me, prefill.num_pack_items());
    for (int item; (item = team.claim(me)) >= 0;) prefill.pack(call.kv, item);
    team.meet(me, prefill.num_attend_items());
    for (int item; (item = team.claim(me)) >= 0;) prefill.attend(item, tiles.data());
    team.meet(me, num_tokens);
    for (int token; (token = team.claim(me)) >= 0;) {
      float* to = call.out + static_cast<size_t>(token) * width;
      for (int i = 0; i < width; ++i) {
        to[i] = bf16_to_float(tiles[amx::tile_index(token, i, width)]);
      }
    }
    amx::end();
  });
}

}  // namespace

void paged_attention(const AttentionCall& call, CpuLevel level, ThreadPool& pool) {
  if (level == CpuLevel::kAmx) {
    attention_amx(call, pool);
    return;
  }
  const KernelTable& k = table_of(level);
  const std::vector<int> rows = rows_of_tokens(call);
  std::vector<AlignedArray<float>> scratch(static_cast<size_t>(pool.size()));
  pool.run(static_cast<int>(rows.size()), [&](Team& team, int me) {
    for (int token; (token = team.claim(me)) >= 0;) {
      attend_token(call, k, token, rows[token], scratch[me]);
    }
  });
}

void argmax_rows(const float* logits, int num_rows, int num_cols, int32_t* out, CpuLevel level,
                 ThreadPool& pool) {
  const KernelTable& k = table_of(level);
  pool.run(num_rows, [&](Team& team, int me) {
    for (int row; (row = team.claim(me)) >= 0;) {
      out[row] = k.argmax(logits + static_cast<size_t>(row) * num_cols, num_cols);
    }
  });
}

void mask_rows(float* logits, const int32_t* mask, int num_rows, int num_cols, CpuLevel level,
               ThreadPool& pool) {
  const KernelTable& k = table_of(level);
  const int words = (num_cols + 31) / 32;
  pool.run(num_rows, [&](Team& team, int me) {
    for (int row; (row = team.claim(me)) >= 0;) {
      k.apply_bitmask(logits + static_cast<size_t>(row) * num_cols,
                      mask + static_cast<size_t>(row) * words, num_cols);
    }
  });
}

void copy_pages(const PageCopyCall& call) {
  const size_t page_bytes = call.plane_bytes * call.num_planes;
  for (int i = 0; i < call.num_copies; ++i) {
    const int32_t* copy = call.copies + static_cast<size_t>(i) * 3;
    const std::byte* source = call.pool + page_bytes * copy[0];
    std::byte* target = call.pool + page_bytes * copy[1];
    for (int plane = 0; plane < call.num_planes; ++plane) {
      std::memcpy(target + call.plane_bytes * plane, source + call.plane_bytes * plane,
                  call.token_bytes * copy[2]);
    }
  }
}

}  // namespace moorage::cpu
