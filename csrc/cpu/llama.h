// SPDX-License-Identifier: Apache-2.0
// A llama-type decoder over paged bf16 KV: one call runs all layers of one ragged step.
// Does not know: requests, sampling, Python, who owns a page.
//
// Thread rule: forward() serialises its callers; the weights are immutable once set.
// Invariants: every index of a step is checked against the pool before anything is written.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"
#include "weights.h"

namespace moorage::cpu {

struct LlamaConfig {
  int num_layers = 0;
  int hidden = 0;
  int ffn = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  float rms_eps = 0.0F;

  int group() const { return num_heads / num_kv_heads; }
  int query_width() const { return num_heads * head_dim; }
};

// Empty where the architecture has none: the bias, [rows of qkv]; the norms over each head of q and
// of k, [head_dim], before rope.
struct HeadExtras {
  std::vector<float> qkv_bias;
  std::vector<float> q_norm;
  std::vector<float> k_norm;

  bool empty() const { return qkv_bias.empty() && q_norm.empty() && k_norm.empty(); }
};

struct LlamaLayer {
  std::vector<float> input_norm;
  std::vector<float> post_norm;
  HeadExtras extras;
  PackedMatrix qkv;
  PackedMatrix attn_out;
  PackedMatrix gate_up;
  PackedMatrix down;
};

struct LlamaWeights {
  LlamaConfig config;
  PackedMatrix embedding;
  PackedMatrix lm_head;
  std::vector<LlamaLayer> layers;
  std::vector<float> final_norm;
  std::vector<float> cos_sin;  // [max_positions, head_dim]
  int max_positions = 0;
};

// The paged pool [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim], bf16, contiguous.
struct KvPool {
  uint16_t* data = nullptr;
  int num_pages = 0;
  int page_size = 0;
};

// Borrowed views of one ragged step, as ForwardBatch has them; valid during the call.
struct LlamaStep {
  CpuLevel level = CpuLevel::kPortable;
  int num_tokens = 0;
  int num_rows = 0;
  int num_samples = 0;
  int num_slots = 0;
  int pages_per_slot = 0;
  const int32_t* input_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* slot_mapping = nullptr;
  const int32_t* row_indptr = nullptr;
  const int32_t* row_slots = nullptr;
  const int32_t* seq_lens = nullptr;
  const int32_t* page_table = nullptr;
  const int32_t* sample_rows = nullptr;
  KvPool pool;
  float* logits = nullptr;  // [num_samples, vocab]
};

// One query token of the step: where its KV goes, what it attends to.
struct TokenPlace {
  int row = 0;
  int position = 0;
  int kv_len = 0;               // it attends to [0, kv_len)
  uint16_t* key = nullptr;      // layer 0
  const int32_t* pages = nullptr;
};

class LlamaModel {
 public:
  // Throws std::invalid_argument where shapes disagree.
  explicit LlamaModel(LlamaWeights weights);
  ~LlamaModel();

  // Throws std::invalid_argument naming the first bad index; then nothing was written.
  void forward(const LlamaStep& step);

  const LlamaConfig& config() const { return weights_.config; }

 private:
  void check(const LlamaStep& step) const;
  std::vector<TokenPlace> places_of(const LlamaStep& step) const;

  const LlamaWeights weights_;
  std::mutex callers_;
};

// Strides of the pool in elements.
struct PoolStrides {
  size_t token = 0;
  size_t value = 0;
  size_t layer = 0;
  size_t page = 0;

  PoolStrides(const LlamaConfig& config, int page_size)
      : token(static_cast<size_t>(config.num_kv_heads) * config.head_dim),
        value(token * page_size),
        layer(2 * value),
        page(layer * config.num_layers) {}
};

KvLayer layer_of(const LlamaConfig& config, const KvPool& pool, int layer);

// Bias, norm and rope of one head of q, k or v, in place; `head` counts over all three, `row` is
// [head_dim], `cos_sin` the token's row of the table.
void finish_head(const LlamaConfig& config, const HeadExtras& extras, const KernelTable& kernels,
                 int head, const float* cos_sin, float* row);

// Tokens that share one pass over the weights in the small path.
constexpr int kSmallTokens = 16;

// Runs `count` <= kSmallTokens consecutive tokens through all layers; leaves the residual stream
// [count, hidden] in `residual`. Memory-bound: weights are read once, dot products are 8-bit.
void run_small(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
               const int32_t* input_ids, int count, ThreadPool& pool, float* residual);

// Runs any number of consecutive tokens through all layers with AMX tiles in bf16.
// Requires: step.level == kAmx and amx_fits(config).
void run_large(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
               const int32_t* input_ids, int count, ThreadPool& pool, float* residual);
bool amx_fits(const LlamaConfig& config);

// logits[i] = lm_head . norm(rows[i]) for num_samples rows.
void run_logits(const LlamaWeights& weights, CpuLevel level, const float* rows, int num_samples,
                ThreadPool& pool, float* logits);

}  // namespace moorage::cpu
