"""What programs and models write reaches a terminal as text, and as nothing else."""

import pytest

from marft_jax.errors import BadInput, described, exit_with, one_line, printable, reason


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


SECRETS = {
    "a token of the hub": "Invalid token hf_abcDEF123456",
    "a header": "Illegal header value b'Bearer my.own/token'",
    "a key": "Incorrect API key provided: sk-proj-abc_DEF123456",
    "an address": "no route to http://me:abcDEF123@proxy.example:80/x",
    "the environment": "refused abcDEF123 of yours",
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS.keys())
@pytest.mark.parametrize(
    "said", [one_line, lambda t: described(OSError(t)), lambda t: reason(BadInput(t))]
)
def test_no_line_about_a_fault_has_a_secret_in_it(text, said, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcDEF123\n")
    shown = said(text)
    assert "***" in shown and not any(s in shown for s in ("abc", "DEF123", "my.own", "token'"))


def test_an_exit_says_no_secret(capsys):
    with pytest.raises(SystemExit):
        exit_with("x" * 1900 + " hf_abcDEF123456")
    assert "abcDEF" not in capsys.readouterr().err
    whole = "expected Authorization: Bearer, and a key; see sk-learn, hf_hub, http://a/b@c"
    assert one_line(whole) == whole


@pytest.mark.parametrize("text", ["", "x\ty\nz", "äöü 漢字 👍 e\u0301 \\x1b"])
def test_what_people_write_stays(text):
    assert printable(text) == text
