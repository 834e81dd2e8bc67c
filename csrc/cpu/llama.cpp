// SPDX-License-Identifier: Apache-2.0
#include "llama.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "scratch.h"

namespace moorage::cpu {
namespace {

// Prompts longer than this run in slabs: their activations stay near the cores.
constexpr int kSlabTokens = 512;

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

void expect_index(const char* field, int index, int value, int limit) {
  if (value >= 0 && value < limit) return;
  throw std::invalid_argument(std::string(field) + "[" + std::to_string(index) + "]: got " +
                              std::to_string(value) + "; allowed: 0 to " +
                              std::to_string(limit - 1));
}

void expect_matrix(const char* name, const PackedMatrix& matrix, int rows, int cols) {
  expect(matrix.num_rows == rows && matrix.num_cols == cols,
         std::string(name) + ": got " + std::to_string(matrix.num_rows) + " x " +
             std::to_string(matrix.num_cols) + "; allowed: " + std::to_string(rows) + " x " +
             std::to_string(cols));
}

void expect_length(const char* name, const std::vector<float>& values, int length) {
  expect(values.empty() || values.size() == static_cast<size_t>(length),
         std::string(name) + ": got " + std::to_string(values.size()) + " values; allowed: none or " +
             std::to_string(length));
}

}  // namespace

KvLayer layer_of(const LlamaConfig& config, const KvPool& pool, int layer) {
  const PoolStrides strides(config, pool.page_size);
  KvLayer kv;
  kv.base = pool.data + strides.layer * layer;
  kv.page_stride = strides.page;
  kv.value_offset = strides.value;
  kv.page_size = pool.page_size;
  kv.num_kv_heads = config.num_kv_heads;
  kv.head_dim = config.head_dim;
  return kv;
}

void finish_head(const LlamaConfig& config, const HeadExtras& extras, const KernelTable& kernels,
                 int head, const float* cos_sin, float* row) {
  const int dim = config.head_dim;
  if (!extras.qkv_bias.empty()) {
    const float* bias = extras.qkv_bias.data() + static_cast<size_t>(head) * dim;
    for (int i = 0; i < dim; ++i) row[i] += bias[i];
  }
  if (head >= config.num_heads + config.num_kv_heads) return;  // a head of v
  const std::vector<float>& norm = head < config.num_heads ? extras.q_norm : extras.k_norm;
  if (!norm.empty()) kernels.norm_row(row, norm.data(), dim, config.rms_eps, row);
  kernels.rope_row(row, cos_sin, dim);
}

LlamaModel::LlamaModel(LlamaWeights weights) : weights_(std::move(weights)) {
  const LlamaConfig& c = weights_.config;
  expect(c.num_layers > 0 && static_cast<int>(weights_.layers.size()) == c.num_layers,
         "layers: their number differs from num_layers");
  expect(c.num_kv_heads > 0 && c.num_heads % c.num_kv_heads == 0,
         "num_heads: not a multiple of num_kv_heads");
  expect(c.num_heads <= kMaxAttendHeads, "num_heads: allowed: at most 128");
  expect(c.head_dim % 32 == 0 && c.head_dim <= 256, "head_dim: allowed: 32, 64, ... 256");
  expect(c.hidden % 32 == 0 && c.ffn % 32 == 0, "hidden, ffn: allowed: multiples of 32");
  expect(weights_.cos_sin.size() ==
             static_cast<size_t>(weights_.max_positions) * static_cast<size_t>(c.head_dim),
         "cos_sin: its size differs from max_positions * head_dim");
  expect_matrix("embedding", weights_.embedding, c.vocab, c.hidden);
  expect_matrix("lm_head", weights_.lm_head, c.vocab, c.hidden);
  for (const LlamaLayer& layer : weights_.layers) {
    expect_matrix("qkv", layer.qkv, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden);
    expect_matrix("attn_out", layer.attn_out, c.hidden, c.query_width());
    expect_matrix("gate_up", layer.gate_up, 2 * c.ffn, c.hidden);
    expect_matrix("down", layer.down, c.hidden, c.ffn);
    const HeadExtras& extras = layer.extras;
    expect_length("qkv_bias", extras.qkv_bias, layer.qkv.num_rows);
    expect_length("q_norm", extras.q_norm, c.head_dim);
    expect_length("k_norm", extras.k_norm, c.head_dim);
  }
}

LlamaModel::~LlamaModel() = default;

void LlamaModel::check(const LlamaStep& step) const {
  const KvPool& pool = step.pool;
  expect(step.row_indptr[0] == 0, "row_indptr[0]: allowed: 0");
  expect(step.row_indptr[step.num_rows] == step.num_tokens,
         "row_indptr: its last entry differs from the number of tokens");
  for (int row = 0; row < step.num_rows; ++row) {
    expect_index("row_slots", row, step.row_slots[row], step.num_slots);
    const int num_new = step.row_indptr[row + 1] - step.row_indptr[row];
    const int seq_len = step.seq_lens[row];
    expect(num_new >= 0, "row_indptr: not ascending at row " + std::to_string(row));
    expect(seq_len >= num_new && seq_len <= step.pages_per_slot * pool.page_size,
           "seq_lens[" + std::to_string(row) + "]: got " + std::to_string(seq_len) +
               "; allowed: at least the row's new tokens, at most its page table");
    const int32_t* pages =
        step.page_table + static_cast<size_t>(step.row_slots[row]) * step.pages_per_slot;
    for (int page = 0; page * pool.page_size < seq_len; ++page) {
      expect_index("page_table", page, pages[page], pool.num_pages);
    }
  }
  for (int token = 0; token < step.num_tokens; ++token) {
    expect_index("input_ids", token, step.input_ids[token], weights_.config.vocab);
    expect_index("positions", token, step.positions[token], weights_.max_positions);
    expect_index("slot_mapping", token, step.slot_mapping[token], pool.num_pages * pool.page_size);
  }
  for (int i = 0; i < step.num_samples; ++i) {
    expect_index("sample_rows", i, step.sample_rows[i], step.num_rows);
    const int row = step.sample_rows[i];
    expect(step.row_indptr[row] < step.row_indptr[row + 1],
           "sample_rows: row " + std::to_string(row) + " has no token in this step");
  }
}

std::vector<TokenPlace> LlamaModel::places_of(const LlamaStep& step) const {
  const PoolStrides strides(weights_.config, step.pool.page_size);
  std::vector<TokenPlace> places(static_cast<size_t>(step.num_tokens));
  for (int row = 0; row < step.num_rows; ++row) {
    const int end = step.row_indptr[row + 1];
    for (int token = step.row_indptr[row]; token < end; ++token) {
      TokenPlace& place = places[token];
      const int slot = step.slot_mapping[token];
      place.row = row;
      place.position = step.positions[token];
      place.kv_len = step.seq_lens[row] - (end - 1 - token);
      place.key = step.pool.data + strides.page * (slot / step.pool.page_size) +
                  strides.token * (slot % step.pool.page_size);
      place.pages =
          step.page_table + static_cast<size_t>(step.row_slots[row]) * step.pages_per_slot;
    }
  }
  return places;
}

void LlamaModel::forward(const LlamaStep& step) {
  std::lock_guard lock(callers_);
  check(step);
  const std::vector<TokenPlace> places = places_of(step);
  const std::shared_ptr<ThreadPool> pool = global_pool();
  const size_t hidden = static_cast<size_t>(weights_.config.hidden);
  const bool is_large = step.num_tokens > kSmallTokens && step.level == CpuLevel::kAmx &&
                        amx_fits(weights_.config);
  const int stride = is_large ? kSlabTokens : kSmallTokens;
  AlignedArray<float> residual(static_cast<size_t>(stride) * hidden);
  AlignedArray<float> sampled(static_cast<size_t>(step.num_samples) * hidden + 1);
  for (int first = 0; first < step.num_tokens; first += stride) {
    const int count = std::min(stride, step.num_tokens - first);
    const auto run = is_large && count > kSmallTokens ? run_large : run_small;
    run(weights_, step, places.data() + first, step.input_ids + first, count, *pool,
        residual.data());
    for (int i = 0; i < step.num_samples; ++i) {
      const int last = step.row_indptr[step.sample_rows[i] + 1] - 1;
      if (last < first || last >= first + count) continue;
      std::memcpy(sampled.data() + i * hidden, residual.data() + (last - first) * hidden,
                  hidden * sizeof(float));
    }
  }
  run_logits(weights_, step.level, sampled.data(), step.num_samples, *pool, step.logits);
}

}  // namespace moorage::cpu
