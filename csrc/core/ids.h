// SPDX-License-Identifier: Apache-2.0
// Strong integer ids: a page can never be passed where a slot is meant. Knows no container.
#pragma once

#include <compare>
#include <cstdint>

namespace moorage {

template <class Tag, class Value>
struct StrongId {
  Value value = -1;

  constexpr bool is_valid() const { return value >= 0; }
  constexpr auto operator<=>(const StrongId&) const = default;
};

using PageId = StrongId<struct PageTag, std::int32_t>;        // of the device pool
using SlotId = StrongId<struct SlotTag, std::int32_t>;        // row of the persistent page table
using StepId = StrongId<struct StepTag, std::int64_t>;        // one planned step, counted from 0
using RequestId = StrongId<struct RequestTag, std::int64_t>;  // chosen by the caller
using NodeId = StrongId<struct NodeTag, std::int64_t>;        // construction order of a tree node

using TokenId = std::int32_t;
using TimeMs = std::int64_t;

static_assert(sizeof(PageId) == sizeof(std::int32_t));

}  // namespace moorage
