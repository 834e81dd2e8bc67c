// SPDX-License-Identifier: Apache-2.0
// What one step does, as contiguous arrays. T tokens, R rows (prefill rows first). A plan without
// rows is no step, but its page deltas count: they are due before those of the next one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/ids.h"
#include "prefix/page_hash.h"
#include "requests/states.h"

namespace moorage {

struct Admission {
  std::int64_t request_id;
  std::int32_t slot;
  std::int32_t prompt_len;  // after a retraction: prompt and output so far
  std::int32_t cached_l1;
  std::int32_t cached_l2;
  std::int32_t cached_l3;
  bool readmitted;
  bool remote;  // Bootstrapping: tokens from cached on, but the last, come from the other engine
};

struct Plan {
  std::int64_t step_id = -1;
  std::vector<std::int64_t> row_request_ids;          // [R]
  std::vector<std::int32_t> row_slots;                // [R]
  std::vector<std::int32_t> row_starts;               // [R]
  std::vector<std::int32_t> row_lens;                 // [R]
  std::vector<std::uint8_t> row_samples;              // [R]
  // [R] Tickets [first, end) of loads that fill pages the row reads, in the order of its pages:
  // before they are acked its results do not count. (-1, -1): all it reads is there.
  std::vector<std::array<std::int64_t, 2>> row_loads;
  std::vector<std::int32_t> input_ids;                // [T], -1: still on the device
  std::vector<std::int32_t> slot_mapping;             // [T]
  std::vector<std::array<std::int32_t, 3>> page_deltas;  // [D] (slot, index, page), no pair twice
  std::vector<std::array<std::int32_t, 3>> page_copies;  // [C] (source, target, tokens)
  std::vector<Admission> admissions;
  std::vector<std::int64_t> retracted;
  std::vector<std::array<std::int64_t, 6>> moves;  // [M] see Move
  std::vector<PageHash> move_hashes;               // [M]
  std::vector<std::int64_t> probe_ids;             // [P] see Probe
  std::vector<std::int32_t> probe_indptr;          // [P + 1], empty where P is 0
  std::vector<PageHash> probe_hashes;              // [probe_indptr[P]]

  void clear() {  // keeps the capacity: a step allocates nothing
    step_id = -1;
    row_request_ids.clear(), row_slots.clear(), row_starts.clear(), row_lens.clear();
    row_samples.clear(), row_loads.clear(), input_ids.clear(), slot_mapping.clear(), page_deltas.clear();
    page_copies.clear(), admissions.clear(), retracted.clear();
    moves.clear(), move_hashes.clear();
    probe_ids.clear(), probe_indptr.clear(), probe_hashes.clear();
  }
};

// Results of one step in the plan's row order, as views of the caller's memory.
struct StepResult {
  StepId step_id;
  std::int32_t num_rows;
  std::int32_t num_columns;          // K
  const std::int32_t* num_accepted;  // [R]
  const std::int32_t* token_ids;     // [R, K]
  const std::uint8_t* finished;      // [R]
  const std::uint8_t* failed;        // [R]
};

// KV for another engine to read: tokens [0, num_tokens) of a finished request, until SendDone.
struct Send {
  std::int64_t request_id;
  std::int32_t slot;
  std::int32_t num_tokens;
  std::vector<PageId> pages;
  std::vector<PageHash> page_hashes;  // of the full ones
};

struct EndedRequest {
  std::int64_t request_id;
  EndStatus status;
  std::string message;
  std::int32_t num_cached_tokens = 0;
  std::vector<PageHash> page_hashes;
};

}  // namespace moorage
