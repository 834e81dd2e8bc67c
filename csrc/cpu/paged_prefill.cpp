// SPDX-License-Identifier: Apache-2.0
#include "paged_prefill.h"

#include <algorithm>

namespace moorage::cpu {
namespace {

constexpr int kPackKeys = 32;

size_t round_up(int value, int step) {
  return static_cast<size_t>((value + step - 1) / step * step);
}

}  // namespace

PagedPrefill::PagedPrefill(const Shape& shape, std::vector<RowSpan> spans, int num_tokens)
    : shape_(shape), spans_(std::move(spans)) {
  size_t keys = 0;
  for (int span = 0; span < static_cast<int>(spans_.size()); ++span) {
    const RowSpan& row = spans_[span];
    for (int first = 0; first < row.num_tokens; first += amx::kBlockQueries) {
      blocks_.push_back({span, first, std::min(amx::kBlockQueries, row.num_tokens - first)});
    }
    for (int begin = 0; begin < row.kv_len; begin += kPackKeys) {
      key_blocks_.push_back({span, begin});
    }
    keys_at_.push_back(keys);
    keys += round_up(row.kv_len, kPackKeys) * shape_.head_dim;
  }
  keys_per_head_ = keys;
  keys_.resize(keys * shape_.num_kv_heads);
  values_.resize(keys * shape_.num_kv_heads);
  // A block reads 32 query rows whatever it uses.
  head_stride_ = static_cast<size_t>(num_tokens + amx::kBlockQueries) * shape_.head_dim;
  query_.resize(head_stride_ * shape_.num_heads);
  // The blocks that see most keys first, so that the threads finish together.
  std::stable_sort(blocks_.begin(), blocks_.end(), [this](const auto& a, const auto& b) {
    return end_of(a) > end_of(b);
  });
}

int PagedPrefill::end_of(const QueryBlock& block) const {
  const RowSpan& row = spans_[block.span];
  return row.kv_len - row.num_tokens + block.first + block.count;
}

amx::PackedKeys PagedPrefill::keys_of(int kv_head, int span) const {
  const size_t at = keys_per_head_ * kv_head + keys_at_[span];
  return {keys_.data() + at, values_.data() + at};
}

void PagedPrefill::pack(const KvLayer& kv, int item) const {
  const KeyBlock& block = key_blocks_[item];
  const RowSpan& row = spans_[block.span];
  for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
    amx::pack_keys(kv, row.pages, kv_head, block.begin, row.kv_len, keys_of(kv_head, block.span));
  }
}

void PagedPrefill::attend(int item, uint16_t* out) const {
  const int num_blocks = static_cast<int>(blocks_.size());
  const int head = item / num_blocks;
  const QueryBlock& from = blocks_[item % num_blocks];
  const RowSpan& row = spans_[from.span];
  const int token = row.first_token + from.first;
  amx::AttendBlock block;
  block.head_dim = shape_.head_dim;
  block.query = query(head, token);
  block.num_queries = from.count;
  block.first_position = row.kv_len - row.num_tokens + from.first;
  block.kv = keys_of(head / (shape_.num_heads / shape_.num_kv_heads), from.span);
  block.out = out;
  block.out_k_tiles = shape_.num_heads * shape_.head_dim / kTileCols;
  block.out_token = token;
  block.out_head = head;
  amx::attend_block(block);
}

}  // namespace moorage::cpu
