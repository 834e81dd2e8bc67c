# SPDX-License-Identifier: Apache-2.0
"""The tokenizer against a naive BPE written here, transformers, and the reference prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.text.assets import TextAssets, load_text_assets
from engine.text.byte_alphabet import BYTE_OF_CHAR, CHAR_OF_BYTE
from engine.text.errors import TokenizerError
from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.tokenizer_builders import tokenizer_from_gguf
from engine.weights.errors import ModelNotFoundError
from engine.weights.gguf import open_gguf
from engine.weights.source import resolve_model
from tests.fakes.hf_text import FAMILIES, write_hf_text

_GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())
_GPT2_SPLIT = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_SAMPLES = [
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for i in range(10):\r\n\tprint(f'{i:03d}')\r\n",
    "   1\n  22\n\n   333 x4  y 5\t6",
    "caf\u00e9 na\u00efve \u4e2d\u6587\u5b57 \u0440\u0443\u0441",
    "\U0001f600\U0001f469\u200d\U0001f680",
    "a  b   c    d\u00a0e\u3000f",
    '{"k": [1, 2.5e-3, null], "s": "\\u00e9"}',
    "I'll don't we've she'd 'S",
    "\n\n\n\n",
    "   ",
    "",
]


@pytest.fixture(scope="module")
def smollm2() -> TextAssets:
    return load_text_assets("default")


@pytest.fixture(scope="module")
def ranks() -> dict[tuple[str, str], int]:
    merges = open_gguf(resolve_model("default").path).metadata["tokenizer.ggml.merges"]
    pairs = [merge.split(" ") for merge in merges]
    return {(left, right): rank for rank, (left, right) in enumerate(pairs)}


def _naive_bpe(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Digits apart, then the GPT-2 split, then the lowest-ranked merge until none is left."""
    out: list[str] = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in _GPT2_SPLIT.findall(part):
            symbols = [CHAR_OF_BYTE[byte] for byte in word.encode()]
            while len(symbols) > 1:
                pairs = list(zip(symbols, symbols[1:], strict=False))
                at = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], 1 << 30))
                if pairs[at] not in ranks:
                    break
                symbols[at : at + 2] = ["".join(pairs[at])]
            out += symbols
    return out


def _spell(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    return ["".join(CHAR_OF_BYTE[b] for b in tokenizer.token_bytes(i)) for i in ids]


@pytest.mark.parametrize("text", _SAMPLES)
def test_smollm2_splits_text_as_a_naive_bpe_does(
    smollm2: TextAssets, ranks: dict[tuple[str, str], int], text: str
) -> None:
    assert _spell(smollm2.tokenizer.encode(text), smollm2.tokenizer) == _naive_bpe(text, ranks)


_TRICKY = st.lists(
    st.sampled_from([" ", "  ", "\n", "\t", "1", "23", "a", "the", "'", "'s", "<|", "|>", "\u00e9"])
    | st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), max_size=6),
    max_size=12,
).map("".join)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=_TRICKY)
def test_any_printable_text_round_trips_and_equals_the_naive_bpe(
    smollm2: TextAssets, ranks: dict[tuple[str, str], int], text: str
) -> None:
    ids = smollm2.tokenizer.encode(text)
    if set(text.encode()) & smollm2.tokenizer.missing_bytes():
        return
    assert smollm2.tokenizer.decode(ids) == text
    assert _spell(ids, smollm2.tokenizer) == _naive_bpe(text, ranks)


@pytest.mark.parametrize("prompt", _GOLDEN["prompts"][:2], ids=lambda p: p["name"])
def test_reference_prompts_tokenise_to_the_reference_ids(
    smollm2: TextAssets, prompt: dict[str, object]
) -> None:
    ids = smollm2.chat_template.render(prompt["messages"], add_generation_prompt=True)
    assert ids == prompt["prompt_ids"]


def test_the_long_reference_prompt_differs_by_the_digit_rule_alone(smollm2: TextAssets) -> None:
    """Its ids were made without splitting digits off first; see the naive BPE for ours."""
    prompt = _GOLDEN["prompts"][2]
    assert (
        smollm2.tokenizer.decode(prompt["prompt_ids"], with_control=True) == (prompt["prompt_text"])
    )
    metadata = open_gguf(resolve_model("default").path).metadata
    without_digits = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"}, 49152)
    assert without_digits.encode_with_control(prompt["prompt_text"]) == prompt["prompt_ids"]


