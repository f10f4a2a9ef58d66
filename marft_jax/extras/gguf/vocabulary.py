"""Fast tokenizers from the vocabularies of GGUF files.

Such a file has no ``tokenizer.json``, but its metadata suffices to build one. It only names the
rule that cuts text into words before the merges, so the known names are a table here. The
conversion of transformers differs: it ignores SmolLM's digits and Qwen's NFC, takes any unknown
name for GPT-2's, and drops leading spaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from marft_jax.errors import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, of the same numbers in GGUF and SentencePiece."""

_SPACE = "▁"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HEAD = r"[^\r\n\p{L}\p{N}]?"


class _Cut(NamedTuple):
    """A byte-level vocabulary's rule of cutting text into words.

    Attributes:
        regex: each match is a word; None is GPT-2's own.
        digits: every digit stands alone, first of all.
        nfc: text is normalised to Unicode's composed form.
        whole_words: a word that is in the vocabulary is taken before any merge.
    """

    regex: str | None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False


_LLAMA3 = _Cut(rf"{_CONTRACTIONS}|{_HEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}", whole_words=True)
_QWEN2 = _Cut(rf"{_CONTRACTIONS}|{_HEAD}\p{{L}}+|\p{{N}}|{_TAIL}", nfc=True)
_QWEN3_5 = _Cut(
    rf"{_CONTRACTIONS}|{_HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}|" + _TAIL.replace(r"\p{L}", r"\p{L}\p{M}"),
    nfc=True,
)


def _by_case(ending: str, digits: str) -> _Cut:
    """Words end where a capital follows a small letter."""
    words = rf"{_HEAD}[{_UPPER}]*[{_LOWER}]+{ending}|{_HEAD}[{_UPPER}]+[{_LOWER}]*{ending}"
    tail = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    return _Cut(rf"{words}|{digits}|{tail}", whole_words=True)


_CUTS = {
    "gpt-2": _Cut(None),
    "smollm": _Cut(None, digits=True),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "lfm2", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN3_5,
    "tekken": _by_case("", r"\p{N}"),
    "gpt-4o": _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),
}


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Tokenizer that a GGUF file's metadata describes.

    Raises:
        BadInput: a kind of vocabulary, or of cutting text into words, that is not known, by name.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens = get("model"), get("tokens")
    if kind not in ("gpt2", "llama", "gemma4") or not tokens:
        known = "supported: gpt2, llama, gemma4"
        raise BadInput(f"{source}: GGUF tokenizer model {kind!r} is not supported; {known}")
    types = get("token_type") or [NORMAL] * len(tokens)
    merges = [(left, right) for left, _, right in (x.partition(" ") for x in get("merges", []))]
    if kind == "gemma4":
        return _sentencepiece(tokens, merges, types, prefix=False)
    if kind == "llama":
        merges = _merges(tokens, get("scores") or [-float(i) for i in range(len(tokens))], types)
        return _sentencepiece(tokens, merges, types, bool(get("add_space_prefix", True)))
    if (cut := _CUTS.get(get("pre", "?"))) is None:
        known = f"supported: {', '.join(_CUTS)}"
        raise BadInput(f"{source}: GGUF pre-tokenizer {get('pre')!r} is not supported; {known}")
    return _byte_level(tokens, merges, types, cut)


def _sentencepiece(
    tokens: Sequence[str], merges: list[tuple[str, str]], types: Sequence[int], prefix: bool
) -> Tokenizer:
    """A tokenizer that cuts text as SentencePiece does with a BPE model of these tokens.

    Args:
        prefix: all text begins with a space that is not written.
    """
    unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
    ids = _ids(tokens, merges, types)
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types)
    )
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*back, *strip])
    _add_special(tokenizer, tokens, types)
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, best score of the third first."""
    ranked = {
        token: (-score, i)
        for i, (token, score, type_) in enumerate(zip(tokens, scores, types, strict=True))
        if type_ in (NORMAL, USER_DEFINED)
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(ranked, key=ranked.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranked and token[cut:] in ranked
    ]


def _byte_level(
    tokens: Sequence[str], merges: list[tuple[str, str]], types: Sequence[int], cut: _Cut
) -> Tokenizer:
    """GPT-2's kind: bytes spelled as printable characters, merged by an explicit list."""
    ids = _ids(tokens, merges, types)
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=cut.whole_words))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    steps += [pre_tokenizers.Split(Regex(cut.regex), "isolated")] if cut.regex else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, types)
    return tokenizer


def _ids(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], types: Sequence[int]
) -> dict[str, int]:
    """Ids of the tokens; llama.cpp fills rows without a token with unused names (``[PAD7]``)."""
    merged = {text for left, right in merges for text in (left, right, left + right)}
    pairs = enumerate(zip(tokens, types, strict=True))
    return {token: i for i, (token, kind) in pairs if kind != UNUSED or token in merged}


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are found in text before anything else; the special ones vanish in decoding."""
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    pairs = [pair for pair in zip(tokens, types, strict=True) if pair[1] in special]
    tokenizer.add_tokens(
        [AddedToken(token, special=special[kind], normalized=False) for token, kind in pairs]
    )
