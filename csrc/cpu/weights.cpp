// SPDX-License-Identifier: Apache-2.0
#include "weights.h"

#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace moorage::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kQ4BlockBytes = 20;
constexpr int kQ8BlockBytes = 34;

size_t row_bytes(WeightFormat format, int num_cols) {
  const size_t blocks = static_cast<size_t>(num_cols) / kTileCols;
  switch (format) {
    case WeightFormat::kQ4_1:
      return blocks * kQ4BlockBytes;
    case WeightFormat::kQ8_0:
      return blocks * kQ8BlockBytes;
    case WeightFormat::kBf16:
      return static_cast<size_t>(num_cols) * 2;
  }
  return 0;
}

size_t bytes_of_panel(WeightFormat format, int num_cols) {
  const size_t tiles = static_cast<size_t>(num_cols) / kTileCols;
  switch (format) {
    case WeightFormat::kQ4_1:
      return tiles * kQ4TileBytes;
    case WeightFormat::kQ8_0:
      return (tiles + 1) / 2 * kQ8PairBytes;
    case WeightFormat::kBf16:
      return tiles * kBf16TileBytes;
  }
  return 0;
}

struct Place {
  std::byte* quants;  // the tile's lines
  std::byte* scales;  // the tile's fp16 d[16]
};

Place place_of(WeightFormat format, std::byte* panel, int tile) {
  if (format == WeightFormat::kQ4_1) {
    std::byte* start = panel + static_cast<size_t>(tile) * kQ4TileBytes;
    return {start, start + 256};
  }
  if (format == WeightFormat::kQ8_0) {
    std::byte* pair = panel + static_cast<size_t>(tile / 2) * kQ8PairBytes;
    return {pair + (tile % 2) * 512, pair + 1024 + (tile % 2) * 32};
  }
  return {panel + static_cast<size_t>(tile) * kBf16TileBytes, nullptr};
}

void pack_q4(const std::byte* block, Place place, int lane) {
  std::memcpy(place.scales + lane * 2, block, 2);
  std::memcpy(place.scales + 32 + lane * 2, block + 2, 2);
  // Byte i of the block holds elements i and 16 + i: lines j of the tile take bytes 4j .. 4j + 3.
  for (int line = 0; line < 4; ++line) {
    std::memcpy(place.quants + line * 64 + lane * 4, block + 4 + line * 4, 4);
  }
}

void pack_q8(const std::byte* block, Place place, int lane) {
  std::memcpy(place.scales + lane * 2, block, 2);
  for (int col = 0; col < kTileCols; ++col) {
    place.quants[(col / 4) * 64 + lane * 4 + col % 4] = block[2 + col] ^ std::byte{0x80};
  }
}

void pack_bf16(const std::byte* values, Place place, int lane) {
  for (int pair = 0; pair < kTileCols / 2; ++pair) {
    std::memcpy(place.quants + pair * 64 + lane * 4, values + pair * 4, 4);
  }
}

void pack_tile(WeightFormat format, const std::byte* row, int tile, Place place, int lane) {
  switch (format) {
    case WeightFormat::kQ4_1:
      pack_q4(row + static_cast<size_t>(tile) * kQ4BlockBytes, place, lane);
      return;
    case WeightFormat::kQ8_0:
      pack_q8(row + static_cast<size_t>(tile) * kQ8BlockBytes, place, lane);
      return;
    case WeightFormat::kBf16:
      pack_bf16(row + static_cast<size_t>(tile) * kTileCols * 2, place, lane);
      return;
  }
}

uint16_t load_u16(const std::byte* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return bits;
}

}  // namespace

WeightFormat format_of_name(const std::string& name) {
  if (name == "q4_1") return WeightFormat::kQ4_1;
  if (name == "q8_0") return WeightFormat::kQ8_0;
  if (name == "bf16") return WeightFormat::kBf16;
  throw std::invalid_argument("format: got '" + name + "'; allowed: q4_1, q8_0, bf16");
}

