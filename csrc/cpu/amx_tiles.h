// SPDX-License-Identifier: Apache-2.0
// Tile intrinsics with the compiler fences that gcc 12's own lack. Include only from AMX files.
#pragma once

#include <immintrin.h>

#include <cstdint>

#ifdef MOORAGE_EMULATE_AMX
#include "emulated_tiles.h"
#endif

namespace moorage::cpu::amx {
namespace {

// gcc 12 does not say that a tile load reads memory: without this, stores to a tile just written
// may sink below the load (and for the configuration all but 8 of its bytes are dropped: SIGILL).
inline void publish_stores() { __asm__ volatile("" ::: "memory"); }

// Two tiles of one side of a product. Strides: of a tile's rows in bytes, of a k step in elements.
struct Operand {
  const uint16_t* first;
  const uint16_t* second;
  long row_stride;
  long step;
};

// Tiles 0..3 (m0n0, m0n1, m1n0, m1n1) += a x b for one k step.
inline void multiply_step(const Operand& a, const Operand& b, int k) {
  _tile_loadd(4, a.first + k * a.step, a.row_stride);
  _tile_loadd(6, b.first + k * b.step, b.row_stride);
  _tile_loadd(7, b.second + k * b.step, b.row_stride);
  _tile_loadd(5, a.second + k * a.step, a.row_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

inline void zero_2x2() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Stores the tiles to c [m][n][16][16]; the second m tile only where it was multiplied.
inline void store_2x2(float* c, bool has_second) {
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  if (has_second) {
    _tile_stored(2, c + 512, 64);
    _tile_stored(3, c + 768, 64);
  }
  publish_stores();
}

}  // namespace
}  // namespace moorage::cpu::amx
