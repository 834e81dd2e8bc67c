// SPDX-License-Identifier: Apache-2.0
// Attention of one query token over a range of the paged KV, in AVX-512 BF16.
//
// Source: online softmax, FlashAttention-2 (Dao 2023, arXiv 2307.08691), here in base 2. Keys are
// taken in blocks of 64 tokens; the query heads of one KV head share every load of K and V.
// Requires: head_dim % 32 == 0 and head_dim <= 256.
#include <immintrin.h>

#include "avx512_math.h"
#include "kernels.h"

namespace moorage::cpu::avx512 {
namespace {

constexpr int kBlockTokens = 64;
constexpr int kTokensAhead = 32;  // asked for ahead of use; 16 to 64 measured alike
constexpr int kMaxHeadDim = 256;
constexpr int kMaxHeads = kMaxAttendHeads;
constexpr int kMaxGroup = 4;  // query heads per pass: 4 x 2 accumulators x unroll fit the registers

// Pointers to the keys of a block, and behind them those of the next one (or repetitions of the
// last key): what is asked for ahead of time.
struct Block {
  const uint16_t* keys[2 * kBlockTokens];
  int count;
};

// Writes 64 pointers for tokens [begin, min(begin + 64, end)); the rest repeats the last one.
inline void gather(const KvLayer& kv, const AttendTask& task, int begin, const uint16_t** keys) {
  const int left = task.end - begin;
  const int count = left < kBlockTokens ? left : kBlockTokens;
  const size_t stride = static_cast<size_t>(kv.num_kv_heads) * kv.head_dim;
  int page = begin / kv.page_size;
  int offset = begin % kv.page_size;
  const uint16_t* at = kv.base + static_cast<size_t>(task.pages[page]) * kv.page_stride +
                       static_cast<size_t>(offset) * stride;
  for (int t = 0; t < count; ++t) {
    keys[t] = at;
    at += stride;
    if (++offset == kv.page_size && t + 1 < count) {
      offset = 0;
      at = kv.base + static_cast<size_t>(task.pages[++page]) * kv.page_stride;
    }
  }
  for (int t = count; t < kBlockTokens; ++t) keys[t] = keys[count - 1];
}

// Returns, in lane t, the sum of v[t]'s lanes.
inline __m512 sum_lanes(const __m512 (&v)[16]) {
  __m512 quad[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = v[i * 4], b = v[i * 4 + 1], c = v[i * 4 + 2], d = v[i * 4 + 3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    quad[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  const __m512 left = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                                    _mm512_shuffle_f32x4(quad[0], quad[1], 0xDD));
  const __m512 right = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88),
                                     _mm512_shuffle_f32x4(quad[2], quad[3], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(left, right, 0x88),
                       _mm512_shuffle_f32x4(left, right, 0xDD));
}

// scores[j * 64 + t] = query head j . key t, for all 64 pointers of the block.
template <int kGroup>
inline void score(const Block& block, size_t head_offset, int head_dim,
                  const uint16_t* query, float* scores) {
  for (int t0 = 0; t0 < block.count; t0 += 16) {
    __m512 dots[kGroup][16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      const uint16_t* key = block.keys[t0 + t] + head_offset;
      const uint16_t* ahead = block.keys[t0 + t + kTokensAhead] + head_offset;
      __m512 sums[kGroup];
#pragma GCC unroll 4
      for (int j = 0; j < kGroup; ++j) sums[j] = _mm512_setzero_ps();
      for (int d = 0; d < head_dim; d += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + d), _MM_HINT_T0);
        const __m512bh k = (__m512bh)_mm512_loadu_si512(key + d);
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; ++j) {
          const __m512bh q = (__m512bh)_mm512_loadu_si512(query + j * head_dim + d);
          sums[j] = _mm512_dpbf16_ps(sums[j], k, q);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < kGroup; ++j) dots[j][t] = sums[j];
    }
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) {
      _mm512_store_ps(scores + j * kBlockTokens + t0, sum_lanes(dots[j]));
    }
  }
}

// Turns one head's scores into weights in place; updates maximum and total, returns the factor for
// what was accumulated before.
inline float soften(float* scores, int count, float* maximum, float* total) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  __m512 s[4];
  __m512 top = lowest;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int left = count - i * 16;
    const __mmask16 mask = left >= 16 ? 0xFFFF : (left <= 0 ? 0 : (1U << left) - 1U);
    s[i] = _mm512_mask_load_ps(lowest, mask, scores + i * 16);
    top = _mm512_max_ps(top, s[i]);
  }
  const float before = *maximum;
  const float block_top = _mm512_reduce_max_ps(top);
  const float now = block_top > before ? block_top : before;
  __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 weight = exp2_ps(_mm512_sub_ps(s[i], _mm512_set1_ps(now)));
    _mm512_store_ps(scores + i * 16, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  const float factor = _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(before - now)));
  *maximum = now;
  *total = *total * factor + _mm512_reduce_add_ps(sum);
  return factor;
}

