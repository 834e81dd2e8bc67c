// SPDX-License-Identifier: Apache-2.0
// The small path: up to 16 tokens share one pass over the weights (decode, short extensions).
//
// Five phases a layer, a meeting of all threads between them. What every thread needs whole (the
// normed residual) each computes for itself: cheaper than one more meeting.
//
//   phase      items                        writes
//   qkv        heads of q, k, v             query rows (roped, scaled), K and V into the pool
//   attention  (token, key range)           partial softmax; the last range of a token merges them
//   attn_out   16-row panels                residual +=
//   gate_up    32 columns of the ffn        quantised activation block
//   down       16-row panels                residual +=
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "llama.h"
#include "scratch.h"

namespace moorage::cpu {
namespace {

constexpr float kLog2E = 1.44269504F;
constexpr int kRangeStep = 64;   // key ranges are multiples of this
constexpr int kMaxRange = 512;
constexpr int kPanelsPerLogitsItem = 8;

struct KeyRange {
  int token;
  int begin;
  int end;
  int part;  // index of its partial result
};

class SmallStep {
 public:
  SmallStep(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
            const int32_t* input_ids, int count, int num_threads, float* residual)
      : w_(weights),
        c_(weights.config),
        step_(step),
        k_(table_of(step.level)),
        places_(places),
        input_ids_(input_ids),
        count_(count),
        residual_(residual),
        query_(static_cast<size_t>(count) * c_.query_width()),
        attended_(count, c_.query_width()),
        activated_(count, c_.ffn),
        merged_parts_(new std::atomic<int>[static_cast<size_t>(count)]) {
    for (int member = 0; member < num_threads; ++member) {
      normed_.push_back(std::make_unique<ActBuffer>(count, c_.hidden));
      rows_.push_back(std::make_unique<AlignedArray<float>>(row_floats()));
    }
    for (int token = 0; token < count; ++token) merged_parts_[token].store(0);
    cut_ranges(num_threads);
  }

  int first_items() const { return count_; }

  void operator()(Team& team, int me) {
    while (true) {
      const int token = team.claim(me);
      if (token < 0) break;
      unpack_row(w_.embedding, input_ids_[token], residual_ + row_at(token));
    }
    team.meet(me, num_head_items());
    for (int layer = 0; layer < c_.num_layers; ++layer) run_layer(team, me, layer);
  }

 private:
  size_t row_at(int token) const { return static_cast<size_t>(token) * c_.hidden; }
  int num_head_items() const { return c_.num_heads + 2 * c_.num_kv_heads; }
  size_t row_floats() const {
    const size_t widest = static_cast<size_t>(std::max({c_.hidden, c_.query_width(), 256}));
    return widest + static_cast<size_t>(kSmallTokens) * (256 + 16);
  }

  // By a token's own length alone: its result does not depend on what else is in the step.
  void cut_ranges(int num_threads) {
    for (int token = 0; token < count_; ++token) {
      const int share = places_[token].kv_len / (2 * num_threads);
      const int whole = (share + kRangeStep - 1) / kRangeStep * kRangeStep;
      const int length = std::clamp(whole, kRangeStep, kMaxRange);
      first_part_.push_back(static_cast<int>(ranges_.size()));
      for (int begin = 0; begin < places_[token].kv_len; begin += length) {
        const int end = std::min(begin + length, places_[token].kv_len);
        ranges_.push_back({token, begin, end, static_cast<int>(ranges_.size())});
      }
    }
    first_part_.push_back(static_cast<int>(ranges_.size()));
    maximum_.resize(ranges_.size() * c_.num_heads);
    total_.resize(ranges_.size() * c_.num_heads);
    partial_.resize(ranges_.size() * c_.query_width());
  }

  void run_layer(Team& team, int me, int index) {
    const LlamaLayer& layer = w_.layers[index];
    const KvLayer kv = layer_of(c_, step_.pool, index);
    norm_rows(layer.input_norm, layer.qkv.format, me);
    for (int item; (item = team.claim(me)) >= 0;) project_head(layer, index, item, me);
    team.meet(me, static_cast<int>(ranges_.size()));
    for (int item; (item = team.claim(me)) >= 0;) attend_range(layer, kv, index, item, me);
    team.meet(me, layer.attn_out.num_panels());
    for (int item; (item = team.claim(me)) >= 0;) {
      add_panel(layer.attn_out, attended_.rows(), item, me);
    }
    team.meet(me, c_.ffn / kTileCols);
    norm_rows(layer.post_norm, layer.gate_up.format, me);
    for (int item; (item = team.claim(me)) >= 0;) activate_columns(layer, item, me);
    team.meet(me, layer.down.num_panels());
    for (int item; (item = team.claim(me)) >= 0;) {
      add_panel(layer.down, activated_.rows(), item, me);
    }
    team.meet(me, num_head_items());
  }

