// SPDX-License-Identifier: Apache-2.0
// The fallback: plain C++ in fp32, right on any x86-64, checked against the other levels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace moorage::cpu {
namespace {

// The two hot loops exist twice, once for AVX2 machines; the loader takes the one that fits.
#define MOORAGE_ANY_X86 __attribute__((target_clones("default", "arch=haswell")))

void prepare_block(const float* x32, WeightFormat format, const ActRows& acts, int row, int block) {
  (void)format;
  const size_t at = static_cast<size_t>(row) * acts.cols + static_cast<size_t>(block) * kTileCols;
  std::memcpy(acts.f32 + at, x32, sizeof(float) * kTileCols);
}

void prepare_row(const float* x, WeightFormat format, const ActRows& acts, int row) {
  (void)format;
  std::memcpy(acts.f32 + static_cast<size_t>(row) * acts.cols, x, sizeof(float) * acts.cols);
}

// out[t][lane] += x[t][col] * values[col][lane] for one tile.
MOORAGE_ANY_X86 void multiply_tile(const float* x, size_t x_stride, int count, const float* values,
                                   float* out) {
  for (int t = 0; t < count; ++t) {
    float sums[kPanelRows];
    for (int lane = 0; lane < kPanelRows; ++lane) sums[lane] = out[t * kPanelRows + lane];
    for (int col = 0; col < kTileCols; ++col) {
      const float factor = x[static_cast<size_t>(t) * x_stride + col];
      for (int lane = 0; lane < kPanelRows; ++lane) {
        sums[lane] += factor * values[col * kPanelRows + lane];
      }
    }
    for (int lane = 0; lane < kPanelRows; ++lane) out[t * kPanelRows + lane] = sums[lane];
  }
}

// Writes the panel's 16 rows as values[col * 16 + lane], one tile.
void unpack_tile(const PackedMatrix& matrix, int panel, int tile, float* values) {
  alignas(64) float row[kTileCols];
  const std::byte* start = matrix.panel(panel);
  for (int lane = 0; lane < kPanelRows; ++lane) {
    unpack_tile_row(matrix.format, start, tile, lane, row);
    for (int col = 0; col < kTileCols; ++col) values[col * kPanelRows + lane] = row[col];
  }
}

void panel(const PackedMatrix& matrix, int index, const ActRows& acts, int first, int count,
           float* out) {
  alignas(64) float values[kTileCols * kPanelRows];
  std::fill(out, out + static_cast<size_t>(count) * kPanelRows, 0.0F);
  for (int tile = 0; tile < matrix.num_tiles(); ++tile) {
    unpack_tile(matrix, index, tile, values);
    const float* x = acts.f32 + static_cast<size_t>(first) * acts.cols + tile * kTileCols;
    multiply_tile(x, static_cast<size_t>(acts.cols), count, values, out);
  }
}

void norm_row(const float* x, const float* weight, int n, float eps, float* out) {
  float squares = 0.0F;
  for (int i = 0; i < n; ++i) squares += x[i] * x[i];
  const float inverse = 1.0F / std::sqrt(squares / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void rope_row(float* x, const float* cos_sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float low = x[i];
    const float high = x[half + i];
    x[i] = low * cos_sin[i] - high * cos_sin[half + i];
    x[half + i] = high * cos_sin[i] + low * cos_sin[half + i];
  }
}

void silu_mul(float* gate, const float* up, int n) {
  for (int i = 0; i < n; ++i) gate[i] = gate[i] / (1.0F + std::exp(-gate[i])) * up[i];
}

void to_bf16(const float* x, uint16_t* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = float_to_bf16(x[i]);
}

const uint16_t* key_of(const KvLayer& kv, const AttendTask& task, int token, int kv_head) {
  const size_t page = static_cast<size_t>(task.pages[token / kv.page_size]);
  return kv.base + page * kv.page_stride + (token % kv.page_size) * kv.token_stride() +
         static_cast<size_t>(kv_head) * kv.head_dim;
}

MOORAGE_ANY_X86 void attend_head(const KvLayer& kv, const AttendTask& task, int head) {
  const float* query = task.query + static_cast<size_t>(head) * kv.head_dim;
  float* out = task.out + static_cast<size_t>(head) * kv.head_dim;
  std::fill(out, out + kv.head_dim, 0.0F);
  float maximum = -std::numeric_limits<float>::infinity();
  float total = 0.0F;
  for (int token = task.begin; token < task.end; ++token) {
    const uint16_t* key = key_of(kv, task, token, head / task.group);
    float score = 0.0F;
    for (int d = 0; d < kv.head_dim; ++d) score += query[d] * bf16_to_float(key[d]);
    const float now = std::max(maximum, score);
    const float factor = std::exp2(maximum - now);
    const float weight = std::exp2(score - now);
    const uint16_t* value = key + kv.value_offset;
    for (int d = 0; d < kv.head_dim; ++d) {
      out[d] = out[d] * factor + weight * bf16_to_float(value[d]);
    }
    total = total * factor + weight;
    maximum = now;
  }
  task.maximum[head] = maximum;
  task.total[head] = total;
}

void attend(const KvLayer& kv, const AttendTask& task) {
  const int num_heads = kv.num_kv_heads * task.group;
  for (int head = 0; head < num_heads; ++head) attend_head(kv, task, head);
}

int argmax(const float* x, int n) {
  int best = 0;
  for (int i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return -1;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

void apply_bitmask(float* x, const int32_t* mask, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t word = static_cast<uint32_t>(mask[i / 32]);
    if (((word >> (i % 32)) & 1U) == 0) x[i] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

const KernelTable& portable_table() {
  static const KernelTable table = {prepare_row, prepare_block, panel,  norm_row, rope_row,
                                    silu_mul,    to_bf16,       attend, argmax,   apply_bitmask};
  return table;
}

}  // namespace moorage::cpu
