// SPDX-License-Identifier: Apache-2.0
// exp2 and silu of 16 floats. Include only from files compiled with the AVX-512 flags.
#pragma once

#include <immintrin.h>

namespace moorage::cpu::avx512 {
namespace {

// 2^x for x <= 127; relative error < 4e-6 (degree 5 on [0, 1), Taylor-Chebyshev fit). -inf gives 0.
inline __m512 exp2_ps(__m512 x) {
  // Below -126 the true value is (almost) 0; the clamp keeps -inf out of the reduction.
  const __m512 safe = _mm512_max_ps(x, _mm512_set1_ps(-150.0F));
  const __m512 fraction = _mm512_reduce_ps(safe, 1);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.8775767e-3F);
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(8.9893397e-3F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(5.5826318e-2F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(2.4015361e-1F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(6.9315308e-1F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(9.9999994e-1F));
  return _mm512_scalef_ps(p, safe);
}

// 2^x for finite x, relative error 8e-5: for results that are rounded to bf16 (2e-3) right after.
// Large x gives inf, x below -150 gives 0.
inline __m512 exp2_coarse(__m512 x) {
  const __m512 fraction = _mm512_reduce_ps(x, 1);
  __m512 p = _mm512_set1_ps(0.07802403F);
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.22606707F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.69583399F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.99992513F));
  return _mm512_scalef_ps(p, x);
}

// 1 / x to about 2^-28: a division would hold its unit for 16 cycles.
inline __m512 reciprocal(__m512 x) {
  const __m512 guess = _mm512_rcp14_ps(x);
  const __m512 error = _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(1.0F));
  return _mm512_fmadd_ps(guess, error, guess);
}

inline __m512 silu(__m512 x) {
  const __m512 exponent = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504F));
  const __m512 e = exp2_ps(_mm512_min_ps(exponent, _mm512_set1_ps(120.0F)));
  return _mm512_mul_ps(x, reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0F), e)));
}

// silu to bf16 precision.
inline __m512 silu_coarse(__m512 x) {
  const __m512 exponent = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504F));
  const __m512 e = exp2_coarse(_mm512_min_ps(exponent, _mm512_set1_ps(120.0F)));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0F), e)));
}

}  // namespace
}  // namespace moorage::cpu::avx512
