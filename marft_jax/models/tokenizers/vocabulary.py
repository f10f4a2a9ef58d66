"""Fast tokenizers out of bare vocabularies: GGUF metadata and SentencePiece models.

Neither format carries a ``tokenizer.json``; what they say suffices to build one. How text is cut
before the merges is only named in a GGUF file, so the known names are a table here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from marft_jax.config import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, numbered alike in GGUF and SentencePiece."""

_SPACE = "▁"
_LONGEST = 2000
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HEAD = r"[^\r\n\p{L}\p{N}]?"


class _Cut(NamedTuple):
    """How a byte-level vocabulary cuts text into words.

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
_TEKKEN = _Cut(
    rf"{_HEAD}[{_UPPER}]*[{_LOWER}]+|{_HEAD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}|"
    + _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1),
    whole_words=True,
)
_CUTS = {
    "gpt-2": _Cut(None),
    "smollm": _Cut(None, digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


class Pieces(NamedTuple):
    """A SentencePiece vocabulary.

    Attributes:
        tokens, scores, types: of every id.
        unigram: segmented by a unigram model, not by merges.
        prefix: text begins with a space that is not written.
        every_segment: so does the text after a special token.
        collapse: runs of spaces count as one, those at the ends not at all.
        charsmap: SentencePiece's compiled Unicode normalisation; empty is none.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unigram: bool = False
    prefix: bool = True
    every_segment: bool = True
    collapse: bool = False
    charsmap: bytes = b""


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
        BadInput: a kind of vocabulary, or of cutting text into words, that is not known, by name.
    """

    def get(key: str, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens = get("model"), get("tokens")
    _check_tokens(tokens or ())
    if kind not in ("gpt2", "llama") or not tokens:
        raise BadInput(
            f"{source}: GGUF tokenizer model {kind!r} is not supported; supported: gpt2, llama"
        )
    types = get("token_type") or [NORMAL] * len(tokens)
    if kind == "llama":
        scores = get("scores") or [-float(i) for i in range(len(tokens))]
        pieces = Pieces(tokens, scores, types, prefix=bool(get("add_space_prefix", True)))
        return from_pieces(pieces)
    if (cut := _CUTS.get(get("pre", "?"))) is None:
        raise BadInput(
            f"{source}: GGUF pre-tokenizer {get('pre')!r} is not supported; "
            f"supported: {', '.join(_CUTS)}"
        )
    return _byte_level(tokens, get("merges", []), types, cut)


def from_sentencepiece(path: Path, *, every_segment: bool = True) -> Tokenizer:
    """The tokenizer in a SentencePiece ``.model`` file.

    Args:
        path: of the file.
        every_segment: see ``Pieces``; what transformers calls ``legacy``.

    Raises:
        BadInput: not a SentencePiece model of pieces (BPE or unigram).
    """
    from sentencepiece import sentencepiece_model_pb2

    generated: Any = sentencepiece_model_pb2  # its classes appear at run time
    model = generated.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError; its base differs between versions
        raise BadInput(f"{path}: not a SentencePiece model ({error})") from error
    kind = model.trainer_spec.model_type
    if not model.pieces or kind not in (model.trainer_spec.UNIGRAM, model.trainer_spec.BPE):
        raise BadInput(f"{path}: expected a SentencePiece model of type BPE or unigram")
    normalizer = model.normalizer_spec
    _check_tokens([piece.piece for piece in model.pieces])
    return from_pieces(
        Pieces(
            tokens=[piece.piece for piece in model.pieces],
            scores=[piece.score for piece in model.pieces],
            types=[piece.type for piece in model.pieces],
            unigram=kind == model.trainer_spec.UNIGRAM,
            prefix=normalizer.add_dummy_prefix,
            every_segment=every_segment,
            collapse=normalizer.remove_extra_whitespaces,
            charsmap=normalizer.precompiled_charsmap,
        )
    )


def _check_tokens(tokens: Sequence[str]) -> None:
    """Merges are looked for at every place of a token, so that one of a megabyte takes for ever."""
    longest = max(map(len, tokens), default=0)
    if longest > _LONGEST:
        raise ValueError(f"a token of {longest} characters; expected at most {_LONGEST}")


def from_pieces(pieces: Pieces) -> Tokenizer:
    """A tokenizer that cuts text as SentencePiece does."""
    byte_fallback = BYTE in pieces.types
    unknown = pieces.types.index(UNKNOWN) if UNKNOWN in pieces.types else None
    if pieces.unigram:
        model = models.Unigram(
            list(zip(pieces.tokens, pieces.scores, strict=True)), unknown, byte_fallback
        )
    else:
        model = models.BPE(
            {token: i for i, token in enumerate(pieces.tokens)},
            _merges(pieces),
            unk_token=None if unknown is None else pieces.tokens[unknown],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    tokenizer = Tokenizer(model)
    steps = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.collapse:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    if pieces.prefix and pieces.every_segment:
        steps += [normalizers.Prepend(_SPACE)]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if pieces.prefix and not pieces.every_segment:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first", split=False
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if pieces.prefix else []),
        ]
    )
    _add_special(tokenizer, pieces.tokens, pieces.types)
    return tokenizer


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score of the third first."""
    joinable = {
        token: (-score, i)
        for i, (token, score, kind) in enumerate(
            zip(pieces.tokens, pieces.scores, pieces.types, strict=True)
        )
        if kind in (NORMAL, USER_DEFINED)
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(joinable, key=joinable.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in joinable and token[cut:] in joinable
    ]


def _byte_level(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], cut: _Cut
) -> Tokenizer:
    """GPT-2's kind: bytes spelled as printable characters, merged by an explicit list."""
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
        ignore_merges=cut.whole_words,
    )
    tokenizer = Tokenizer(model)
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    if cut.regex:
        steps.append(pre_tokenizers.Split(Regex(cut.regex), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, types)
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are found in text before anything else; the special ones vanish in decoding."""
    kinds = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kinds[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
    )
