// SPDX-License-Identifier: Apache-2.0
// The large path: a slab of many tokens (prefill, alone or mixed with decode rows) on AMX tiles.
//
// Eight phases a layer, a meeting of all threads between them:
//
//   phase      items                              writes
//   norm       16-token tiles                     A tiles of the normed residual
//   qkv        rope pairs of 2 x 16 columns       queries; K and V into the pool
//              (heads, where they have a bias or a norm)
//   pack       (row, 32 keys)                     B tiles of the row's K and V
//   attention  (head, 32 queries of a row)        A tiles of the attended rows
//   attn_out   32 columns                         residual +=
//   norm       16-token tiles                     A tiles
//   gate_up    16 columns of gate and of up       A tiles of the activation
//   down       32 columns                         residual +=
#include <algorithm>
#include <cmath>
#include <memory>

#include "amx.h"
#include "llama.h"
#include "paged_prefill.h"
#include "scratch.h"

namespace moorage::cpu {
namespace {

constexpr float kLog2E = 1.44269504F;

// The runs of tokens of one row each.
std::vector<RowSpan> spans_of(const TokenPlace* places, int count) {
  std::vector<RowSpan> spans;
  for (int token = 0; token < count;) {
    int end = token + 1;
    while (end < count && places[end].row == places[token].row) ++end;
    spans.push_back({token, end - token, places[end - 1].kv_len, places[token].pages});
    token = end;
  }
  return spans;
}

class LargeStep {
 public:
  LargeStep(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
            const int32_t* input_ids, int count, int num_threads, float* residual)
      : w_(weights),
        c_(weights.config),
        step_(step),
        k_(table_of(step.level)),
        places_(places),
        input_ids_(input_ids),
        count_(count),
        residual_(residual),
        attention_({c_.num_heads, c_.num_kv_heads, c_.head_dim}, spans_of(places, count), count) {
    const size_t padded = static_cast<size_t>(count + 2 * amx::kTileRows);
    normed_.resize(padded * c_.hidden);
    attended_.resize(padded * c_.query_width());
    activated_.resize(padded * c_.ffn);
    list_targets();
    const size_t widest = amx::scratch_elements(std::max(c_.hidden, c_.query_width()), false);
    const size_t scratch = std::max(widest, amx::scratch_elements(c_.ffn, true));
    for (int member = 0; member < num_threads; ++member) {
      scratch_.push_back(std::make_unique<AlignedArray<uint16_t>>(scratch));
      rows_.push_back(std::make_unique<AlignedArray<float>>(static_cast<size_t>(c_.hidden)));
      heads_.push_back(std::make_unique<AlignedArray<float>>());
    }
  }

  int first_items() const { return count_; }

  void operator()(Team& team, int me) {
    amx::begin();
    for (int token; (token = team.claim(me)) >= 0;) {
      unpack_row(w_.embedding, input_ids_[token],
                 residual_ + static_cast<size_t>(token) * c_.hidden);
    }
    team.meet(me, num_m_tiles());
    for (int layer = 0; layer < c_.num_layers; ++layer) run_layer(team, me, layer);
    amx::end();
  }

 private:
  int num_m_tiles() const { return (count_ + amx::kTileRows - 1) / amx::kTileRows; }
  int pairs_per_head() const { return c_.head_dim / 32; }
  int num_head_pairs() const { return (c_.num_heads + 2 * c_.num_kv_heads) * pairs_per_head(); }

  void list_targets() {
    for (int token = 0; token < count_; ++token) {
      positions_.push_back(places_[token].position);
      key_targets_.push_back(places_[token].key);
      query_targets_.push_back(attention_.query(0, token));
    }
  }

  void run_layer(Team& team, int me, int index) {
    const LlamaLayer& layer = w_.layers[index];
    const KvLayer kv = layer_of(c_, step_.pool, index);
    for (int item; (item = team.claim(me)) >= 0;) norm_tile(layer.input_norm, item, me);
    if (layer.extras.empty()) {
      team.meet(me, num_head_pairs());
      for (int item; (item = team.claim(me)) >= 0;) project_pair(layer, index, item, me);
    } else {
      team.meet(me, c_.num_heads + 2 * c_.num_kv_heads);
      for (int item; (item = team.claim(me)) >= 0;) project_head(layer, index, item, me);
    }
    team.meet(me, attention_.num_pack_items());
    for (int item; (item = team.claim(me)) >= 0;) attention_.pack(kv, item);
    team.meet(me, attention_.num_attend_items());
    for (int item; (item = team.claim(me)) >= 0;) attention_.attend(item, attended_.data());
    team.meet(me, c_.hidden / 32);
    for (int item; (item = team.claim(me)) >= 0;) add_columns(layer.attn_out, attended_, item, me);
    team.meet(me, num_m_tiles());
    for (int item; (item = team.claim(me)) >= 0;) norm_tile(layer.post_norm, item, me);
    team.meet(me, c_.ffn / kPanelRows);
    for (int item; (item = team.claim(me)) >= 0;) activate_columns(layer, item, me);
    team.meet(me, c_.hidden / 32);
    for (int item; (item = team.claim(me)) >= 0;) add_columns(layer.down, activated_, item, me);
    team.meet(me, num_m_tiles());
  }

  void norm_tile(const std::vector<float>& weight, int tile, int me) {
    float* normed = rows_[me]->data();
    const int end = std::min(count_, (tile + 1) * amx::kTileRows);
    for (int token = tile * amx::kTileRows; token < end; ++token) {
      const float* row = residual_ + static_cast<size_t>(token) * c_.hidden;
      k_.norm_row(row, weight.data(), c_.hidden, c_.rms_eps, normed);
      amx::pack_row(normed, c_.hidden, normed_.data(), token);
    }
  }

