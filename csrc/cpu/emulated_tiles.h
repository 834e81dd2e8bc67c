// SPDX-License-Identifier: Apache-2.0
// AMX tile instructions in plain code, for tests of the AMX files on CPUs without them. Slow.
// Every tile is 16 rows of 64 bytes, as amx::begin() configures them.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moorage::cpu::amx {
namespace {

struct EmulatedTile {
  float f32[16][16];
};
inline thread_local EmulatedTile emulated_tiles[8];

inline void emulated_load(int tile, const void* from, size_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(emulated_tiles[tile].f32[row], static_cast<const char*>(from) + row * stride, 64);
  }
}

inline void emulated_store(int tile, void* to, size_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles[tile].f32[row], 64);
  }
}

inline float emulated_bf16(const EmulatedTile& tile, int row, int col) {
  uint16_t bits = 0;
  std::memcpy(&bits, reinterpret_cast<const char*>(tile.f32[row]) + 2 * col, 2);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0.0F;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline void emulated_dot(int to, int a, int b) {
  EmulatedTile& sum = emulated_tiles[to];
  for (int row = 0; row < 16; ++row) {
    for (int pair = 0; pair < 16; ++pair) {
      const float even = emulated_bf16(emulated_tiles[a], row, 2 * pair);
      const float odd = emulated_bf16(emulated_tiles[a], row, 2 * pair + 1);
      for (int col = 0; col < 16; ++col) {
        sum.f32[row][col] += even * emulated_bf16(emulated_tiles[b], pair, 2 * col);
        sum.f32[row][col] += odd * emulated_bf16(emulated_tiles[b], pair, 2 * col + 1);
      }
    }
  }
}

}  // namespace
}  // namespace moorage::cpu::amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) std::memset(&emulated_tiles[tile], 0, sizeof(EmulatedTile))
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(to, a, b) emulated_dot(to, a, b)
