// SPDX-License-Identifier: Apache-2.0
#include "prefix/reuse.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moorage {

ReuseHistory::ReuseHistory(std::int64_t num_pages)
    : num_pages_(std::max<std::int64_t>(1, num_pages)) {}

ReuseHistory::Loss* ReuseHistory::set_of(const PageHash& hash) {
  std::uint64_t value = 0;
  std::memcpy(&value, hash.data(), sizeof(value));
  return &lost_[(value & (lost_.size() / kWays - 1)) * kWays];
}

std::uint64_t ReuseHistory::name_of(const PageHash& hash) {
  std::uint64_t value = 0;
  std::memcpy(&value, hash.data() + hash.size() - sizeof(value), sizeof(value));
  return std::max<std::uint64_t>(1, value);
}

// In place of the oldest one of its set, where that is full.
void ReuseHistory::lose(const PageHash& hash, std::int64_t used_at) {
  if (lost_.empty()) {
    const std::int64_t most = std::clamp<std::int64_t>(kLostPerPage * num_pages_, 64, kMostLost);
    lost_.resize(std::bit_ceil(static_cast<std::size_t>(most)));
  }
  const std::uint64_t name = name_of(hash);
  Loss* const set = set_of(hash);
  Loss* place = set;
  for (Loss* at = set; at != set + kWays; ++at) {
    if (at->name == name) {
      place = at;
      break;
    }
    const bool is_freer = at->name == 0 || at->used_at < place->used_at;
    if (place->name != 0 && is_freer) place = at;
  }
  *place = {name, used_at};
}

ReuseHistory::Found ReuseHistory::find_lost(const PageHash& hash) {
  if (lost_.empty()) return {};
  const std::uint64_t name = name_of(hash);
  Loss* const set = set_of(hash);
  Loss* const at = std::find_if(set, set + kWays, [=](const Loss& loss) { return loss.name == name; });
  if (at == set + kWays) return {};
  const std::int64_t distance = now_ - at->used_at;
  *at = {};
  return {true, distance};
}

void ReuseHistory::note(std::int64_t distance, std::int64_t num_pages) {
  if (distance <= num_pages_) {
    fitting_ += num_pages * kUnit;
  } else {
    beyond_ += num_pages * (kUnit * num_pages_ / distance);
  }
  if (fitting_ + beyond_ < 4 * num_pages_ * kUnit) return;
  fitting_ /= 2;
  beyond_ /= 2;
}

// Not for a page or two that came back late, nor where as much of what is used fits.
bool ReuseHistory::is_looping() const {
  return 2 * beyond_ > 3 * fitting_ && beyond_ >= num_pages_ * kUnit / 16;
}

}  // namespace moorage