  amx::PairProduct product_of(const PackedMatrix& matrix, const AlignedArray<uint16_t>& tokens,
                              int first, int second, int me) const {
    amx::PairProduct product;
    product.matrix = &matrix;
    product.panels[0] = first;
    product.panels[1] = second;
    product.tokens = tokens.data();
    product.num_tokens = count_;
    product.scratch = scratch_[me]->data();
    return product;
  }

  // Where a head of q, k or v goes: token t to rows[t] + offset, times scale.
  struct HeadPlace {
    uint16_t* const* rows;
    size_t offset;
    float scale;
  };

  HeadPlace place_of(int head, int index) const {
    if (head < c_.num_heads) {
      const float scale = kLog2E / std::sqrt(static_cast<float>(c_.head_dim));
      return {query_targets_.data(), attention_.head_stride() * head, scale};
    }
    const PoolStrides strides(c_, step_.pool.page_size);
    const bool is_value = head >= c_.num_heads + c_.num_kv_heads;
    const int kv_head = (head - c_.num_heads) % c_.num_kv_heads;
    const size_t offset = strides.layer * index + (is_value ? strides.value : 0) +
                          static_cast<size_t>(kv_head) * c_.head_dim;
    return {key_targets_.data(), offset, 1.0F};
  }

  // Item: dims [16 i, 16 i + 16) of one head and their rope partners D / 2 further on.
  void project_pair(const LlamaLayer& layer, int index, int item, int me) {
    const int head = item / pairs_per_head();
    const int pair = item % pairs_per_head();
    const int first = head * (c_.head_dim / kPanelRows) + pair;
    const amx::PairProduct product =
        product_of(layer.qkv, normed_, first, first + pairs_per_head(), me);
    const HeadPlace place = place_of(head, index);
    const bool is_value = head >= c_.num_heads + c_.num_kv_heads;
    amx::HeadTarget target;
    target.cos_sin = is_value ? nullptr : w_.cos_sin.data();
    target.positions = positions_.data();
    target.head_dim = c_.head_dim;
    target.dim = pair * kPanelRows;
    target.scale = place.scale;
    target.rows = place.rows;
    target.offset = place.offset;
    amx::product_head(product, target);
  }

  // Item: a whole head in fp32 first, as its norm goes over all dims.
  void project_head(const LlamaLayer& layer, int index, int item, int me) {
    const int dim = c_.head_dim;
    AlignedArray<float>& head = *heads_[me];
    head.resize(static_cast<size_t>(count_) * dim);
    const int panels = dim / kPanelRows;
    for (int panel = 0; panel < panels; panel += 2) {
      const int first = item * panels + panel;
      const amx::PairProduct product = product_of(layer.qkv, normed_, first, first + 1, me);
      amx::product_store(product, {head.data(), dim, panel * kPanelRows});
    }
    const HeadPlace place = place_of(item, index);
    for (int token = 0; token < count_; ++token) {
      float* row = head.data() + static_cast<size_t>(token) * dim;
      const float* cos_sin = w_.cos_sin.data() + static_cast<size_t>(positions_[token]) * dim;
      finish_head(c_, layer.extras, k_, item, cos_sin, row);
      for (int i = 0; i < dim; ++i) row[i] *= place.scale;
      k_.to_bf16(row, place.rows[token] + place.offset, dim);
    }
  }

  void add_columns(const PackedMatrix& matrix, const AlignedArray<uint16_t>& tokens, int item,
                   int me) {
    amx::PairProduct product = product_of(matrix, tokens, 2 * item, 2 * item + 1, me);
    product.sums_chunks = true;
    const amx::AddTarget target{residual_, c_.hidden, {2 * item, 2 * item + 1}};
    amx::product_add(product, target);
  }

  void activate_columns(const LlamaLayer& layer, int item, int me) {
    const amx::PairProduct product =
        product_of(layer.gate_up, normed_, item, c_.ffn / kPanelRows + item, me);
    const amx::SwigluTarget target{activated_.data(), c_.ffn / kTileCols, item * kPanelRows};
    amx::product_swiglu(product, target);
  }

  const LlamaWeights& w_;
  const LlamaConfig& c_;
  const LlamaStep& step_;
  const KernelTable& k_;
  const TokenPlace* places_;
  const int32_t* input_ids_;
  const int count_;
  float* residual_;
  PagedPrefill attention_;
  AlignedArray<uint16_t> normed_;     // A tiles [tokens, hidden]
  AlignedArray<uint16_t> attended_;   // A tiles [tokens, query width]
  AlignedArray<uint16_t> activated_;  // A tiles [tokens, ffn]
  std::vector<int32_t> positions_;
  std::vector<uint16_t*> key_targets_;
  std::vector<uint16_t*> query_targets_;
  std::vector<std::unique_ptr<AlignedArray<uint16_t>>> scratch_;
  std::vector<std::unique_ptr<AlignedArray<float>>> rows_;
  std::vector<std::unique_ptr<AlignedArray<float>>> heads_;  // [tokens, head_dim], where needed
};

}  // namespace

bool amx_fits(const LlamaConfig& config) {
  return config.head_dim % 32 == 0 && config.head_dim <= amx::kMaxHeadDim &&
         config.hidden % 32 == 0 && config.ffn % 32 == 0;
}

void run_large(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
               const int32_t* input_ids, int count, ThreadPool& pool, float* residual) {
  LargeStep large(weights, step, places, input_ids, count, pool.size(), residual);
  pool.run(large.first_items(), [&large](Team& team, int me) { large(team, me); });
}

}  // namespace moorage::cpu
