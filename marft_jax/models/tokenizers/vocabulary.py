"""Fast tokenizers out of bare vocabularies: GGUF metadata and SentencePiece models.

Neither format carries a ``tokenizer.json``; what they say suffices to build one. How text is cut
before the merges is only named in a GGUF file, so the known names are a table here. transformers'
own conversions differ: they ignore SmolLM's digits and Qwen's NFC, take any unknown name for
GPT-2's, cut unigram models as if they were merges, and drop leading spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from marft_jax.errors import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, of the same numbers in GGUF and SentencePiece."""

_proto: Any = sentencepiece_model_pb2  # its classes appear at run time
_SPACE = "▁"
_LONGEST = 2000
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
_TEKKEN = _Cut(
    rf"{_HEAD}[{_UPPER}]*[{_LOWER}]+|{_HEAD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}|"
    + _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1),
    whole_words=True,
)
_CUTS = {
    "gpt-2": _Cut(None),
    "smollm": _Cut(None, digits=True),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Tokenizer that a GGUF file's metadata describes.

    Raises:
        BadInput: a kind of vocabulary, or of cutting text into words, that is not known, by name.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens = get("model"), get("tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise BadInput(
            f"{source}: GGUF tokenizer model {kind!r} is not supported; supported: gpt2, llama"
        )
    _check_lengths(tokens)
    types = get("token_type") or [NORMAL] * len(tokens)
    if kind == "llama":
        scores = get("scores") or [-float(i) for i in range(len(tokens))]
        model = _proto.ModelProto(trainer_spec={"model_type": "BPE"})
        for token, score, type_ in zip(tokens, scores, types, strict=True):
            model.pieces.add(piece=token, score=score, type=type_)
        model.normalizer_spec.add_dummy_prefix = bool(get("add_space_prefix", True))
        model.normalizer_spec.remove_extra_whitespaces = False
        return _from_model(model)
    if (cut := _CUTS.get(get("pre", "?"))) is None:
        raise BadInput(
            f"{source}: GGUF pre-tokenizer {get('pre')!r} is not supported; "
            f"supported: {', '.join(_CUTS)}"
        )
    return _byte_level(tokens, get("merges", []), types, cut)


def from_sentencepiece(path: Path, *, every_segment: bool = True) -> Tokenizer:
    """Tokenizer in a SentencePiece ``.model`` file.

    Args:
        every_segment: the text after a special token begins with a space that is not written, as
            all text does; what transformers calls ``legacy``.

    Raises:
        BadInput: not a SentencePiece model of pieces (BPE or unigram).
    """
    try:
        model = _proto.ModelProto.FromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError; its base differs between versions
        raise BadInput(f"{path}: not a SentencePiece model ({error})") from error
    kinds = (model.trainer_spec.UNIGRAM, model.trainer_spec.BPE)
    if not model.pieces or model.trainer_spec.model_type not in kinds:
        raise BadInput(f"{path}: expected a SentencePiece model of type BPE or unigram")
    _check_lengths(piece.piece for piece in model.pieces)
    return _from_model(model, every_segment)


def _check_lengths(tokens: Iterable[str]) -> None:
    """Merges are looked for at every place of a token, so that one of a megabyte takes for ever."""
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:
        raise ValueError(f"a token of {longest} characters; expected at most {_LONGEST}")


def _from_model(model: Any, every_segment: bool = True) -> Tokenizer:
    """A tokenizer that cuts text as SentencePiece does with this ``ModelProto``."""
    tokens, types = ([getattr(p, of) for p in model.pieces] for of in ("piece", "type"))
    rules, unknown = model.normalizer_spec, types.index(UNKNOWN) if UNKNOWN in types else None
    bytes_ = BYTE in types
    if model.trainer_spec.model_type == model.trainer_spec.UNIGRAM:
        scored = [(p.piece, p.score) for p in model.pieces]
        tokenizer = Tokenizer(models.Unigram(scored, unknown, bytes_))
    else:
        name = None if unknown is None else tokens[unknown]
        ids = {token: i for i, token in enumerate(tokens)}
        merges = _merges(model.pieces)
        how = dict[str, Any](unk_token=name, fuse_unk=True, byte_fallback=bytes_)
        tokenizer = Tokenizer(models.BPE(ids, merges, **how))
    charsmap, prefix = rules.precompiled_charsmap, rules.add_dummy_prefix
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    if prefix and every_segment:
        steps += [normalizers.Prepend(_SPACE)]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if prefix and not every_segment:
        once = dict[str, Any](replacement=_SPACE, prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**once)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*back, *strip])
    _add_special(tokenizer, tokens, types)
    return tokenizer


def _merges(pieces: Iterable[Any]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a third, best score of the third first."""
    ranked = {
        p.piece: (-p.score, i)
        for i, p in enumerate(pieces)
        if p.type in (NORMAL, USER_DEFINED)
    }  # fmt: skip
    return [
        (token[:cut], token[cut:])
        for token in sorted(ranked, key=ranked.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranked and token[cut:] in ranked
    ]


def _byte_level(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], cut: _Cut
) -> Tokenizer:
    """GPT-2's kind: bytes spelled as printable characters, merged by an explicit list."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=cut.whole_words))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    steps += [pre_tokenizers.Split(Regex(cut.regex), "isolated")] if cut.regex else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, types)
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are found in text before anything else; the special ones vanish in decoding."""
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in special
        ]
    )
