// SPDX-License-Identifier: Apache-2.0
// Linear weights repacked for the CPU kernels. Does not know: models, files, instruction levels.
//
// A matrix is cut into panels of 16 rows and each panel into tiles of 32 columns. Inside a tile one
// 64-byte line holds, for each of the 16 rows (lanes), four consecutive columns of one byte (or two
// of bf16), so that a dot product broadcasts 4 bytes of the activation and never sums across lanes.
//
//   kQ4_1  320 bytes a tile: 4 lines of nibbles (line j: columns 4j.. low, 16 + 4j.. high),
//          then fp16 d[16], fp16 m[16]; value = q * d + m
//   kQ8_0  two tiles in 1088 bytes: 8 + 8 lines of (q + 128), then fp16 d[16], d[16] of both;
//          value = (byte - 128) * d; an odd last tile is paired with zeros
//   kBf16  1024 bytes a tile: 16 lines, line i holds columns 2i, 2i + 1 (also the layout of an AMX
//          B tile)
//
// Rows are padded to 16 with zero scales. Thread rule: immutable after packing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace moorage::cpu {

constexpr int kPanelRows = 16;
constexpr int kTileCols = 32;
constexpr int kQ4TileBytes = 320;
constexpr int kQ8PairBytes = 1088;
constexpr int kBf16TileBytes = 1024;

enum class WeightFormat : uint8_t { kQ4_1, kQ8_0, kBf16 };

WeightFormat format_of_name(const std::string& name);

// Page-aligned memory that asks for huge pages; zero-filled; handed out front to back.
class Arena {
 public:
  explicit Arena(size_t num_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns 64-byte aligned memory, or nullptr where the rest is too small.
  std::byte* take(size_t num_bytes);

 private:
  std::byte* data_ = nullptr;
  size_t mapped_bytes_ = 0;
  size_t used_bytes_ = 0;
};

// The arena that matrices packed one after another share, so that small ones do not each round up
// to a huge page. Every matrix keeps the arenas it lies in alive.
class ArenaChain {
 public:
  std::shared_ptr<Arena> arena_for(size_t num_bytes, std::byte** memory);

 private:
  std::shared_ptr<Arena> current_;
};

struct PackedMatrix {
  WeightFormat format = WeightFormat::kQ4_1;
  int num_rows = 0;
  int num_cols = 0;
  size_t panel_bytes = 0;
  std::byte* first = nullptr;
  std::shared_ptr<Arena> memory;

  int num_panels() const { return (num_rows + kPanelRows - 1) / kPanelRows; }
  int num_tiles() const { return num_cols / kTileCols; }
  const std::byte* panel(int index) const {
    return first + static_cast<size_t>(index) * panel_bytes;
  }
};

// Packs GGUF blocks (row-major, whole rows) or dense bf16 rows.
// Requires: num_cols % 32 == 0 and `source` holds num_rows whole rows; throws std::invalid_argument
// otherwise.
PackedMatrix pack_matrix(WeightFormat format, const std::byte* source, size_t source_bytes,
                         int num_rows, int num_cols, ArenaChain& chain);

// Writes the 32 values of one row (lane) of one tile.
void unpack_tile_row(WeightFormat format, const std::byte* panel, int tile, int lane, float* out);

// Writes one row's values, for embedding look-ups.
void unpack_row(const PackedMatrix& matrix, int row, float* out);

float half_to_float(uint16_t bits);
float bf16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);

}  // namespace moorage::cpu
