// SPDX-License-Identifier: Apache-2.0
// Linears of many tokens on AMX: 4- and 8-bit panels are expanded to bf16 next to the core, once
// per call, so that memory traffic stays that of the packed weights.
#include "amx.h"
#include "amx_tiles.h"
#include "avx512_math.h"

namespace moorage::cpu::amx {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline __m512 halves(const std::byte* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Lane n of the result: bf16(low[n]) below, bf16(high[n]) above.
inline __m512i interleave(__m512 low, __m512 high) {
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
      3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// One line (4 bytes a lane, each a quant) -> two lines of a B tile.
inline void expand_line(__m512i bytes, __m512 scale, __m512 offset, uint16_t* out) {
  const __m512i low = _mm512_set1_epi32(0xFF);
  const __m512 a = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, low));
  const __m512 b = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, 8), low));
  const __m512 c = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, 16), low));
  const __m512 d = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 24));
  _mm512_store_si512(out, interleave(_mm512_fmadd_ps(a, scale, offset),
                                     _mm512_fmadd_ps(b, scale, offset)));
  _mm512_store_si512(out + 32, interleave(_mm512_fmadd_ps(c, scale, offset),
                                          _mm512_fmadd_ps(d, scale, offset)));
}

inline __m512i line(const std::byte* from) {
  return _mm512_load_si512(reinterpret_cast<const void*>(from));
}

void expand_q4(const std::byte* tile, uint16_t* out) {
  const __m512i nibble = _mm512_set1_epi8(0x0F);
  const __m512 scale = halves(tile + 256);
  const __m512 offset = halves(tile + 288);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i packed = line(tile + j * 64);
    expand_line(_mm512_and_si512(packed, nibble), scale, offset, out + j * 64);
    expand_line(_mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble), scale, offset,
                out + 256 + j * 64);
  }
}

void expand_q8(const std::byte* quants, const std::byte* scales, uint16_t* out) {
  const __m512 scale = halves(scales);
  const __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(-128.0F));
  for (int j = 0; j < 8; ++j) expand_line(line(quants + j * 64), scale, offset, out + j * 64);
}

// Returns the panel's tiles [begin, end) as B tiles: in place for bf16, else expanded into `out`.
const uint16_t* expand(const PackedMatrix& matrix, int panel, int begin, int end, uint16_t* out) {
  const std::byte* start = matrix.first + static_cast<size_t>(panel) * matrix.panel_bytes;
  if (matrix.format == WeightFormat::kBf16) {
    return reinterpret_cast<const uint16_t*>(start + static_cast<size_t>(begin) * kBf16TileBytes);
  }
  for (int tile = begin; tile < end; ++tile) {
    uint16_t* to = out + static_cast<size_t>(tile - begin) * kTileElements;
    if (matrix.format == WeightFormat::kQ4_1) {
      expand_q4(start + static_cast<size_t>(tile) * kQ4TileBytes, to);
    } else {
      const std::byte* pair = start + static_cast<size_t>(tile / 2) * kQ8PairBytes;
      expand_q8(pair + (tile % 2) * 512, pair + 1024 + (tile % 2) * 32, to);
    }
  }
  return out;
}

// The 16 bf16 values of v at `to`.
inline void store_half_line(uint16_t* to, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(v));
}

}  // namespace

void begin() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = kTileRows;
  }
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

void end() { _tile_release(); }

void pack_row(const float* x, int cols, uint16_t* tiles, int token) {
  const int k_tiles = cols / kTileCols;
  uint16_t* to = tiles + static_cast<size_t>(token / kTileRows) * k_tiles * kTileElements +
                 (token % kTileRows) * kTileCols;
  for (int k = 0; k < k_tiles; ++k) {
    const __m512bh packed = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + k * kTileCols + 16),
                                                _mm512_loadu_ps(x + k * kTileCols));
    _mm512_storeu_si512(to + static_cast<size_t>(k) * kTileElements, (__m512i)packed);
  }
}

size_t scratch_elements(int num_cols, bool sums_chunks) {
  const int tiles = num_cols / kTileCols;
  const int chunk = sums_chunks && tiles > kChunkTiles ? kChunkTiles : tiles;
  return static_cast<size_t>(2 * chunk) * kTileElements;
}

namespace {

// Adds one row of the product to the residual.
struct AddRow {
  const AddTarget& target;
  void operator()(int token, const float* c) const {
    float* row = target.residual + static_cast<size_t>(token) * target.hidden;
    for (int panel = 0; panel < 2; ++panel) {
      float* to = row + target.panels[panel] * kPanelRows;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(c + panel * 256)));
    }
  }
};

struct SwigluRow {
  const SwigluTarget& target;
  void operator()(int token, const float* c) const {
    const __m512 value =
        _mm512_mul_ps(avx512::silu_coarse(_mm512_load_ps(c)), _mm512_load_ps(c + 256));
    const size_t tile = static_cast<size_t>(token / kTileRows) * target.k_tiles +
                        target.column / kTileCols;
    store_half_line(target.tiles + tile * kTileElements + (token % kTileRows) * kTileCols +
                        target.column % kTileCols,
                    value);
  }
};

