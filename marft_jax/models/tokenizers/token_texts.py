"""Text that each token of an action adds."""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]
_BYTES = 4  # of a character, at most


def pieces(ids: list[int], decode: Decode) -> list[str]:
    """Returns the text that each token adds; a character of several tokens belongs to the last one.

    Each token is decoded together with the token before it, because some tokenizers drop a space at
    the beginning of a text; with all tokens before it where pairs do not give the whole text.
    """
    texts = _pieces(ids, decode)
    return texts if "".join(texts) == decode(ids) else _pieces(ids, decode, pairs=False)


def _pieces(ids: list[int], decode: Decode, pairs: bool = True) -> list[str]:
    texts, before, start, text = list[str](), 0, 0, ""
    for end in range(1, len(ids) + 1):
        longer = decode(ids[before:end])
        if longer.endswith("\ufffd") and end - start < _BYTES and end < len(ids):
            texts.append("")  # a character that later tokens complete
            continue
        texts.append(longer[len(text) :])
        before, start = start if pairs else 0, end
        text = decode(ids[before:start])
    return texts
