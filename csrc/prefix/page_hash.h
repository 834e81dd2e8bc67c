// SPDX-License-Identifier: Apache-2.0
// The chained name of a full page: SHA-256 over namespace, parent's name and tokens, cut to 128
// bits. Computed here only; it names the page in KV events and in the store.
#pragma once

#include <array>
#include <string>

#include "core/token_span.h"

namespace moorage {

using PageHash = std::array<std::uint8_t, 16>;

inline constexpr PageHash kRootHash{};  // parent of a namespace's first page

// sha256(u32le length of the fingerprint | fingerprint | salt)[:16]
PageHash hash_namespace(const std::string& model_fingerprint, const std::string& salt);

// sha256(namespace | parent | tokens as int32le)[:16]
PageHash hash_page(const PageHash& space, const PageHash& parent, TokenSpan tokens);

}  // namespace moorage
