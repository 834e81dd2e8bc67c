// SPDX-License-Identifier: Apache-2.0
// bf16 matrix tiles on AMX: linears and attention of many tokens at once.
// Does not know: models, threads, Python.
//
// Activations lie in A tiles: token t, column c is element (t % 16) * 32 + c % 32 of tile
// (t / 16) * k_tiles + c / 32, 512 elements (1 KB) a tile. Rows of the last tile beyond the tokens
// hold anything; they only ever reach their own rows of a product.
//
// Thread rule: begin() once per thread before any other function here, end() after the last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace moorage::cpu::amx {

constexpr int kTileRows = 16;
constexpr int kTileElements = 512;
constexpr int kChunkTiles = 18;     // columns of a weight chunk / 32: two panels fill most of an L1
constexpr int kBlockQueries = 32;   // query tokens of one attention item
constexpr int kBlockKeys = 128;     // keys of one softmax step
constexpr int kMaxHeadDim = 256;

inline size_t tile_index(int token, int column, int num_cols) {
  const size_t tile = static_cast<size_t>(token / kTileRows) * (num_cols / kTileCols) +
                      static_cast<size_t>(column / kTileCols);
  return tile * kTileElements + static_cast<size_t>(token % kTileRows * kTileCols) +
         static_cast<size_t>(column % kTileCols);
}

void begin();
void end();

// Writes token `token` of A tiles from x [cols].
void pack_row(const float* x, int cols, uint16_t* tiles, int token);

// Two 16-row panels of a matrix times all tokens.
struct PairProduct {
  const PackedMatrix* matrix = nullptr;
  int panels[2] = {0, 0};
  const uint16_t* tokens = nullptr;  // A tiles
  int num_tokens = 0;
  uint16_t* scratch = nullptr;       // scratch_elements()
  bool sums_chunks = false;  // the target adds: columns may be taken in chunks that fit the L1
};
size_t scratch_elements(int num_cols, bool sums_chunks);

// residual [tokens, hidden] += the product.
struct AddTarget {
  float* residual = nullptr;
  int hidden = 0;
  int panels[2] = {0, 0};
};
void product_add(const PairProduct& product, const AddTarget& target);

// A tiles [tokens, ffn] = silu(panel 0) * panel 1, columns [column, column + 16).
struct SwigluTarget {
  uint16_t* tiles = nullptr;
  int k_tiles = 0;
  int column = 0;
};
void product_swiglu(const PairProduct& product, const SwigluTarget& target);

// Panel 0 holds dims [dim, dim + 16) of a head, panel 1 the same D/2 further on: rope pairs.
// Token t goes to rows[t] + offset in bf16, scaled; no rope where `cos_sin` is null.
struct HeadTarget {
  const float* cos_sin = nullptr;        // [max_positions, D]
  const int32_t* positions = nullptr;    // [tokens]
  uint16_t* const* rows = nullptr;       // [tokens]
  size_t offset = 0;
  int head_dim = 0;
  int dim = 0;
  float scale = 1.0F;
};
void product_head(const PairProduct& product, const HeadTarget& target);

// out fp32 [tokens, num_cols], columns [column, column + 32) as far as there are any.
struct StoreTarget {
  float* out = nullptr;
  int num_cols = 0;
  int column = 0;
};
void product_store(const PairProduct& product, const StoreTarget& target);

// One row's K and V of one KV head, repacked as B tiles; `keys` [padded / 16][D / 32] tiles,
// `values` [padded / 32][D / 16] tiles.
struct PackedKeys {
  uint16_t* keys = nullptr;
  uint16_t* values = nullptr;
};
// Packs tokens [begin, begin + 32); those from seq_len on become zeros. begin % 32 == 0.
void pack_keys(const KvLayer& kv, const int32_t* pages, int kv_head, int begin, int seq_len,
               const PackedKeys& out);

// Up to 32 query tokens of one row and one head against the row's keys.
struct AttendBlock {
  const uint16_t* query = nullptr;  // [tokens][D], 32 rows may be read
  int head_dim = 0;
  int num_queries = 0;
  int first_position = 0;           // index in the row's keys of the first query token
  PackedKeys kv;
  uint16_t* out = nullptr;          // A tiles [tokens, heads * D]
  int out_k_tiles = 0;
  int out_token = 0;                // of the first query
  int out_head = 0;
};
void attend_block(const AttendBlock& block);

}  // namespace moorage::cpu::amx