struct HeadRow {
  const HeadTarget& target;
  void operator()(int token, const float* c) const {
    const int half = target.head_dim / 2;
    const __m512 scale = _mm512_set1_ps(target.scale);
    __m512 low = _mm512_load_ps(c);
    __m512 high = _mm512_load_ps(c + 256);
    if (target.cos_sin != nullptr) {
      const float* angle = target.cos_sin +
                           static_cast<size_t>(target.positions[token]) * target.head_dim +
                           target.dim;
      const __m512 cos = _mm512_loadu_ps(angle);
      const __m512 sin = _mm512_loadu_ps(angle + half);
      const __m512 turned = _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin));
      high = _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin));
      low = turned;
    }
    uint16_t* to = target.rows[token] + target.offset + target.dim;
    store_half_line(to, _mm512_mul_ps(low, scale));
    store_half_line(to + half, _mm512_mul_ps(high, scale));
  }
};

struct StoreRow {
  const StoreTarget& target;
  void operator()(int token, const float* c) const {
    float* to = target.out + static_cast<size_t>(token) * target.num_cols + target.column;
    for (int panel = 0; panel < 2; ++panel) {
      const int left = target.num_cols - target.column - panel * kPanelRows;
      if (left <= 0) return;
      const __mmask16 mask = left >= 16 ? 0xFFFF : (1U << left) - 1U;
      _mm512_mask_storeu_ps(to + panel * kPanelRows, mask, _mm512_load_ps(c + panel * 256));
    }
  }
};

// A finished pair of m tiles whose rows still have to reach their target.
template <typename Row>
struct Pending {
  const Row& row;
  const float* c = nullptr;
  int first = 0;
  int done = 0;
  int count = 0;

  void run(int rows) {
    const int end = done + rows < count ? done + rows : count;
    for (; done < end; ++done) {
      row(first + done, c + (done / kTileRows) * 512 + (done % kTileRows) * 16);
    }
  }
};

// From which sixteenth of a multiplication on the pair before it is finished. Earlier its tiles are
// still on their way out, and rows that wait for them fill the scheduler: from 0 on it is 2.5 times
// slower, from 8 on 15 % faster than at the end (one core with AMX, 512 tokens, 2026-11-29).
constexpr int kFinishFrom = 8;

// The multiplication keeps its unit busy for 64 cycles a step and the vector units idle: the rows
// of the previous pair are finished in between.
template <typename Row>
void multiply_and_finish(const PairProduct& product, const Operand& b, int begin, int steps,
                         const Row& row) {
  alignas(64) float results[2][4 * 256];
  const int k_tiles = product.matrix->num_cols / kTileCols;
  const size_t m_stride = static_cast<size_t>(k_tiles) * kTileElements;
  const int stride = 2 * kTileRows;
  const int first_step = steps * kFinishFrom / 16;
  const int rows_per_step = (stride + steps - first_step - 1) / (steps - first_step);
  Pending<Row> pending{row};
  int turn = 0;
  for (int token = 0; token < product.num_tokens; token += stride, turn ^= 1) {
    const uint16_t* a0 = product.tokens + static_cast<size_t>(token / kTileRows) * m_stride +
                         static_cast<size_t>(begin) * kTileElements;
    const int left = product.num_tokens - token;
    const bool is_whole = left > kTileRows;
    // With one m tile left the second operand repeats the first: its result is not stored.
    const Operand a{a0, is_whole ? a0 + m_stride : a0, 64, kTileElements};
    zero_2x2();
    for (int k = 0; k < steps; ++k) {
      multiply_step(a, b, k);
      if (k >= first_step) pending.run(rows_per_step);
    }
    store_2x2(results[turn], is_whole);
    pending.c = results[turn];
    pending.first = token;
    pending.done = 0;
    pending.count = left < stride ? left : stride;
  }
  pending.run(stride);
}

template <typename Row>
void pair_product(const PairProduct& product, const Row& row) {
  const int k_tiles = product.matrix->num_cols / kTileCols;
  const int chunk = product.sums_chunks && k_tiles > kChunkTiles ? kChunkTiles : k_tiles;
  for (int begin = 0; begin < k_tiles; begin += chunk) {
    const int end = begin + chunk < k_tiles ? begin + chunk : k_tiles;
    uint16_t* second = product.scratch + static_cast<size_t>(chunk) * kTileElements;
    const uint16_t* b0 = expand(*product.matrix, product.panels[0], begin, end, product.scratch);
    const uint16_t* b1 = expand(*product.matrix, product.panels[1], begin, end, second);
    publish_stores();
    multiply_and_finish(product, Operand{b0, b1, 64, kTileElements}, begin, end - begin, row);
  }
}

}  // namespace

void product_add(const PairProduct& product, const AddTarget& target) {
  pair_product(product, AddRow{target});
}

void product_swiglu(const PairProduct& product, const SwigluTarget& target) {
  pair_product(product, SwigluRow{target});
}

void product_head(const PairProduct& product, const HeadTarget& target) {
  pair_product(product, HeadRow{target});
}

void product_store(const PairProduct& product, const StoreTarget& target) {
  pair_product(product, StoreRow{target});
}

}  // namespace moorage::cpu::amx
