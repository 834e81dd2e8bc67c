// SPDX-License-Identifier: Apache-2.0
// Causal attention of a block of queries over repacked keys, on AMX.
//
// Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), in base 2: the query carries
// scale * log2(e). S = Q K^T and O += P V run on tiles, the softmax between them in AVX-512.
// Requires: head_dim % 32 == 0 and head_dim <= 256.
#include "amx.h"
#include "amx_tiles.h"
#include "avx512_math.h"

namespace moorage::cpu::amx {
namespace {

constexpr int kMaxKeyTiles = kBlockKeys / 16;

// What one head of the block works on; everything a few KB, so it stays in L1.
struct HeadState {
  alignas(64) float scores[2 * kMaxKeyTiles * 256];             // [m][key tile][16][16]
  alignas(64) uint16_t weights[2 * (kBlockKeys / 32) * 512];    // A tiles [m][k]
  alignas(64) float out[2 * (kMaxHeadDim / 16) * 256];          // [m][dim tile][16][16]
  float maximum[kBlockQueries];
  float total[kBlockQueries];
};

inline __m512i row_of(const uint16_t* key, int dim) {
  return key == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(key + dim);
}

// Transposes 16 rows of 16 dwords (one dword = two neighbouring dims of a key).
inline void transpose_dwords(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

void pack_key_tiles(const uint16_t* const* keys, int head_dim, uint16_t* out) {
  for (int dim = 0; dim < head_dim; dim += 32) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = row_of(keys[i], dim);
    transpose_dwords(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, r[i]);
    out += kTileElements;
  }
}

// 32 tokens: line i of a tile holds tokens 2i and 2i + 1 of its 16 dims, interleaved.
void pack_value_tiles(const uint16_t* const* keys, size_t value_offset, int head_dim,
                      uint16_t* out) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int pair = 0; pair < 16; ++pair) {
    const uint16_t* first = keys[2 * pair];
    const uint16_t* second = keys[2 * pair + 1];
    for (int dim = 0; dim < head_dim; dim += 32) {
      const __m512i a = row_of(first == nullptr ? nullptr : first + value_offset, dim);
      const __m512i b = row_of(second == nullptr ? nullptr : second + value_offset, dim);
      uint16_t* to = out + static_cast<size_t>(dim / 16) * kTileElements + pair * 32;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + kTileElements, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// scores = Q K^T for the block's keys; num_m is 1 or 2, num_tiles even.
inline void multiply_keys(const AttendBlock& block, const uint16_t* query, const uint16_t* keys,
                          int num_tiles, int num_m, HeadState& state) {
  const int steps = block.head_dim / 32;
  const long row_stride = static_cast<long>(block.head_dim) * 2;
  const Operand a{query, query + static_cast<size_t>(kTileRows) * block.head_dim, row_stride, 32};
  for (int tile = 0; tile < num_tiles; tile += 2) {
    const uint16_t* first = keys + static_cast<size_t>(tile) * steps * kTileElements;
    const Operand b{first, first + static_cast<size_t>(steps) * kTileElements, 64, kTileElements};
    float* to = state.scores + tile * 256;
    zero_2x2();
    if (num_m == 2) {
      multiply_2x2(a, b, steps);
      _tile_stored(2, to + kMaxKeyTiles * 256, 64);
      _tile_stored(3, to + (kMaxKeyTiles + 1) * 256, 64);
    } else {
      multiply_1x2(a, b, steps);
    }
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
  }
}

// out += P V.
inline void multiply_values(const AttendBlock& block, const uint16_t* values, int num_tiles,
                            int num_m, HeadState& state) {
  const int dim_tiles = block.head_dim / 16;
  const uint16_t* p = state.weights;
  const Operand a{p, p + (kBlockKeys / 32) * kTileElements, 64, kTileElements};
  const long step = static_cast<long>(dim_tiles) * kTileElements;
  for (int tile = 0; tile < dim_tiles; tile += 2) {
    const uint16_t* first = values + static_cast<size_t>(tile) * kTileElements;
    const Operand b{first, first + kTileElements, 64, step};
    float* to = state.out + tile * 256;
    float* to_second = to + (kMaxHeadDim / 16) * 256;
    _tile_loadd(0, to, 64);
    _tile_loadd(1, to + 256, 64);
    if (num_m == 2) {
      _tile_loadd(2, to_second, 64);
      _tile_loadd(3, to_second + 256, 64);
      multiply_2x2(a, b, num_tiles / 2);
      _tile_stored(2, to_second, 64);
      _tile_stored(3, to_second + 256, 64);
    } else {
      multiply_1x2(a, b, num_tiles / 2);
    }
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
  }
}

// One query row: scores -> bf16 weights, running maximum and total, and the rescaled output row.
inline void soften_row(HeadState& state, int row, int visible, int num_tiles, int dim_tiles) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  const int m = row / kTileRows;
  const int r = row % kTileRows;
  const float* scores = state.scores + (m * kMaxKeyTiles) * 256 + r * 16;
  __m512 s[kMaxKeyTiles];
  __m512 top = lowest;
#pragma GCC unroll 8
  for (int i = 0; i < kMaxKeyTiles; ++i) {
    if (i >= num_tiles) break;
    const int left = visible - i * 16;
    const __mmask16 mask = left >= 16 ? 0xFFFF : (left <= 0 ? 0 : (1U << left) - 1U);
    s[i] = _mm512_mask_load_ps(lowest, mask, scores + i * 256);
    top = _mm512_max_ps(top, s[i]);
  }
  const float before = state.maximum[row];
  const float block_top = _mm512_reduce_max_ps(top);
  const float now = block_top > before ? block_top : before;
  const __m512 base = _mm512_set1_ps(now);
  __m512 sum = _mm512_setzero_ps();
  uint16_t* weights = state.weights + m * (kBlockKeys / 32) * kTileElements + r * 32;
#pragma GCC unroll 4
  for (int k = 0; k < kMaxKeyTiles / 2; ++k) {
    if (2 * k >= num_tiles) break;
    const __m512 low = avx512::exp2_ps(_mm512_sub_ps(s[2 * k], base));
    const __m512 high = avx512::exp2_ps(_mm512_sub_ps(s[2 * k + 1], base));
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    _mm512_store_si512(weights + k * kTileElements, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  float factor = 1.0F;
  if (now != before) {
    const __m512 factors = avx512::exp2_ps(_mm512_set1_ps(before - now));
    factor = _mm512_cvtss_f32(factors);
    float* out = state.out + m * (kMaxHeadDim / 16) * 256 + r * 16;
    for (int d = 0; d < dim_tiles; ++d) {
      _mm512_store_ps(out + d * 256, _mm512_mul_ps(_mm512_load_ps(out + d * 256), factors));
    }
  }
  state.maximum[row] = now;
  state.total[row] = state.total[row] * factor + _mm512_reduce_add_ps(sum);
}

inline void write_row(const AttendBlock& block, const HeadState& state, int row, int head) {
  const float* from = state.out + (row / kTileRows) * (kMaxHeadDim / 16) * 256 +
                      (row % kTileRows) * 16;
  const __m512 inverse = _mm512_set1_ps(1.0F / state.total[row]);
  const int token = block.out_token + row;
  const size_t first_tile = static_cast<size_t>(token / kTileRows) * block.out_k_tiles +
                            static_cast<size_t>(head) * block.head_dim / 32;
  uint16_t* to = block.out + first_tile * kTileElements + (token % kTileRows) * 32;
  for (int d = 0; d < block.head_dim / 32; ++d) {
    const __m512 low = _mm512_mul_ps(_mm512_load_ps(from + 2 * d * 256), inverse);
    const __m512 high = _mm512_mul_ps(_mm512_load_ps(from + (2 * d + 1) * 256), inverse);
    _mm512_storeu_si512(to + static_cast<size_t>(d) * kTileElements,
                        (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

void attend_head(const AttendBlock& block, const uint16_t* query, int head, HeadState& state) {
  const int num_m = block.num_queries > kTileRows ? 2 : 1;
  const int dim_tiles = block.head_dim / 16;
  const int end = block.first_position + block.num_queries;
  for (int m = 0; m < num_m; ++m) {
    __builtin_memset(state.out + m * (kMaxHeadDim / 16) * 256, 0,
                     sizeof(float) * static_cast<size_t>(dim_tiles) * 256);
  }
  for (int row = 0; row < kBlockQueries; ++row) {
    state.maximum[row] = -__builtin_inff();
    state.total[row] = 0.0F;
  }
  const size_t elements_per_key = static_cast<size_t>(block.head_dim);
  for (int begin = 0; begin < end; begin += kBlockKeys) {
    const int left = end - begin < kBlockKeys ? end - begin : kBlockKeys;
    const int num_tiles = (left + 31) / 32 * 2;
    publish_stores();
    multiply_keys(block, query, block.kv.keys + elements_per_key * begin, num_tiles, num_m, state);
    publish_stores();
    for (int row = 0; row < block.num_queries; ++row) {
      soften_row(state, row, block.first_position + row + 1 - begin, num_tiles, dim_tiles);
    }
    publish_stores();
    multiply_values(block, block.kv.values + elements_per_key * begin, num_tiles, num_m, state);
  }
  publish_stores();
  for (int row = 0; row < block.num_queries; ++row) write_row(block, state, row, head);
}

}  // namespace

void pack_keys(const KvLayer& kv, const int32_t* pages, int kv_head, int begin, int seq_len,
               const PackedKeys& out) {
  const uint16_t* keys[32];
  const size_t stride = static_cast<size_t>(kv.num_kv_heads) * kv.head_dim;
  for (int i = 0; i < 32; ++i) {
    const int token = begin + i;
    keys[i] = token >= seq_len
                  ? nullptr
                  : kv.base + static_cast<size_t>(pages[token / kv.page_size]) * kv.page_stride +
                        static_cast<size_t>(token % kv.page_size) * stride +
                        static_cast<size_t>(kv_head) * kv.head_dim;
  }
  const size_t at = static_cast<size_t>(begin) * kv.head_dim;
  pack_key_tiles(keys, kv.head_dim, out.keys + at);
  pack_key_tiles(keys + 16, kv.head_dim, out.keys + at + static_cast<size_t>(16) * kv.head_dim);
  pack_value_tiles(keys, kv.value_offset, kv.head_dim, out.values + at);
}

void attend_block(const AttendBlock& block) {
  HeadState state;
  for (int j = 0; j < block.group; ++j) {
    attend_head(block, block.query + static_cast<size_t>(j) * block.head_stride, block.out_head + j,
                state);
  }
}

}  // namespace moorage::cpu::amx