  void norm_rows(const std::vector<float>& weight, WeightFormat format, int me) {
    float* normed = rows_[me]->data();
    for (int token = 0; token < count_; ++token) {
      k_.norm_row(residual_ + row_at(token), weight.data(), c_.hidden, c_.rms_eps, normed);
      k_.prepare_row(normed, format, normed_[me]->rows(), token);
    }
  }

  // Computes `num_panels` panels from `first` on into out [count, num_panels * 16].
  void project(const PackedMatrix& matrix, int first, int num_panels, const ActRows& acts,
               float* out) const {
    alignas(64) float tile[kSmallTokens * kPanelRows];
    const int width = num_panels * kPanelRows;
    for (int p = 0; p < num_panels; ++p) {
      k_.panel(matrix, first + p, acts, 0, count_, tile);
      for (int token = 0; token < count_; ++token) {
        std::memcpy(out + token * width + p * kPanelRows, tile + token * kPanelRows,
                    sizeof(float) * kPanelRows);
      }
    }
  }

  // Item: one head of q, then of k, then of v.
  void project_head(const LlamaLayer& layer, int index, int item, int me) {
    const int dim = c_.head_dim;
    const int panels = dim / kPanelRows;
    float* out = rows_[me]->data();
    project(layer.qkv, item * panels, panels, normed_[me]->rows(), out);
    const PoolStrides strides(c_, step_.pool.page_size);
    const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
    const bool is_value = item >= c_.num_heads + c_.num_kv_heads;
    for (int token = 0; token < count_; ++token) {
      float* row = out + static_cast<size_t>(token) * dim;
      const TokenPlace& place = places_[token];
      const float* cos_sin = w_.cos_sin.data() + static_cast<size_t>(place.position) * dim;
      finish_head(c_, layer.extras, k_, item, cos_sin, row);
      if (item < c_.num_heads) {
        float* to = query_.data() + static_cast<size_t>(token) * c_.query_width() + item * dim;
        for (int i = 0; i < dim; ++i) to[i] = row[i] * scale;
        continue;
      }
      const int kv_head = (item - c_.num_heads) % c_.num_kv_heads;
      uint16_t* to = place.key + strides.layer * index + static_cast<size_t>(kv_head) * dim;
      k_.to_bf16(row, is_value ? to + strides.value : to, dim);
    }
  }

  void attend_range(const LlamaLayer& layer, const KvLayer& kv, int index, int item, int me) {
    const KeyRange& range = ranges_[item];
    AttendTask task;
    task.query = query_.data() + static_cast<size_t>(range.token) * c_.query_width();
    task.pages = places_[range.token].pages;
    task.begin = range.begin;
    task.end = range.end;
    task.group = c_.group();
    task.maximum = maximum_.data() + static_cast<size_t>(range.part) * c_.num_heads;
    task.total = total_.data() + static_cast<size_t>(range.part) * c_.num_heads;
    task.out = partial_.data() + static_cast<size_t>(range.part) * c_.query_width();
    k_.attend(kv, task);
    const int parts = first_part_[range.token + 1] - first_part_[range.token];
    const int done = merged_parts_[range.token].fetch_add(1, std::memory_order_acq_rel) + 1;
    if (done == parts * (index + 1)) merge(layer, range.token, me);
  }

  void merge(const LlamaLayer& layer, int token, int me) {
    float* merged = rows_[me]->data();
    for (int head = 0; head < c_.num_heads; ++head) merge_head(token, head, merged);
    k_.prepare_row(merged, layer.attn_out.format, attended_.rows(), token);
  }

  void merge_head(int token, int head, float* merged) const {
    const int dim = c_.head_dim;
    float top = -INFINITY;
    for (int part = first_part_[token]; part < first_part_[token + 1]; ++part) {
      top = std::max(top, maximum_[static_cast<size_t>(part) * c_.num_heads + head]);
    }
    float* to = merged + static_cast<size_t>(head) * dim;
    std::fill(to, to + dim, 0.0F);
    float sum = 0.0F;
    for (int part = first_part_[token]; part < first_part_[token + 1]; ++part) {
      const size_t at = static_cast<size_t>(part) * c_.num_heads + head;
      const float factor = std::exp2(maximum_[at] - top);
      sum += total_[at] * factor;
      const float* from = partial_.data() + at * dim;
      for (int i = 0; i < dim; ++i) to[i] += from[i] * factor;
    }
    const float inverse = 1.0F / sum;
    for (int i = 0; i < dim; ++i) to[i] *= inverse;
  }

