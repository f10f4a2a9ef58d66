"""Files that a user writes, and what somebody might have written instead."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import pytest

from marft_jax.envs.datasets.load import load
from marft_jax.errors import BadInput
from marft_jax.extras.gateway import command
from marft_jax.formats import documents, foreign
from marft_jax.rollout import recorded
from marft_jax.team.team_files import load_team

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
WRONG = {
    "aliases that make gigabytes": (".yaml", BOMB, "anchors and aliases"),
    "an anchor alone": (".yaml", "a: &x 1", "anchors and aliases"),
    "a key that stands twice": (".yaml", "run: {steps: 1, steps: 2}", "'steps' stands twice"),
    "deep nesting": (".yaml", "[" * 1000, "not YAML"),
    "a key that is a list": (".yaml", "[1]: 2", "unhashable key"),
    "a number of 5000 digits": (".yaml", "a: " + "9" * 5000, "not YAML"),
    "a date that is none": (".yaml", "a: 2020-13-45", "not YAML"),
    "no bool": (".yaml", "a: !!bool x", "not YAML"),
    "no timestamp": (".yaml", "a: 1\nb: !!timestamp x", "not YAML"),
    "no int": (".yaml", "a: !!int ''", "not YAML"),
    "no set": (".yaml", "a: !!set x", "not YAML"),
    "sexagesimals too large": (".yaml", "a: " + "59:" * 400 + "1.0", "not YAML"),
    "an object of Python": (".yaml", "a: !!python/name:os.system", "not YAML"),
    "half a character": (".yaml", b"a: \xff", "not YAML"),
    "an escape": (".yaml", "a: \x1b[2J", "not YAML"),
    "too much": (".yaml", "a: " + "x" * (1 << 20), "at most"),
    "deep JSON": (".json", "[" * 100_000, "not JSON"),
    "a JSON number of 5000 digits": (".json", "9" * 5000, "not JSON"),
    "a JSON key twice": (".json", '{"a": 1, "a": 2}', "'a' stands twice"),
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
    assert time.monotonic() - begin < 60  # others take hours


@pytest.mark.parametrize("file", ["no/such.yaml", ".", "a\0b", "/dev/zero"])
def test_what_is_no_file_is_one_line(file):
    with pytest.raises(BadInput, match="--config"):
        documents.read(file, "--config")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_files_may_begin_with_a_byte_order_mark(mark, tmp_path):
    """Editors of some systems write one before every text."""
    for name, text, read in [
        ("a.yaml", "run: {}", lambda file: documents.read(file, "--config")),
        ("A.JSON", '{"run": {}}', lambda file: documents.read(file, "--config")),
        ("config.json", '{"run": {}}', lambda file: foreign.read_settings(Path(file))),
        ("a.jsonl", '{"question": "q", "answer": 1}', lambda file: load(file)[0].question),
        ("a.csv", f"question,answer\n{'q' * (1 << 18)},1", lambda file: load(file)[0].question[0]),
        ("d.jsonl", '{"task": 1, "turns": [{"agent": "a", "text": "b"}]}',
         lambda file: [demonstration.number for demonstration in recorded.read(file)]),
        ("keys", "a key", lambda file: command.read_keys(Namespace(
            host="h", allow_host=(), api_key_file=file))[0]),
    ]:  # fmt: skip
        (tmp_path / name).write_text(mark + text, encoding="utf-8")
        assert read(str(tmp_path / name)) in ({"run": {}}, "q", [1], ["a key"])
