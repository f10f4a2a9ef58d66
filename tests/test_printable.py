"""What programs and models write reaches a terminal as text, and as nothing else."""

import json

import pytest
from rich.console import Console

from marft_jax import check, evaluate, export, train
from marft_jax.errors import BadInput, described, exit_with, one_line, printable, reason
from marft_jax.evaluation.tables import folding
from marft_jax.extras.report.command import main as report


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


STEERS = "a\x1b]0;b\x07[/c]"


def test_no_table_of_scores_prints_what_steers_a_terminal_or_reads_it_as_markup(capsys):
    Console(width=100).print(folding(["run"], ["n"], [[STEERS, "1"], ["[red]", "2"]]))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert r"a\x1b]0;b\x07[/c]" in shown and "[red]" in shown


def test_rows_of_data_are_printed_without_what_steers_a_terminal(tmp_path, capsys):
    file = tmp_path / "\x1b[2Jrows.jsonl"
    rows = [{"question": f"\x1b[31m{n}\x9b2J", "answer": str(n)} for n in range(3)]
    file.write_text("\n".join([*map(json.dumps, rows), "broken"]))
    with pytest.raises(SystemExit):
        check.main(["--data", str(file), "--env.max_bad_rows", "0.5"])
    shown = capsys.readouterr()
    assert r"\x1b[31m0\x9b2J" in shown.out and r"\x1b[2Jrows" in shown.out + shown.err
    assert not {"\x1b", "\x9b"} & {*shown.out, *shown.err}


@pytest.mark.slow
def test_commands_print_the_name_of_a_run_without_what_steers_a_terminal(tmp_path, capsys):
    run, out = tmp_path / "\x1b[2Jrun", tmp_path / "\x1b[2Jout"
    size = ["--run.steps", "1", "--algo.episodes", "8"]
    for main, flags in (
        (train.main, ["--run.dir", run, *size]),
        (evaluate.main, ["--run", run, "--limit", "2"]),
        (report, ["--run", run]),
        (report, ["--run", run, "--out", tmp_path / "\x1b[2Jpage.html"]),
        (export.main, ["--run", run, "--out", out]),
    ):
        with pytest.raises(SystemExit) as left:
            main([*map(str, flags)])
        assert left.value.code == 0
        shown = capsys.readouterr()
        assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}
        assert "x1b" in shown.out + shown.err
