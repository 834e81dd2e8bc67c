// SPDX-License-Identifier: Apache-2.0
// The Python face of `_cpu_kernels`: contiguous arrays in and out, the GIL released while it works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "llama.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moorage::cpu {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = Vector<const int32_t>;
using Floats = Vector<const float>;
using Bytes = Vector<const uint8_t>;

std::vector<float> copy_of(const Floats& from) {
  return std::vector<float>(from.data(), from.data() + from.size());
}

int length(const Ints& array) { return static_cast<int>(array.shape(0)); }

PackedMatrix pack(const std::string& format, Bytes source, int num_rows, int num_cols,
                  ArenaChain& chain) {
  const auto* bytes = reinterpret_cast<const std::byte*>(source.data());
  nb::gil_scoped_release unlocked;
  return pack_matrix(format_of_name(format), bytes, source.size(), num_rows, num_cols, chain);
}

LlamaLayer make_layer(Floats input_norm, const PackedMatrix& qkv, const PackedMatrix& attn_out,
                      Floats post_norm, const PackedMatrix& gate_up, const PackedMatrix& down,
                      Floats qkv_bias, Floats q_norm, Floats k_norm) {
  HeadExtras extras{copy_of(qkv_bias), copy_of(q_norm), copy_of(k_norm)};
  return {copy_of(input_norm), copy_of(post_norm), std::move(extras), qkv, attn_out, gate_up, down};
}

LlamaWeights make_weights(const LlamaConfig& config, const PackedMatrix& embedding,
                          const PackedMatrix& lm_head, const std::vector<LlamaLayer>& layers,
                          Floats final_norm, Matrix<const float> cos_sin) {
  LlamaWeights weights;
  weights.config = config;
  weights.embedding = embedding;
  weights.lm_head = lm_head;
  weights.layers = layers;
  weights.final_norm = copy_of(final_norm);
  weights.cos_sin.assign(cos_sin.data(), cos_sin.data() + cos_sin.size());
  weights.max_positions = static_cast<int>(cos_sin.shape(0));
  for (const LlamaLayer& layer : layers) {
    if (layer.input_norm.size() != static_cast<size_t>(config.hidden) ||
        layer.post_norm.size() != static_cast<size_t>(config.hidden)) {
      throw std::invalid_argument("layers: a norm's length differs from hidden");
    }
  }
  return weights;
}

void forward(LlamaModel& model, Ints input_ids, Ints positions, Ints slot_mapping, Ints row_indptr,
             Ints row_slots, Ints seq_lens, Matrix<const int32_t> page_table, Vector<int16_t> pool,
             int page_size, Ints sample_rows, Matrix<float> logits, const std::string& level) {
  const LlamaConfig& c = model.config();
  LlamaStep step;
  step.level = level_of_name(level);
  step.num_tokens = length(input_ids);
  step.num_rows = length(row_slots);
  step.num_samples = length(sample_rows);
  step.num_slots = static_cast<int>(page_table.shape(0));
  step.pages_per_slot = static_cast<int>(page_table.shape(1));
  if (length(positions) != step.num_tokens || length(slot_mapping) != step.num_tokens ||
      length(row_indptr) != step.num_rows + 1 || length(seq_lens) != step.num_rows ||
      static_cast<int>(logits.shape(0)) != step.num_samples ||
      static_cast<int>(logits.shape(1)) != c.vocab) {
    throw std::invalid_argument("step: array lengths disagree");
  }
  step.input_ids = input_ids.data();
  step.positions = positions.data();
  step.slot_mapping = slot_mapping.data();
  step.row_indptr = row_indptr.data();
  step.row_slots = row_slots.data();
  step.seq_lens = seq_lens.data();
  step.page_table = page_table.data();
  step.sample_rows = sample_rows.data();
  step.logits = logits.data();
  const PoolStrides strides(c, page_size);
  if (page_size <= 0 || strides.page == 0 || pool.size() % strides.page != 0) {
    throw std::invalid_argument("kv_pool: not a whole number of pages");
  }
  step.pool = {reinterpret_cast<uint16_t*>(pool.data()),
               static_cast<int>(pool.size() / strides.page), page_size};
  nb::gil_scoped_release unlocked;
  model.forward(step);
}

void bind_linear(const PackedMatrix& matrix, Matrix<const float> x, Matrix<float> out,
                 const std::string& level) {
  const CpuLevel chosen = level_of_name(level);
  if (static_cast<int>(x.shape(1)) != matrix.num_cols || x.shape(0) != out.shape(0) ||
      static_cast<int>(out.shape(1)) != matrix.num_rows) {
    throw std::invalid_argument("linear: shapes disagree");
  }
  const int num_tokens = static_cast<int>(x.shape(0));
  nb::gil_scoped_release unlocked;
  linear(matrix, x.data(), num_tokens, out.data(), chosen, *global_pool());
}