Arena::Arena(size_t num_bytes) {
  mapped_bytes_ = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (mapped_bytes_ == 0) mapped_bytes_ = kHugePage;
  void* memory = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // Only a hint: without huge pages everything works, with more TLB misses.
  (void)madvise(memory, mapped_bytes_, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(memory);
}

Arena::~Arena() { munmap(data_, mapped_bytes_); }

std::byte* Arena::take(size_t num_bytes) {
  const size_t rounded = (num_bytes + 63) / 64 * 64;
  if (used_bytes_ + rounded > mapped_bytes_) return nullptr;
  std::byte* memory = data_ + used_bytes_;
  used_bytes_ += rounded;
  return memory;
}

std::shared_ptr<Arena> ArenaChain::arena_for(size_t num_bytes, std::byte** memory) {
  constexpr size_t kArenaBytes = size_t{16} << 20;
  *memory = current_ ? current_->take(num_bytes) : nullptr;
  if (*memory == nullptr) {
    current_ = std::make_shared<Arena>(num_bytes > kArenaBytes ? num_bytes : kArenaBytes);
    *memory = current_->take(num_bytes);
  }
  return current_;
}

PackedMatrix pack_matrix(WeightFormat format, const std::byte* source, size_t source_bytes,
                         int num_rows, int num_cols, ArenaChain& chain) {
  if (num_rows <= 0 || num_cols <= 0 || num_cols % kTileCols != 0) {
    throw std::invalid_argument("num_cols: got " + std::to_string(num_cols) +
                                "; allowed: a positive multiple of 32");
  }
  const size_t stride = row_bytes(format, num_cols);
  if (source_bytes != stride * static_cast<size_t>(num_rows)) {
    throw std::invalid_argument("source: got " + std::to_string(source_bytes) +
                                " bytes; allowed: " + std::to_string(stride) + " a row");
  }
  PackedMatrix matrix;
  matrix.format = format;
  matrix.num_rows = num_rows;
  matrix.num_cols = num_cols;
  matrix.panel_bytes = bytes_of_panel(format, num_cols);
  const size_t panels = static_cast<size_t>(matrix.num_panels());
  matrix.memory = chain.arena_for(panels * matrix.panel_bytes, &matrix.first);
  for (int row = 0; row < num_rows; ++row) {
    std::byte* panel = matrix.first + static_cast<size_t>(row / kPanelRows) * matrix.panel_bytes;
    const std::byte* from = source + static_cast<size_t>(row) * stride;
    for (int tile = 0; tile < matrix.num_tiles(); ++tile) {
      pack_tile(format, from, tile, place_of(format, panel, tile), row % kPanelRows);
    }
  }
  return matrix;
}

void unpack_tile_row(WeightFormat format, const std::byte* panel, int tile, int lane, float* out) {
  const Place place = place_of(format, const_cast<std::byte*>(panel), tile);
  if (format == WeightFormat::kBf16) {
    for (int col = 0; col < kTileCols; ++col) {
      out[col] = bf16_to_float(load_u16(place.quants + (col / 2) * 64 + lane * 4 + col % 2 * 2));
    }
    return;
  }
  const float scale = half_to_float(load_u16(place.scales + lane * 2));
  if (format == WeightFormat::kQ8_0) {
    for (int col = 0; col < kTileCols; ++col) {
      const int byte = static_cast<int>(place.quants[(col / 4) * 64 + lane * 4 + col % 4]);
      out[col] = static_cast<float>(byte - 128) * scale;
    }
    return;
  }
  const float offset = half_to_float(load_u16(place.scales + 32 + lane * 2));
  for (int col = 0; col < kTileCols / 2; ++col) {
    const int byte = static_cast<int>(place.quants[(col / 4) * 64 + lane * 4 + col % 4]);
    out[col] = static_cast<float>(byte & 15) * scale + offset;
    out[col + 16] = static_cast<float>(byte >> 4) * scale + offset;
  }
}

void unpack_row(const PackedMatrix& matrix, int row, float* out) {
  const std::byte* panel = matrix.panel(row / kPanelRows);
  for (int tile = 0; tile < matrix.num_tiles(); ++tile) {
    unpack_tile_row(matrix.format, panel, tile, row % kPanelRows, out + tile * kTileCols);
  }
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 0xFFU : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace moorage::cpu
