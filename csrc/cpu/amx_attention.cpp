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

// What one head of the block works on; a few KB each, so that it stays in the L1. Scores and
// weights are double: while one block of keys is softened, the tiles work on its neighbours.
struct HeadState {
  alignas(64) float scores[2][2 * kMaxKeyTiles * 256];           // [m][key tile][16][16]
  alignas(64) uint16_t weights[2][2 * (kBlockKeys / 32) * 512];  // A tiles [m][k]
  alignas(64) float out[2 * (kMaxHeadDim / 16) * 256];           // [m][dim tile][16][16]
  alignas(64) float total[kBlockQueries * 16];                   // 16 partial sums a row
  float base[kBlockQueries];                                     // exponent taken off the scores
  bool is_fresh;                                                 // no block seen yet
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

// One block of keys of the walk over them.
struct KeyRun {
  int begin = 0;
  int num_tiles = 0;  // of 16 keys, even
  int turn = 0;       // which of the double buffers
};

// scores of two key tiles = Q K^T.
inline void multiply_keys(const AttendBlock& block, const KeyRun& run, int tile,
                          HeadState& state) {
  const uint16_t* query = block.query;
  const int steps = block.head_dim / 32;
  const long row_stride = static_cast<long>(block.head_dim) * 2;
  const Operand a{query, query + static_cast<size_t>(kTileRows) * block.head_dim, row_stride, 32};
  const uint16_t* first = block.kv.keys + static_cast<size_t>(run.begin) * block.head_dim +
                          static_cast<size_t>(tile) * steps * kTileElements;
  const Operand b{first, first + static_cast<size_t>(steps) * kTileElements, 64, kTileElements};
  float* to = state.scores[run.turn] + tile * 256;
  zero_2x2();
  for (int k = 0; k < steps; ++k) multiply_step(a, b, k);
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
  _tile_stored(2, to + kMaxKeyTiles * 256, 64);
  _tile_stored(3, to + (kMaxKeyTiles + 1) * 256, 64);
}

// out of two dim tiles += P V.
inline void multiply_values(const AttendBlock& block, const KeyRun& run, int tile,
                            HeadState& state) {
  const int dim_tiles = block.head_dim / 16;
  const uint16_t* p = state.weights[run.turn];
  const Operand a{p, p + (kBlockKeys / 32) * kTileElements, 64, kTileElements};
  const uint16_t* first = block.kv.values + static_cast<size_t>(run.begin) * block.head_dim +
                          static_cast<size_t>(tile) * kTileElements;
  const Operand b{first, first + kTileElements, 64, static_cast<long>(dim_tiles) * kTileElements};
  float* to = state.out + tile * 256;
  float* to_second = to + (kMaxHeadDim / 16) * 256;
  publish_stores();
  _tile_loadd(0, to, 64);
  _tile_loadd(1, to + 256, 64);
  _tile_loadd(2, to_second, 64);
  _tile_loadd(3, to_second + 256, 64);
  for (int k = 0; k < run.num_tiles / 2; ++k) multiply_step(a, b, k);
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
  _tile_stored(2, to_second, 64);
  _tile_stored(3, to_second + 256, 64);
}

// Tile work that is dealt out between the rows of a softmax: P V of the block before, Q K^T of the
// block after. The vector units do the one while the tiles do the other.
struct TileWork {
  const AttendBlock& block;
  HeadState& state;
  KeyRun before;  // num_tiles 0: none
  KeyRun after;   // num_tiles 0: none
  int value_tiles_done = 0;
  int key_tiles_done = 0;

  int units() const { return (value_tiles() + after.num_tiles) / 2; }
  int value_tiles() const { return before.num_tiles == 0 ? 0 : block.head_dim / 16; }
  bool next() {
    if (value_tiles_done < value_tiles()) {
      multiply_values(block, before, value_tiles_done, state);
      value_tiles_done += 2;
      return true;
    }
    if (key_tiles_done < after.num_tiles) {
      multiply_keys(block, after, key_tiles_done, state);
      key_tiles_done += 2;
      return true;
    }
    return false;
  }
  void finish_values() {
    while (value_tiles_done < value_tiles()) next();
    publish_stores();
  }
};

// Scores of one row above their mask, and -1000 (weight 0) below it.
template <bool kMasked>
inline __m512 score_at(const float* scores, int tile, int visible) {
  if (!kMasked) return _mm512_load_ps(scores + tile * 256);
  const int left = visible - tile * 16;
  const __mmask16 mask = left >= 16 ? 0xFFFF : (left <= 0 ? 0 : (1U << left) - 1U);
  return _mm512_mask_load_ps(_mm512_set1_ps(-1000.0F), mask, scores + tile * 256);
}

// Moves the row's base to the maximum of what it has seen and rescales what it has summed.
template <bool kMasked>
__attribute__((noinline)) void rebase_row(TileWork& work, const KeyRun& run, int row, int visible) {
  HeadState& state = work.state;
  const int m = row / kTileRows;
  const float* scores = state.scores[run.turn] + (m * kMaxKeyTiles) * 256 + (row % kTileRows) * 16;
  __m512 top = _mm512_set1_ps(-1000.0F);
  for (int i = 0; i < run.num_tiles; ++i) {
    top = _mm512_max_ps(top, score_at<kMasked>(scores, i, visible));
  }
  const float base = _mm512_reduce_max_ps(top);
  if (state.is_fresh) {
    state.base[row] = base;
    return;
  }
  work.finish_values();
  const __m512 factor = avx512::exp2_ps(_mm512_set1_ps(state.base[row] - base));
  float* out = state.out + m * (kMaxHeadDim / 16) * 256 + (row % kTileRows) * 16;
  for (int d = 0; d < work.block.head_dim / 16; ++d) {
    _mm512_store_ps(out + d * 256, _mm512_mul_ps(_mm512_load_ps(out + d * 256), factor));
  }
  float* total = state.total + row * 16;
  _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), factor));
  state.base[row] = base;
}