void bind_argmax(Matrix<const float> logits, Vector<int32_t> out, const std::string& level) {
  const CpuLevel chosen = level_of_name(level);
  if (logits.shape(0) != out.shape(0)) throw std::invalid_argument("argmax: shapes disagree");
  const int rows = static_cast<int>(logits.shape(0));
  const int cols = static_cast<int>(logits.shape(1));
  nb::gil_scoped_release unlocked;
  argmax_rows(logits.data(), rows, cols, out.data(), chosen, *global_pool());
}

void bind_bitmask(Matrix<float> logits, Matrix<const int32_t> mask, const std::string& level) {
  const CpuLevel chosen = level_of_name(level);
  const int rows = static_cast<int>(logits.shape(0));
  const int cols = static_cast<int>(logits.shape(1));
  if (mask.shape(0) != logits.shape(0) || static_cast<int>(mask.shape(1)) != (cols + 31) / 32) {
    throw std::invalid_argument("apply_bitmask: shapes disagree");
  }
  nb::gil_scoped_release unlocked;
  mask_rows(logits.data(), mask.data(), rows, cols, chosen, *global_pool());
}

void expect_index(const char* field, int value, int limit) {
  if (value >= 0 && value < limit) return;
  throw std::invalid_argument(std::string(field) + ": got " + std::to_string(value) +
                              "; allowed: 0 to " + std::to_string(limit - 1));
}

void check_rows(const AttentionCall& call, int num_tokens, int num_slots, int num_pages) {
  if (call.row_indptr[0] != 0 || call.row_indptr[call.num_rows] != num_tokens) {
    throw std::invalid_argument("row_indptr: allowed: from 0 to the number of tokens");
  }
  for (int row = 0; row < call.num_rows; ++row) {
    expect_index("row_slots", call.row_slots[row], num_slots);
    const int num_new = call.row_indptr[row + 1] - call.row_indptr[row];
    const int seq_len = call.seq_lens[row];
    if (num_new < 0 || seq_len < num_new || seq_len > call.pages_per_slot * call.kv.page_size) {
      throw std::invalid_argument("seq_lens: got " + std::to_string(seq_len) +
                                  "; allowed: at least the row's new tokens, at most its pages");
    }
    const int32_t* pages =
        call.page_table + static_cast<size_t>(call.row_slots[row]) * call.pages_per_slot;
    for (int page = 0; page * call.kv.page_size < seq_len; ++page) {
      expect_index("page_table", pages[page], num_pages);
    }
  }
}

// kv: [num_pages, 2, page_size, num_kv_heads, D], a layer of the pool: only the pages are strided.
void bind_attention(nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu> query,
                    nb::ndarray<int16_t, nb::ndim<5>, nb::device::cpu> kv,
                    Matrix<const int32_t> page_table, Ints row_slots, Ints row_indptr,
                    Ints seq_lens, float scale,
                    nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu> out,
                    const std::string& level) {
  const CpuLevel chosen = level_of_name(level);
  AttentionCall call;
  call.kv.base = reinterpret_cast<uint16_t*>(kv.data());
  call.kv.page_stride = static_cast<size_t>(kv.stride(0));
  call.kv.value_offset = static_cast<size_t>(kv.stride(1));
  call.kv.page_size = static_cast<int>(kv.shape(2));
  call.kv.num_kv_heads = static_cast<int>(kv.shape(3));
  call.kv.head_dim = static_cast<int>(kv.shape(4));
  const auto token_stride = static_cast<int64_t>(call.kv.token_stride());
  if (kv.stride(4) != 1 || kv.stride(3) != call.kv.head_dim || kv.stride(2) != token_stride) {
    throw std::invalid_argument("kv_pool_layer: the heads of a token are not contiguous");
  }
  if (call.kv.head_dim % 32 != 0 || call.kv.head_dim > 256) {
    throw std::invalid_argument("head_dim: allowed: 32, 64, ... 256");
  }
  if (query.shape(1) > kMaxAttendHeads) {
    throw std::invalid_argument("q: allowed: at most 128 heads");
  }
  call.query = query.data();
  call.out = out.data();
  call.num_rows = length(row_slots);
  call.group = static_cast<int>(query.shape(1)) / call.kv.num_kv_heads;
  call.pages_per_slot = static_cast<int>(page_table.shape(1));
  call.page_table = page_table.data();
  call.row_slots = row_slots.data();
  call.row_indptr = row_indptr.data();
  call.seq_lens = seq_lens.data();
  call.scale = scale;
  check_rows(call, static_cast<int>(query.shape(0)), static_cast<int>(page_table.shape(0)),
             static_cast<int>(kv.shape(0)));
  nb::gil_scoped_release unlocked;
  paged_attention(call, chosen, *global_pool());
}

