// SPDX-License-Identifier: Apache-2.0
// Matrix-vector products of one 16-row panel with a few activation rows, in AVX-512 VNNI / BF16.
//
// The 16 lanes are the 16 rows of the panel; an activation's 4 bytes are broadcast, so no lane is
// ever summed across. Integer sums of one 32-block are exact; scales are applied in fp32.
#include <immintrin.h>

#include "kernels.h"

namespace moorage::cpu::avx512 {
namespace {

// Tokens per pass over a panel: 8 float and 8 integer accumulators beside 8 weight lines fill the
// 32 registers; a second pass finds the panel in L1.
constexpr int kTokensPerPass = 8;

// Bytes ahead of the current tile that are asked for: covers the DRAM latency at ~10 GB/s a core.
constexpr int kPrefetchBytes = 3072;

inline __m512 halves(const std::byte* from) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512i line(const std::byte* from) {
  return _mm512_load_si512(reinterpret_cast<const void*>(from));
}

inline int32_t four_bytes(const int8_t* from) {
  int32_t value;
  __builtin_memcpy(&value, from, 4);
  return value;
}

template <int kLines>
inline void prefetch_lines(const std::byte* from) {
#pragma GCC unroll 17
  for (int i = 0; i < kLines; ++i) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i * 64), _MM_HINT_T0);
  }
}

template <int kTokens>
void panel_q4(const std::byte* tiles, int num_tiles, const ActRows& acts, int first, float* out) {
  const __m512i nibble = _mm512_set1_epi8(0x0F);
  const int8_t* quants = acts.quants + static_cast<size_t>(first) * acts.cols;
  const float* scale = acts.scale + static_cast<size_t>(first) * num_tiles;
  const float* sum = acts.sum + static_cast<size_t>(first) * num_tiles;
  __m512 acc[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
  for (int tile = 0; tile < num_tiles; ++tile) {
    const std::byte* from = tiles + static_cast<size_t>(tile) * kQ4TileBytes;
    prefetch_lines<5>(from + kPrefetchBytes);
    __m512i w[8];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i packed = line(from + j * 64);
      w[j] = _mm512_and_si512(packed, nibble);
      w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
    }
    const __m512 d = halves(from + 256);
    const __m512 m = halves(from + 288);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const int8_t* a = quants + static_cast<size_t>(t) * acts.cols + tile * kTileCols;
      __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        dot = _mm512_dpbusd_epi32(dot, w[g], _mm512_set1_epi32(four_bytes(a + g * 4)));
      }
      const int index = t * num_tiles + tile;
      const __m512 weighted = _mm512_mul_ps(d, _mm512_set1_ps(scale[index]));
      acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), weighted, acc[t]);
      acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(sum[index]), acc[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * kPanelRows, acc[t]);
}

template <int kTokens>
void panel_q8(const std::byte* pairs, int num_tiles, const ActRows& acts, int first, float* out) {
  const int8_t* quants = acts.quants + static_cast<size_t>(first) * acts.cols;
  const float* scale = acts.scale + static_cast<size_t>(first) * num_tiles;
  const float* sum = acts.sum + static_cast<size_t>(first) * num_tiles;
  __m512 acc[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
  for (int tile = 0; tile < num_tiles; ++tile) {
    const std::byte* pair = pairs + static_cast<size_t>(tile / 2) * kQ8PairBytes;
    const std::byte* from = pair + (tile % 2) * 512;
    prefetch_lines<8>(from + kPrefetchBytes);
    const __m512 d = halves(pair + 1024 + (tile % 2) * 32);
    __m512i w[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) w[g] = line(from + g * 64);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const int8_t* a = quants + static_cast<size_t>(t) * acts.cols + tile * kTileCols;
      __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        dot = _mm512_dpbusd_epi32(dot, w[g], _mm512_set1_epi32(four_bytes(a + g * 4)));
      }
      const int index = t * num_tiles + tile;
      // The bytes are q + 128: take 128 * sum(a) off again.
      const __m512 exact = _mm512_fmsub_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(scale[index]),
                                           _mm512_set1_ps(128.0F * sum[index]));
      acc[t] = _mm512_fmadd_ps(exact, d, acc[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * kPanelRows, acc[t]);
}

template <int kTokens>
void panel_bf16(const std::byte* tiles, int num_tiles, const ActRows& acts, int first,
                float* out) {
  const uint16_t* rows = acts.bf16 + static_cast<size_t>(first) * acts.cols;
  __m512 acc[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
  for (int tile = 0; tile < num_tiles; ++tile) {
    const std::byte* from = tiles + static_cast<size_t>(tile) * kBf16TileBytes;
    prefetch_lines<16>(from + kPrefetchBytes);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512bh w = (__m512bh)line(from + pair * 64);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const uint16_t* a = rows + static_cast<size_t>(t) * acts.cols + tile * kTileCols + pair * 2;
        int32_t both;
        __builtin_memcpy(&both, a, 4);
        acc[t] = _mm512_dpbf16_ps(acc[t], w, (__m512bh)_mm512_set1_epi32(both));
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * kPanelRows, acc[t]);
}

template <int kTokens>
void panel_of(const PackedMatrix& matrix, int index, const ActRows& acts, int first, float* out) {
  const std::byte* tiles = matrix.first + static_cast<size_t>(index) * matrix.panel_bytes;
  const int num_tiles = matrix.num_cols / kTileCols;
  switch (matrix.format) {
    case WeightFormat::kQ4_1:
      panel_q4<kTokens>(tiles, num_tiles, acts, first, out);
      return;
    case WeightFormat::kQ8_0:
      panel_q8<kTokens>(tiles, num_tiles, acts, first, out);
      return;
    case WeightFormat::kBf16:
      panel_bf16<kTokens>(tiles, num_tiles, acts, first, out);
      return;
  }
}

}  // namespace

void panel(const PackedMatrix& matrix, int index, const ActRows& acts, int first, int count,
           float* out) {
  while (count > 0) {
    const int now = count < kTokensPerPass ? count : kTokensPerPass;
    switch (now) {
      case 1: panel_of<1>(matrix, index, acts, first, out); break;
      case 2: panel_of<2>(matrix, index, acts, first, out); break;
      case 3: panel_of<3>(matrix, index, acts, first, out); break;
      case 4: panel_of<4>(matrix, index, acts, first, out); break;
      case 5: panel_of<5>(matrix, index, acts, first, out); break;
      case 6: panel_of<6>(matrix, index, acts, first, out); break;
      case 7: panel_of<7>(matrix, index, acts, first, out); break;
      default: panel_of<8>(matrix, index, acts, first, out); break;
    }
    first += now;
    count -= now;
    out += now * kPanelRows;
  }
}

}  // namespace moorage::cpu::avx512