def test_the_packaged_model_has_the_documented_ids(smollm2: TextAssets) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.max_context_len == 8192
    assert smollm2.eos_ids == (2,)
    assert smollm2.control_token_ids == tuple(range(17))
    assert smollm2.tokenizer.token_id("<|im_start|>") == 1
    assert smollm2.tool_format == "smollm2"
    assert smollm2.tokenizer.bos_id is None
    assert len(smollm2.token_bytes) == 49152
    assert set(smollm2.token_bytes[:17]) == {b""}
    assert smollm2.tokenizer.token_bytes(1, with_control=True) == b"<|im_start|>"


def test_text_of_a_control_token_is_encoded_as_text(smollm2: TextAssets) -> None:
    tokenizer = smollm2.tokenizer
    for text in tokenizer.added_tokens:
        ids = tokenizer.encode(f"a{text}b")
        assert not set(ids) & tokenizer.control_ids
        assert tokenizer.decode(ids) == f"a{text}b"
        assert tokenizer.encode_with_control(text) == [tokenizer.added_tokens[text].token_id]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(st.sampled_from(["<|im_", "start|>", "end|>", "<|", "|>", "<", "x"])))
def test_no_text_encodes_to_a_control_token(smollm2: TextAssets, parts: list[str]) -> None:
    text = "".join(parts)
    ids = smollm2.tokenizer.encode(text)
    assert not set(ids) & smollm2.tokenizer.control_ids
    assert smollm2.tokenizer.decode(ids) == text


def test_control_tokens_decode_to_nothing_unless_asked(smollm2: TextAssets) -> None:
    tokenizer = smollm2.tokenizer
    ids = [1, *tokenizer.encode("hi"), 2]
    assert tokenizer.decode_bytes(ids) == b"hi"
    assert tokenizer.decode_bytes(ids, with_control=True) == b"<|im_start|>hi<|im_end|>"


def test_lone_surrogates_become_replacement_characters(smollm2: TextAssets) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("a\ud83d\ude00b")) == "a\U0001f600b"


def test_bytes_without_a_token_are_left_out_and_known(smollm2: TextAssets) -> None:
    assert smollm2.tokenizer.missing_bytes() == {
        *(4, 6, 19, 20, 22, 29, 192, 193, 241, 242),
        *range(245, 256),
    }
    assert smollm2.tokenizer.encode("a\x04b") == [
        *smollm2.tokenizer.encode("a"),
        *smollm2.tokenizer.encode("b"),
    ]


@pytest.mark.parametrize("token_id", [-1, 49152])
def test_an_id_outside_the_vocabulary_is_refused(smollm2: TextAssets, token_id: int) -> None:
    with pytest.raises(IndexError):
        smollm2.tokenizer.token_bytes(token_id)


