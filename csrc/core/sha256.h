// SPDX-License-Identifier: Apache-2.0
// SHA-256, incremental. Source: FIPS 180-4.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moorage {

class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  Sha256();
  Sha256& update(const void* data, std::size_t num_bytes);
  Digest finish();  // the object may not be used afterwards

 private:
  std::array<std::uint32_t, 8> state_;
  std::array<std::uint8_t, 64> buffer_;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace moorage