  void add_panel(const PackedMatrix& matrix, const ActRows& acts, int panel, int me) {
    float* out = rows_[me]->data();
    k_.panel(matrix, panel, acts, 0, count_, out);
    for (int token = 0; token < count_; ++token) {
      float* to = residual_ + row_at(token) + panel * kPanelRows;
      for (int lane = 0; lane < kPanelRows; ++lane) to[lane] += out[token * kPanelRows + lane];
    }
  }

  // Item: 32 columns of the ffn, which are one block of the activation that `down` takes.
  void activate_columns(const LlamaLayer& layer, int item, int me) {
    float* gate = rows_[me]->data();
    float* up = gate + static_cast<size_t>(kSmallTokens) * kTileCols;
    const int panels = kTileCols / kPanelRows;
    project(layer.gate_up, item * panels, panels, normed_[me]->rows(), gate);
    project(layer.gate_up, c_.ffn / kPanelRows + item * panels, panels, normed_[me]->rows(), up);
    k_.silu_mul(gate, up, count_ * kTileCols);
    for (int token = 0; token < count_; ++token) {
      k_.prepare_block(gate + token * kTileCols, layer.down.format, activated_.rows(), token, item);
    }
  }

  const LlamaWeights& w_;
  const LlamaConfig& c_;
  const LlamaStep& step_;
  const KernelTable& k_;
  const TokenPlace* places_;
  const int32_t* input_ids_;
  const int count_;
  float* residual_;
  AlignedArray<float> query_;
  ActBuffer attended_;
  ActBuffer activated_;
  std::vector<std::unique_ptr<ActBuffer>> normed_;          // one per thread
  std::vector<std::unique_ptr<AlignedArray<float>>> rows_;  // one per thread
  std::vector<KeyRange> ranges_;
  std::vector<int> first_part_;  // [count + 1]
  AlignedArray<float> maximum_;
  AlignedArray<float> total_;
  AlignedArray<float> partial_;
  std::unique_ptr<std::atomic<int>[]> merged_parts_;  // grows over the layers
};

}  // namespace

void run_small(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
               const int32_t* input_ids, int count, ThreadPool& pool, float* residual) {
  SmallStep small(weights, step, places, input_ids, count, pool.size(), residual);
  pool.run(small.first_items(), [&small](Team& team, int me) { small(team, me); });
}

void run_logits(const LlamaWeights& weights, CpuLevel level, const float* rows, int num_samples,
                ThreadPool& pool, float* logits) {
  const KernelTable& k = table_of(level);
  const LlamaConfig& c = weights.config;
  const int num_panels = weights.lm_head.num_panels();
  const int items = (num_panels + kPanelsPerLogitsItem - 1) / kPanelsPerLogitsItem;
  for (int first = 0; first < num_samples; first += kSmallTokens) {
    const int count = std::min(kSmallTokens, num_samples - first);
    ActBuffer acts(count, c.hidden);
    AlignedArray<float> normed(static_cast<size_t>(c.hidden));
    for (int i = 0; i < count; ++i) {
      const float* row = rows + static_cast<size_t>(first + i) * c.hidden;
      k.norm_row(row, weights.final_norm.data(), c.hidden, c.rms_eps, normed.data());
      k.prepare_row(normed.data(), weights.lm_head.format, acts.rows(), i);
    }
    pool.run(items, [&](Team& team, int me) {
      alignas(64) float out[kSmallTokens * kPanelRows];
      for (int item; (item = team.claim(me)) >= 0;) {
        const int begin = item * kPanelsPerLogitsItem;
        const int end = std::min(begin + kPanelsPerLogitsItem, num_panels);
        for (int panel = begin; panel < end; ++panel) {
          k.panel(weights.lm_head, panel, acts.rows(), 0, count, out);
          const int width = std::min(kPanelRows, c.vocab - panel * kPanelRows);
          for (int i = 0; i < count; ++i) {
            std::memcpy(logits + static_cast<size_t>(first + i) * c.vocab + panel * kPanelRows,
                        out + i * kPanelRows, sizeof(float) * width);
          }
        }
      }
    });
  }
}

}  // namespace moorage::cpu
