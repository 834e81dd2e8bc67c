// SPDX-License-Identifier: Apache-2.0
#include "prefix/page_hash.h"

#include <bit>
#include <cstring>

#include "core/sha256.h"

namespace moorage {
namespace {

static_assert(std::endian::native == std::endian::little, "token bytes are hashed as they lie");

PageHash cut(const Sha256::Digest& digest) {
  PageHash hash;
  std::memcpy(hash.data(), digest.data(), hash.size());
  return hash;
}

}  // namespace

PageHash hash_namespace(const std::string& model_fingerprint, const std::string& salt) {
  const auto length = static_cast<std::uint32_t>(model_fingerprint.size());
  Sha256 sha;
  sha.update(&length, sizeof(length));
  sha.update(model_fingerprint.data(), model_fingerprint.size());
  sha.update(salt.data(), salt.size());
  return cut(sha.finish());
}

PageHash hash_page(const PageHash& space, const PageHash& parent, TokenSpan tokens) {
  Sha256 sha;
  sha.update(space.data(), space.size());
  sha.update(parent.data(), parent.size());
  sha.update(tokens.data(), tokens.size_bytes());
  return cut(sha.finish());
}

}  // namespace moorage
