// SPDX-License-Identifier: Apache-2.0
// Linears of many tokens on AMX: 4- and 8-bit panels are expanded to bf16 next to the core, once per
// call, so that memory traffic stays that of the packed weights.
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

void pair_product(const PairProduct& product, Finish finish, const void* context) {
  alignas(64) float c[4 * 256];
  const int k_tiles = product.matrix->num_cols / kTileCols;
  const int chunk = product.sums_chunks && k_tiles > kChunkTiles ? kChunkTiles : k_tiles;
  const size_t m_stride = static_cast<size_t>(k_tiles) * kTileElements;
  for (int begin = 0; begin < k_tiles; begin += chunk) {
    const int end = begin + chunk < k_tiles ? begin + chunk : k_tiles;
    uint16_t* second = product.scratch + static_cast<size_t>(chunk) * kTileElements;
    const uint16_t* b0 = expand(*product.matrix, product.panels[0], begin, end, product.scratch);
    const uint16_t* b1 = expand(*product.matrix, product.panels[1], begin, end, second);
    const Operand b{b0, b1, 64, kTileElements};
    publish_stores();
    for (int token = 0; token < product.num_tokens; token += 2 * kTileRows) {
      const uint16_t* a0 = product.tokens + static_cast<size_t>(token / kTileRows) * m_stride +
                           static_cast<size_t>(begin) * kTileElements;
      const Operand a{a0, a0 + m_stride, 64, kTileElements};
      const int left = product.num_tokens - token;
      zero_2x2();
      if (left > kTileRows) {
        multiply_2x2(a, b, end - begin);
        _tile_stored(2, c + 512, 64);
        _tile_stored(3, c + 768, 64);
      } else {
        multiply_1x2(a, b, end - begin);
      }
      _tile_stored(0, c, 64);
      _tile_stored(1, c + 256, 64);
      publish_stores();
      finish(context, token, left < 2 * kTileRows ? left : 2 * kTileRows, c);
    }
  }
}

void finish_add(const void* context, int first_token, int num_tokens, const float* c) {
  const auto& add = *static_cast<const AddContext*>(context);
  for (int t = 0; t < num_tokens; ++t) {
    const float* from = c + (t / kTileRows) * 512 + (t % kTileRows) * 16;
    float* row = add.residual + static_cast<size_t>(first_token + t) * add.hidden;
    for (int panel = 0; panel < 2; ++panel) {
      float* to = row + add.panels[panel] * kPanelRows;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(from + panel * 256)));
    }
  }
}

void finish_swiglu(const void* context, int first_token, int num_tokens, const float* c) {
  const auto& swiglu = *static_cast<const SwigluContext*>(context);
  for (int t = 0; t < num_tokens; ++t) {
    const float* from = c + (t / kTileRows) * 512 + (t % kTileRows) * 16;
    const __m512 value = _mm512_mul_ps(avx512::silu(_mm512_load_ps(from)),
                                       _mm512_load_ps(from + 256));
    const int token = first_token + t;
    const size_t tile = static_cast<size_t>(token / kTileRows) * swiglu.k_tiles +
                        swiglu.column / kTileCols;
    store_half_line(swiglu.tiles + tile * kTileElements + (token % kTileRows) * kTileCols +
                        swiglu.column % kTileCols,
                    value);
  }
}

void finish_head(const void* context, int first_token, int num_tokens, const float* c) {
  const auto& head = *static_cast<const HeadContext*>(context);
  const int half = head.head_dim / 2;
  const __m512 scale = _mm512_set1_ps(head.scale);
  for (int t = 0; t < num_tokens; ++t) {
    const float* from = c + (t / kTileRows) * 512 + (t % kTileRows) * 16;
    __m512 low = _mm512_load_ps(from);
    __m512 high = _mm512_load_ps(from + 256);
    const int token = first_token + t;
    if (head.cos_sin != nullptr) {
      const float* angle =
          head.cos_sin + static_cast<size_t>(head.positions[token]) * head.head_dim + head.dim;
      const __m512 cos = _mm512_loadu_ps(angle);
      const __m512 sin = _mm512_loadu_ps(angle + half);
      const __m512 turned = _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin));
      high = _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin));
      low = turned;
    }
    uint16_t* to = head.targets[token] + head.offset + head.dim;
    store_half_line(to, _mm512_mul_ps(low, scale));
    store_half_line(to + half, _mm512_mul_ps(high, scale));
  }
}

}  // namespace moorage::cpu::amx