// pool: [num_pages, num_planes, page_size, token bytes], planes = layers x (K, V).
void bind_copy_pages(nb::ndarray<uint8_t, nb::ndim<4>, nb::c_contig, nb::device::cpu> pool,
                     Matrix<const int32_t> copies) {
  PageCopyCall call;
  call.pool = reinterpret_cast<std::byte*>(pool.data());
  call.copies = copies.data();
  call.num_copies = static_cast<int>(copies.shape(0));
  call.num_planes = static_cast<int>(pool.shape(1));
  call.token_bytes = pool.shape(3);
  call.plane_bytes = pool.shape(2) * pool.shape(3);
  for (int i = 0; i < call.num_copies; ++i) {
    expect_index("copies: source page", call.copies[i * 3], static_cast<int>(pool.shape(0)));
    expect_index("copies: target page", call.copies[i * 3 + 1], static_cast<int>(pool.shape(0)));
    expect_index("copies: tokens", call.copies[i * 3 + 2], static_cast<int>(pool.shape(2)) + 1);
  }
  nb::gil_scoped_release unlocked;
  copy_pages(call);
}

}  // namespace
}  // namespace moorage::cpu

NB_MODULE(_cpu_kernels, m) {
  namespace mc = moorage::cpu;
  m.doc() = "CPU kernels: portable, AVX-512 and AMX, chosen at run time.";
  m.def("available_levels", &mc::available_levels);
  m.def("num_threads", &mc::num_threads);
  m.def("set_num_threads", &mc::set_num_threads, "num_threads"_a);

  nb::class_<mc::ArenaChain>(m, "ArenaChain").def(nb::init<>());
  nb::class_<mc::PackedMatrix>(m, "PackedMatrix")
      .def_ro("num_rows", &mc::PackedMatrix::num_rows)
      .def_ro("num_cols", &mc::PackedMatrix::num_cols);
  m.def("pack", &mc::pack, "format"_a, "source"_a, "num_rows"_a, "num_cols"_a, "chain"_a);
  m.def("linear", &mc::bind_linear, "matrix"_a, "x"_a, "out"_a, "level"_a);
  m.def("argmax", &mc::bind_argmax, "logits"_a, "out"_a, "level"_a);
  m.def("apply_bitmask", &mc::bind_bitmask, "logits"_a, "mask"_a, "level"_a);
  m.def("paged_attention", &mc::bind_attention, "query"_a, "kv"_a, "page_table"_a, "row_slots"_a,
        "row_indptr"_a, "seq_lens"_a, "scale"_a, "out"_a, "level"_a);
  m.def("copy_pages", &mc::bind_copy_pages, "pool"_a, "copies"_a);

  nb::class_<mc::LlamaConfig>(m, "LlamaConfig")
      .def("__init__",
           [](mc::LlamaConfig* self, int num_layers, int hidden, int ffn, int num_heads,
              int num_kv_heads, int head_dim, int vocab, float rms_eps) {
             new (self) mc::LlamaConfig{num_layers,   hidden,   ffn,   num_heads,
                                        num_kv_heads, head_dim, vocab, rms_eps};
           },
           "num_layers"_a, "hidden"_a, "ffn"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
           "vocab"_a, "rms_eps"_a);
  nb::class_<mc::LlamaLayer>(m, "LlamaLayer");
  m.def("make_layer", &mc::make_layer, "input_norm"_a, "qkv"_a, "attn_out"_a, "post_norm"_a,
        "gate_up"_a, "down"_a, "qkv_bias"_a, "q_norm"_a, "k_norm"_a);
  nb::class_<mc::LlamaModel>(m, "LlamaModel")
      .def("__init__",
           [](mc::LlamaModel* self, const mc::LlamaConfig& config,
              const mc::PackedMatrix& embedding, const mc::PackedMatrix& lm_head,
              const std::vector<mc::LlamaLayer>& layers, mc::Floats final_norm,
              mc::Matrix<const float> cos_sin) {
             new (self) mc::LlamaModel(
                 mc::make_weights(config, embedding, lm_head, layers, final_norm, cos_sin));
           },
           "config"_a, "embedding"_a, "lm_head"_a, "layers"_a, "final_norm"_a, "cos_sin"_a)
      .def("forward", &mc::forward, "input_ids"_a, "positions"_a, "slot_mapping"_a,
           "row_indptr"_a, "row_slots"_a, "seq_lens"_a, "page_table"_a, "pool"_a, "page_size"_a,
           "sample_rows"_a, "logits"_a, "level"_a);
}
