// SPDX-License-Identifier: Apache-2.0
#include "core/sha256.h"

#include <gtest/gtest.h>

#include <string>

#include "prefix/page_hash.h"

namespace moorage {
namespace {

std::string hex(const Sha256::Digest& digest) {
  std::string out;
  for (const std::uint8_t byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string sha(const std::string& text) {
  return hex(Sha256().update(text.data(), text.size()).finish());
}

// The example digests of FIPS 180-2, appendix B.
TEST(Sha256, MatchesThePublishedExamples) {
  EXPECT_EQ(sha(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnHowTheInputIsCut) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += static_cast<char>('a' + i % 26);
  const std::string whole = sha(text);
  for (std::size_t cut = 0; cut <= text.size(); cut += 7) {
    Sha256 parts;
    parts.update(text.data(), cut).update(text.data() + cut, text.size() - cut);
    EXPECT_EQ(hex(parts.finish()), whole) << cut;
  }
}

TEST(PageHash, NamesDependOnNamespaceParentAndTokens) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4};
  const PageHash space = hash_namespace("model", "salt");
  const PageHash name = hash_page(space, kRootHash, tokens);
  EXPECT_EQ(name, hash_page(space, kRootHash, tokens));
  EXPECT_NE(name, hash_page(space, name, tokens));
  EXPECT_NE(name, hash_page(hash_namespace("model", "other"), kRootHash, tokens));
  EXPECT_NE(name, hash_page(space, kRootHash, std::vector<TokenId>{1, 2, 3, 5}));
}

TEST(PageHash, ALetterCannotMoveFromFingerprintToSalt) {
  EXPECT_NE(hash_namespace("ab", "c"), hash_namespace("a", "bc"));
}

}  // namespace
}  // namespace moorage