def test_the_byte_alphabet_is_a_bijection() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert all(BYTE_OF_CHAR[char] == byte for byte, char in CHAR_OF_BYTE.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hugging_face_tokenizer_equals_transformers(tmp_path: Path, family: str) -> None:
    directory = write_hf_text(tmp_path / family, family)
    reference = AutoTokenizer.from_pretrained(directory)
    tokenizer = load_text_assets(str(directory)).tokenizer
    for text in _SAMPLES:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == expected
        assert tokenizer.encode_with_control(text) == expected
    for token in tokenizer.added_tokens:
        text = f"x {token}\n{token}{token} y"
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_with_control(text) == expected


def test_added_tokens_eat_blanks_as_their_flags_say(smollm2: TextAssets) -> None:
    plain = smollm2.tokenizer
    eager = AddedToken(token_id=3, text="<x>", eats_space_before=True, eats_space_after=True)
    tokenizer = Tokenizer(plain._plain, [eager], vocab_size=49152)
    assert tokenizer.encode_with_control("a \n<x>  b") == [
        *plain.encode("a"),
        3,
        *plain.encode("b"),
    ]


def test_markup_tokens_are_text_but_never_come_from_text(tmp_path: Path) -> None:
    tokenizer = load_text_assets(str(write_hf_text(tmp_path, "hermes_like"))).tokenizer
    call = tokenizer.token_id("<tool_call>")
    assert call in tokenizer.markup_ids
    assert call not in tokenizer.encode("<tool_call>")
    assert tokenizer.decode([call]) == "<tool_call>"


def test_a_prompt_begins_with_bos_where_the_post_processor_adds_it(tmp_path: Path) -> None:
    directory = write_hf_text(tmp_path, "llama_like")
    path = directory / "tokenizer.json"
    spec = json.loads(path.read_text())
    bos = "<|begin_of_text|>"
    ids = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }
    path.write_text(json.dumps(spec))
    tokenizer = load_text_assets(str(directory)).tokenizer
    expected = AutoTokenizer.from_pretrained(directory)("hello")["input_ids"]
    assert tokenizer.encode_prompt("hello") == expected
    assert expected[0] == ids[bos]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("gpt-2", [" x", "  ", " 12345", "\n", "\n", "I", "'ll"]),
        ("smollm", [" x", "   ", "1", "2", "3", "4", "5", "\n", "\n", "I", "'ll"]),
        ("llama-bpe", [" x", "  ", " ", "123", "45", "\n\n", "I", "'ll"]),
        ("qwen2", [" x", "  ", " ", "1", "2", "3", "4", "5", "\n\n", "I", "'ll"]),
    ],
)
def test_gguf_splitting_rules_cut_as_their_families_do(rules: str, expected: list[str]) -> None:
    """Every stretch the rules cut out is a token here, so the ids show the cuts."""
    pieces = ["".join(CHAR_OF_BYTE[b] for b in piece.encode()) for piece in expected]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rules,
        **_whole_word_vocabulary(pieces),
    }
    tokenizer = tokenizer_from_gguf(metadata, 4096)
    ids = tokenizer.encode(" x   12345\n\nI'll")
    assert [tokenizer.token_bytes(i).decode() for i in ids] == expected


def _whole_word_vocabulary(pieces: list[str]) -> dict[str, object]:
    """Bytes, the pieces, and merges that build each piece from the left."""
    tokens = list(CHAR_OF_BYTE.values())
    merges: list[str] = []
    for piece in pieces:
        for size in range(2, len(piece) + 1):
            if piece[:size] not in tokens:
                tokens.append(piece[:size])
                merges.append(f"{piece[: size - 1]} {piece[size - 1]}")
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"tokenizer.ggml.pre": "falcon"}, "supported: default, gpt-2, llama-bpe, qwen2, smollm"),
    ],
)
def test_a_gguf_tokenizer_we_lack_is_refused(change: dict[str, str], said: str) -> None:
    metadata = open_gguf(resolve_model("default").path).metadata
    with pytest.raises(TokenizerError, match=said):
        tokenizer_from_gguf({**metadata, **change}, 49152)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    metadata = open_gguf(resolve_model("default").path).metadata
    with pytest.raises(TokenizerError, match="the model 49000 rows"):
        tokenizer_from_gguf(metadata, 49000)


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    directory = write_hf_text(tmp_path, "chatml")
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not JSON"):
        load_text_assets(str(directory))


@pytest.mark.parametrize("model", ["/nowhere/model.gguf", "smolm2"])
def test_a_missing_model_is_one_clear_error(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"'{model}'.*allowed: 'smollm2'"):
        load_text_assets(model)


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_text_assets(str(tmp_path))


def test_the_fingerprint_follows_template_and_tokenizer(tmp_path: Path) -> None:
    directory = write_hf_text(tmp_path, "chatml")
    first = load_text_assets(str(directory)).fingerprint
    assert load_text_assets(str(directory)).fingerprint == first
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert load_text_assets(str(directory)).fingerprint != first


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    directory = write_hf_text(tmp_path, "chatml")
    (directory / "model.safetensors").write_bytes(bytes(100_000))
    first = load_text_assets(str(directory)).fingerprint
    (directory / "model.safetensors").write_bytes(bytes(99_999) + b"\x01")
    assert load_text_assets(str(directory)).fingerprint != first


def test_text_assets_load_without_torch() -> None:
    code = (
        "import sys; from engine.text.assets import load_text_assets; load_text_assets('default');"
        "print([m for m in ('torch', 'transformers', 'llama_cpp') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
