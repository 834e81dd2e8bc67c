// SPDX-License-Identifier: Apache-2.0
// What happened to cached pages, in order, until somebody drains it. Knows no request.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "prefix/page_hash.h"

namespace moorage {

enum class KvEventKind : std::uint8_t { kStored, kMoved, kRemoved };
enum class Tier : std::uint8_t { kL1, kL2, kL3 };

struct KvEvent {
  KvEventKind kind;
  Tier tier;
  PageHash page_hash;
  PageHash parent_hash;
  std::int32_t num_tokens;
};

// Asked when a page leaves L1: has it moved, or is it gone?
class LowerResidency {
 public:
  virtual ~LowerResidency() = default;
  virtual bool is_in_l2(const PageHash& hash) const = 0;
};

// Bounded: a consumer that stops draining costs events (counted), never memory without end.
class KvEventLog {
 public:
  static constexpr std::size_t kMaxEvents = 1 << 20;

  void add(const KvEvent& event) {
    if (events_.size() >= kMaxEvents) {
      ++num_dropped_;
      return;
    }
    events_.push_back(event);
  }
  std::vector<KvEvent> drain() { return std::exchange(events_, {}); }
  std::int64_t num_dropped() const { return num_dropped_; }

 private:
  std::vector<KvEvent> events_;
  std::int64_t num_dropped_ = 0;
};

}  // namespace moorage