// One query row: scores -> bf16 weights 2^(score - base). The base need not be the maximum: bf16
// has the range of fp32, so it is kept until a block's weights pass 2^64 (rare), which spares every
// other block the horizontal maximum and the rescaling of the output.
template <bool kMasked>
inline void soften_row(TileWork& work, const KeyRun& run, int row, int visible) {
  HeadState& state = work.state;
  const int m = row / kTileRows;
  const int r = row % kTileRows;
  const float* scores = state.scores[run.turn] + (m * kMaxKeyTiles) * 256 + r * 16;
  uint16_t* weights = state.weights[run.turn] + m * (kBlockKeys / 32) * kTileElements + r * 32;
  if (state.is_fresh) rebase_row<kMasked>(work, run, row, visible);
  for (int attempt = 0;; ++attempt) {
    const __m512 base = _mm512_set1_ps(state.base[row]);
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int k = 0; k < kMaxKeyTiles / 2; ++k) {
      if (2 * k >= run.num_tiles) break;
      const __m512 low = score_at<kMasked>(scores, 2 * k, visible);
      const __m512 high = score_at<kMasked>(scores, 2 * k + 1, visible);
      const __m512 p = avx512::exp2_coarse(_mm512_sub_ps(low, base));
      const __m512 q = avx512::exp2_coarse(_mm512_sub_ps(high, base));
      sum = _mm512_add_ps(sum, _mm512_add_ps(p, q));
      _mm512_store_si512(weights + k * kTileElements, (__m512i)_mm512_cvtne2ps_pbh(q, p));
    }
    const __mmask16 is_large = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1p64F), _CMP_GT_OQ);
    if (is_large == 0 || attempt == 1) {
      float* total = state.total + row * 16;
      _mm512_store_ps(total, _mm512_add_ps(_mm512_load_ps(total), sum));
      return;
    }
    rebase_row<kMasked>(work, run, row, visible);
  }
}

inline void write_row(const AttendBlock& block, const HeadState& state, int row) {
  const float* from = state.out + (row / kTileRows) * (kMaxHeadDim / 16) * 256 +
                      (row % kTileRows) * 16;
  const float total = _mm512_reduce_add_ps(_mm512_load_ps(state.total + row * 16));
  const __m512 inverse = _mm512_set1_ps(1.0F / total);
  const int token = block.out_token + row;
  const size_t first_tile = static_cast<size_t>(token / kTileRows) * block.out_k_tiles +
                            static_cast<size_t>(block.out_head) * block.head_dim / 32;
  uint16_t* to = block.out + first_tile * kTileElements + (token % kTileRows) * 32;
  for (int d = 0; d < block.head_dim / 32; ++d) {
    const __m512 low = _mm512_mul_ps(_mm512_load_ps(from + 2 * d * 256), inverse);
    const __m512 high = _mm512_mul_ps(_mm512_load_ps(from + (2 * d + 1) * 256), inverse);
    _mm512_storeu_si512(to + static_cast<size_t>(d) * kTileElements,
                        (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

KeyRun run_at(int begin, int end, int turn) {
  const int left = end - begin < kBlockKeys ? end - begin : kBlockKeys;
  return {begin, left <= 0 ? 0 : (left + 31) / 32 * 2, turn};
}

void soften_block(TileWork& work, const KeyRun& run) {
  const AttendBlock& block = work.block;
  // Every query sees all keys of the block but in those around the diagonal.
  const bool is_masked = run.begin + run.num_tiles * 16 > block.first_position + 1;
  const int units = work.units();
  int dealt = 0;
  for (int row = 0; row < block.num_queries; ++row) {
    const int visible = block.first_position + row + 1 - run.begin;
    if (is_masked) {
      soften_row<true>(work, run, row, visible);
    } else {
      soften_row<false>(work, run, row, visible);
    }
    while (dealt * block.num_queries < units * (row + 1)) {
      ++dealt;
      if (!work.next()) break;
    }
  }
  publish_stores();
  work.state.is_fresh = false;
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
  const int dim_tiles = block.head_dim / 16;
  const int end = block.first_position + block.num_queries;
  for (int m = 0; m < 2; ++m) {
    __builtin_memset(state.out + m * (kMaxHeadDim / 16) * 256, 0,
                     sizeof(float) * static_cast<size_t>(dim_tiles) * 256);
  }
  __builtin_memset(state.total, 0, sizeof(state.total));
  for (int row = 0; row < kBlockQueries; ++row) state.base[row] = 0.0F;
  state.is_fresh = true;
  publish_stores();
  KeyRun before;
  KeyRun now = run_at(0, end, 0);
  for (int tile = 0; tile < now.num_tiles; tile += 2) multiply_keys(block, now, tile, state);
  while (now.num_tiles > 0) {
    const KeyRun after = run_at(now.begin + kBlockKeys, end, now.turn ^ 1);
    TileWork work{block, state, before, after};
    publish_stores();
    soften_block(work, now);
    before = now;
    now = after;
  }
  for (int tile = 0; tile < dim_tiles; tile += 2) multiply_values(block, before, tile, state);
  publish_stores();
  for (int row = 0; row < block.num_queries; ++row) write_row(block, state, row);
}

}  // namespace moorage::cpu::amx
