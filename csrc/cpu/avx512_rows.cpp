// SPDX-License-Identifier: Apache-2.0
// Row-wise kernels in AVX-512: norms, rope, SwiGLU, quantisation, sampling masks.
#include <immintrin.h>

#include "avx512_math.h"
#include "kernels.h"

namespace moorage::cpu {
namespace avx512 {
namespace {

inline __mmask16 tail_mask(int n) { return static_cast<__mmask16>((1U << n) - 1U); }

void quantise(const float* x, int8_t* quants, float* scale, float* sum) {
  const __m512 a = _mm512_loadu_ps(x);
  const __m512 b = _mm512_loadu_ps(x + 16);
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
  const float step = largest / 127.0F;
  const float inverse = largest > 0.0F ? 127.0F / largest : 0.0F;
  const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
  const __m512i qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(quants), _mm512_cvtsepi32_epi8(qa));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(quants + 16), _mm512_cvtsepi32_epi8(qb));
  *scale = step;
  *sum = step * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb)));
}

}  // namespace

void to_bf16(const float* x, uint16_t* out, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256bh packed = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), (__m256i)packed);
  }
  if (i < n) {
    const __mmask16 mask = tail_mask(n - i);
    const __m256bh packed = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
    _mm256_mask_storeu_epi16(out + i, mask, (__m256i)packed);
  }
}

void prepare_block(const float* x32, WeightFormat format, const ActRows& acts, int row,
                   int block) {
  const size_t at = static_cast<size_t>(row) * acts.cols + block * kTileCols;
  if (format == WeightFormat::kBf16) {
    to_bf16(x32, acts.bf16 + at, kTileCols);
    return;
  }
  const size_t blocks = static_cast<size_t>(acts.cols) / kTileCols;
  const size_t index = static_cast<size_t>(row) * blocks + block;
  quantise(x32, acts.quants + at, acts.scale + index, acts.sum + index);
}

void prepare_row(const float* x, WeightFormat format, const ActRows& acts, int row) {
  for (int block = 0; block < acts.cols / kTileCols; ++block) {
    prepare_block(x + block * kTileCols, format, acts, row, block);
  }
}

void norm_row(const float* x, const float* weight, int n, float eps, float* out) {
  __m512 squares = _mm512_setzero_ps();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __mmask16 mask = tail_mask(n - i);
  const __m512 last = _mm512_maskz_loadu_ps(mask, x + i);
  squares = _mm512_fmadd_ps(last, last, squares);
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(n);
  const __m512 inverse = _mm512_set1_ps(1.0F / __builtin_sqrtf(mean + eps));
  for (i = 0; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse);
    _mm512_storeu_ps(out + i, _mm512_mul_ps(v, _mm512_loadu_ps(weight + i)));
  }
  const __m512 v = _mm512_mul_ps(last, inverse);
  _mm512_mask_storeu_ps(out + i, mask,
                        _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i)));
}

void rope_row(float* x, const float* cos_sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const __mmask16 mask = half - i >= 16 ? 0xFFFF : tail_mask(half - i);
    const __m512 cos = _mm512_maskz_loadu_ps(mask, cos_sin + i);
    const __m512 sin = _mm512_maskz_loadu_ps(mask, cos_sin + half + i);
    const __m512 low = _mm512_maskz_loadu_ps(mask, x + i);
    const __m512 high = _mm512_maskz_loadu_ps(mask, x + half + i);
    _mm512_mask_storeu_ps(x + i, mask, _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin)));
    _mm512_mask_storeu_ps(x + half + i, mask, _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin)));
  }
}

void silu_mul(float* gate, const float* up, int n) {
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xFFFF : tail_mask(n - i);
    const __m512 g = _mm512_maskz_loadu_ps(mask, gate + i);
    const __m512 u = _mm512_maskz_loadu_ps(mask, up + i);
    _mm512_mask_storeu_ps(gate + i, mask, _mm512_mul_ps(silu(g), u));
  }
}

int argmax(const float* x, int n) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  __m512 best = lowest;
  __mmask16 has_nan = 0;
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xFFFF : tail_mask(n - i);
    const __m512 v = _mm512_mask_loadu_ps(lowest, mask, x + i);
    has_nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    best = _mm512_max_ps(best, v);
  }
  if (has_nan) return -1;
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xFFFF : tail_mask(n - i);
    const __mmask16 hit = _mm512_mask_cmp_ps_mask(mask, _mm512_maskz_loadu_ps(mask, x + i), top,
                                                  _CMP_EQ_OQ);
    if (hit) return i + __builtin_ctz(hit);
  }
  return -1;
}

void apply_bitmask(float* x, const int32_t* mask, int n) {
  const __m512 forbidden = _mm512_set1_ps(-__builtin_inff());
  for (int i = 0; i < n; i += 32) {
    const uint32_t clear = ~static_cast<uint32_t>(mask[i / 32]);
    if (clear == 0) continue;
    const int low = n - i >= 16 ? 16 : n - i;
    const int high = n - i >= 32 ? 16 : (n - i > 16 ? n - i - 16 : 0);
    const auto low_mask = static_cast<__mmask16>(clear & ((1U << low) - 1U));
    const auto high_mask = static_cast<__mmask16>((clear >> 16) & ((1U << high) - 1U));
    _mm512_mask_storeu_ps(x + i, low_mask, forbidden);
    if (high_mask) _mm512_mask_storeu_ps(x + i + 16, high_mask, forbidden);
  }
}

}  // namespace avx512

const KernelTable& avx512_table() {
  static const KernelTable table = {
      avx512::prepare_row, avx512::prepare_block, avx512::panel,  avx512::norm_row,
      avx512::rope_row,    avx512::silu_mul,      avx512::to_bf16, avx512::attend,
      avx512::argmax,      avx512::apply_bitmask};
  return table;
}

}  // namespace moorage::cpu
