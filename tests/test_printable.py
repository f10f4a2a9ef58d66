"""What programs and models write reaches a terminal as text, and as nothing else."""

import pytest

from marft_jax.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),  # OSC 52 writes to the clipboard
        ("\x9b2J", r"\x9b2J"),  # the same in one byte
        ("right\rwrong", r"right\rwrong"),
        ("a\u2028b\u202egnp", r"a\u2028b\u202egnp"),
        ("half \ud83d", r"half \ud83d"),
        ("back\x08space\x7f", r"back\x08space\x7f"),
    ],
)
def test_what_steers_a_terminal_is_spelled_out(text, shown):
    assert printable(text) == shown
    printable(text).encode("utf-8")


@pytest.mark.parametrize("text", ["", "x\ty\nz", "äöü 漢字 👍 e\u0301 \\x1b"])
def test_what_people_write_stays(text):
    assert printable(text) == text
