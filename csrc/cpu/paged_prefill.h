// SPDX-License-Identifier: Apache-2.0
// Attention of many query tokens over paged KV, on AMX: cuts a ragged step into items for a team.
// Does not know: models, layers, who owns a page.
//
// Thread rule: plan and memory are made by one thread; pack() and attend() run on any, one item
// each. All of pack()'s items come before the first of attend()'s.
#pragma once

#include <vector>

#include "amx.h"
#include "scratch.h"

namespace moorage::cpu {

// A run of query tokens that belong to one row: the last ones of its sequence.
struct RowSpan {
  int first_token = 0;
  int num_tokens = 0;
  int kv_len = 0;  // keys the last token sees
  const int32_t* pages = nullptr;
};

class PagedPrefill {
 public:
  struct Shape {
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
  };

  PagedPrefill(const Shape& shape, std::vector<RowSpan> spans, int num_tokens);

  // [heads][tokens][D] in bf16, times scale * log2(e); the caller fills it.
  uint16_t* query(int head, int token) const {
    return query_.data() + head_stride_ * head + static_cast<size_t>(token) * shape_.head_dim;
  }
  size_t head_stride() const { return head_stride_; }

  int num_pack_items() const { return static_cast<int>(key_blocks_.size()); }
  void pack(const KvLayer& kv, int item) const;

  // Writes A tiles [tokens, heads * D].
  int num_attend_items() const { return static_cast<int>(blocks_.size()) * shape_.num_heads; }
  void attend(int item, uint16_t* out) const;

 private:
  struct QueryBlock {
    int span;
    int first;  // token within the span
    int count;
  };
  struct KeyBlock {
    int span;
    int begin;
  };

  int end_of(const QueryBlock& block) const;
  amx::PackedKeys keys_of(int kv_head, int span) const;

  const Shape shape_;
  const std::vector<RowSpan> spans_;
  std::vector<size_t> keys_at_;  // per span: elements into the packed keys of one KV head
  std::vector<QueryBlock> blocks_;
  std::vector<KeyBlock> key_blocks_;
  AlignedArray<uint16_t> query_;
  AlignedArray<uint16_t> keys_;
  AlignedArray<uint16_t> values_;
  size_t head_stride_ = 0;
  size_t keys_per_head_ = 0;
};

}  // namespace moorage::cpu
