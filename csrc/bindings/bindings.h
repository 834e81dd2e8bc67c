// SPDX-License-Identifier: Apache-2.0
// What the binding files share. Only value types cross: nothing here owns a page.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <span>
#include <vector>

#include "core/token_span.h"
#include "prefix/page_hash.h"

namespace moorage {

namespace nb = nanobind;

template <class T>
using InArray1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using InArray2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutArray = nb::ndarray<nb::numpy, const T, nb::c_contig>;

inline TokenSpan as_tokens(const InArray1<TokenId>& array) {
  return {array.data(), array.shape(0)};
}

// A view of `values`, which belong to the object `self`; the array keeps that object.
template <class T>
OutArray<T> view(nb::handle self, const std::vector<T>& values) {
  const std::size_t shape[] = {values.size()};
  return OutArray<T>(values.data(), 1, shape, self);
}

inline OutArray<TokenId> view(nb::handle self, TokenSpan tokens) {
  const std::size_t shape[] = {tokens.size()};
  return OutArray<TokenId>(tokens.data(), 1, shape, self);
}

inline nb::bytes as_bytes(const PageHash& hash) {
  return nb::bytes(reinterpret_cast<const char*>(hash.data()), hash.size());
}

void bind_inputs(nb::module_& module);
void bind_outputs(nb::module_& module);
void bind_scheduler(nb::module_& module);

}  // namespace moorage