// out[j] = out[j] * factor[j] + sum of weights[j][t] * value t. A line of 32 values is kept as its
// even and its odd elements (no shuffle per token); `untangle` restores the order at the end.
template <int kGroup>
inline void accumulate(const Block& block, size_t head_offset, int head_dim,
                       size_t value_offset, const float* weights, const float* factor,
                       float* out) {
  const __m512i odd_mask = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  for (int d = 0; d < head_dim; d += 32) {
    __m512 even[kGroup], odd[kGroup];
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) {
      const __m512 scale = _mm512_set1_ps(factor[j]);
      even[j] = _mm512_mul_ps(_mm512_loadu_ps(out + j * head_dim + d), scale);
      odd[j] = _mm512_mul_ps(_mm512_loadu_ps(out + j * head_dim + d + 16), scale);
    }
    for (int t = 0; t < block.count; ++t) {
      const size_t at = head_offset + value_offset + d;
      _mm_prefetch(reinterpret_cast<const char*>(block.keys[t + kTokensAhead] + at), _MM_HINT_T0);
      const __m512i v = _mm512_loadu_si512(block.keys[t] + at);
      const __m512 v_even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
      const __m512 v_odd = _mm512_castsi512_ps(_mm512_and_si512(v, odd_mask));
#pragma GCC unroll 4
      for (int j = 0; j < kGroup; ++j) {
        const __m512 weight = _mm512_set1_ps(weights[j * kBlockTokens + t]);
        even[j] = _mm512_fmadd_ps(weight, v_even, even[j]);
        odd[j] = _mm512_fmadd_ps(weight, v_odd, odd[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) {
      _mm512_storeu_ps(out + j * head_dim + d, even[j]);
      _mm512_storeu_ps(out + j * head_dim + d + 16, odd[j]);
    }
  }
}

inline void untangle(float* out, int head_dim) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high =
      _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  for (int d = 0; d < head_dim; d += 32) {
    const __m512 even = _mm512_loadu_ps(out + d);
    const __m512 odd = _mm512_loadu_ps(out + d + 16);
    _mm512_storeu_ps(out + d, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(out + d + 16, _mm512_permutex2var_ps(even, high, odd));
  }
}

// The query heads [first, first + kGroup) of one KV head.
struct Heads {
  int first;
  int kv_head;
};

template <int kGroup>
void score_heads(const KvLayer& kv, const AttendTask& task, Heads heads, const Block& now,
                 float* scores, float* factors) {
  alignas(64) uint16_t query[kGroup * kMaxHeadDim];
  const size_t head_offset = static_cast<size_t>(heads.kv_head) * kv.head_dim;
  to_bf16(task.query + static_cast<size_t>(heads.first) * kv.head_dim, query,
          kGroup * kv.head_dim);
  float* own = scores + static_cast<size_t>(heads.first) * kBlockTokens;
  score<kGroup>(now, head_offset, kv.head_dim, query, own);
  for (int j = 0; j < kGroup; ++j) {
    const int head = heads.first + j;
    factors[head] =
        soften(own + j * kBlockTokens, now.count, &task.maximum[head], &task.total[head]);
  }
}

template <int kGroup>
void accumulate_heads(const KvLayer& kv, const AttendTask& task, Heads heads, const Block& now,
                      const float* scores, const float* factors) {
  const size_t head_offset = static_cast<size_t>(heads.kv_head) * kv.head_dim;
  accumulate<kGroup>(now, head_offset, kv.head_dim, kv.value_offset,
                     scores + static_cast<size_t>(heads.first) * kBlockTokens,
                     factors + heads.first,
                     task.out + static_cast<size_t>(heads.first) * kv.head_dim);
}

#define MOORAGE_FOR_GROUP(left, call)  \
  switch (left) {                      \
    case 1: call<1> ARGS; break;       \
    case 2: call<2> ARGS; break;       \
    case 3: call<3> ARGS; break;       \
    default: call<4> ARGS; break;      \
  }

}  // namespace

// All heads go through one block of keys before the next one: K, then V, are read front to back.
void attend(const KvLayer& kv, const AttendTask& task) {
  alignas(64) float scores[kMaxHeads * kBlockTokens];
  float factors[kMaxHeads];
  const int num_heads = kv.num_kv_heads * task.group;
  __builtin_memset(task.out, 0, sizeof(float) * static_cast<size_t>(num_heads) * kv.head_dim);
  for (int head = 0; head < num_heads; ++head) {
    task.maximum[head] = -__builtin_inff();
    task.total[head] = 0.0F;
  }
  Block now;
  gather(kv, task, task.begin, now.keys);
  for (int begin = task.begin; begin < task.end; begin += kBlockTokens) {
    const uint16_t** next = now.keys + kBlockTokens;
    const int left_tokens = task.end - begin;
    now.count = left_tokens < kBlockTokens ? left_tokens : kBlockTokens;
    if (left_tokens > kBlockTokens) {
      gather(kv, task, begin + kBlockTokens, next);
    } else {
      for (int t = 0; t < kBlockTokens; ++t) next[t] = now.keys[kBlockTokens - 1];
    }
    for (int done = 0; done < num_heads;) {
      const int left = task.group - done % task.group;
      const Heads heads{done, done / task.group};
#define ARGS (kv, task, heads, now, scores, factors)
      MOORAGE_FOR_GROUP(left, score_heads)
      done += left < kMaxGroup ? left : kMaxGroup;
    }
    for (int done = 0; done < num_heads;) {
      const int left = task.group - done % task.group;
      const Heads heads{done, done / task.group};
      MOORAGE_FOR_GROUP(left, accumulate_heads)
#undef ARGS
      done += left < kMaxGroup ? left : kMaxGroup;
    }
    __builtin_memcpy(now.keys, next, sizeof(now.keys) / 2);
  }
  for (int head = 0; head < num_heads; ++head) {
    untangle(task.out + static_cast<size_t>(head) * kv.head_dim, kv.head_dim);
  }
}

}  // namespace moorage::cpu::avx512
