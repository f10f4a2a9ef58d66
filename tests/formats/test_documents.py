"""Files that a user writes, and what somebody might have written instead."""

from __future__ import annotations

import time

import pytest

from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.team.team_files import load_team

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
WRONG = {
    "aliases that make gigabytes": (".yaml", BOMB, "anchors and aliases"),
    "an anchor alone": (".yaml", "a: &x 1", "anchors and aliases"),
    "a key that stands twice": (".yaml", "run: {steps: 1, steps: 2}", "'steps' stands twice"),
    "deep nesting": (".yaml", "[" * 5000, "nested more than"),
    "deep nesting by indentation": (".yaml", "\n".join(" " * i + "a:" for i in range(99)), "deep"),
    "a key that is a list": (".yaml", "[1]: 2", "a key is expected to be a word"),
    "a number of 5000 digits": (".yaml", "a: " + "9" * 5000, "not YAML"),
    "a date that is none": (".yaml", "a: 2020-13-45", "not YAML"),
    "no bool": (".yaml", "a: !!bool x", "line 1, column 4: 'x' is no bool"),
    "no timestamp": (".yaml", "a: 1\nb: !!timestamp x", "line 2, column 4: 'x' is no timestamp"),
    "no int": (".yaml", "a: !!int ''", "'' is no int"),
    "no set": (".yaml", "a: !!set x", "not YAML"),
    "6000 digits in base 16": (".yaml", "a: 0x" + "f" * 6000, "line 1, column 4: a number of"),
    "6000 digits in base 60": (".yaml", "a: " + ":".join(["59"] * 3000), "line 1, column 4"),
    "sexagesimals too large": (".yaml", "a: " + "59:" * 400 + "1.0", "is no float"),
    "an object of Python": (".yaml", "a: !!python/name:os.system", "not YAML"),
    "half a character": (".yaml", b"a: \xff", "not YAML"),
    "an escape": (".yaml", "a: \x1b[2J", "not YAML"),
    "too much": (".yaml", "a: " + "x" * (1 << 20), "at most"),
    "deep JSON": (".json", "[" * 100_000, "not JSON"),
    "a JSON number of 5000 digits": (".json", "9" * 5000, "not JSON"),
    "a JSON key twice": (".json", '{"a": 1, "a": 2}', "'a' stands twice"),
    "NaN": (".json", '{"a": NaN}', "no number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_hostile_file_is_one_line_at_once(what, tmp_path):
    suffix, content, message = WRONG[what]
    file = tmp_path / f"file{suffix}"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    begin = time.monotonic()
    for read in (lambda: documents.read(str(file), "--config"), lambda: load_team(str(file))):
        with pytest.raises(BadInput, match=message) as caught:
            read()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("file", ["no/such.yaml", ".", "a\0b", "/dev/zero"])
def test_what_is_no_file_is_one_line(file):
    with pytest.raises(BadInput, match="--config"):
        documents.read(file, "--config")
