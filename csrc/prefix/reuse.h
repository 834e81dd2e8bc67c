// SPDX-License-Identifier: Apache-2.0
// How far apart pages are used again, and what memory gave up is asked for again. It tells a working
// set that fits from one that goes round in a loop larger than the memory, where the least recently
// used page is always the next one wanted and keeping the latest keeps nothing.
//
// Time is the number of pages used since the start. A page used again after more time than memory
// has pages would have been lost under LRU. While such uses outweigh the others by half, a page that
// had been given up and is there again stands on probation: it goes before all that was used again while
// it was there, so those stay and are hit. It is no worse than them if it came back sooner than the
// next of them has been waiting: then that one is likely dead.
// Source: the idea of comparing reuse distances is that of LIRS (Jiang and Zhang 2002).
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "prefix/page_hash.h"

namespace moorage {

class ReuseHistory {
 public:
  static constexpr std::int64_t kLostPerPage = 8;  // losses remembered, for each page of memory
  static constexpr std::int64_t kMostLost = 1 << 19;

  explicit ReuseHistory(std::int64_t num_pages);

  std::int64_t now() const { return now_; }
  void tick(std::int64_t num_pages) { now_ += num_pages; }

  // A page that was used last at that time was evicted.
  void lose(const PageHash& hash, std::int64_t used_at);
  // Whether the page was lost and not asked for since; then how long it had not been used.
  struct Found {
    bool was_lost = false;
    std::int64_t distance = 0;
  };
  Found find_lost(const PageHash& hash);

  // Pages were used again after that time.
  void note(std::int64_t distance, std::int64_t num_pages);
  bool is_looping() const;

 private:
  static constexpr std::int64_t kUnit = 1024;
  static constexpr std::size_t kWays = 4;

  // Half of a name stands for it: a mistake costs a place in the order of eviction, no more.
  struct Loss {
    std::uint64_t name = 0;  // 0: none
    std::int64_t used_at = 0;
  };
  Loss* set_of(const PageHash& hash);
  static std::uint64_t name_of(const PageHash& hash);

  const std::int64_t num_pages_;
  std::int64_t now_ = 0;
  std::int64_t fitting_ = 0;  // uses that LRU would have served
  std::int64_t beyond_ = 0;   // the share of the others that memory could serve at best
  std::vector<Loss> lost_;    // sets of kWays, a power of two of them; empty before the first loss
};

}  // namespace moorage
