"""Mistakes of a first day: one line that says what was expected, what came, and how to go on."""

from __future__ import annotations

import logging
import stat

import jax
import pytest
import real_bases

from marft_jax import cli, evaluate, imitate, train
from marft_jax.errors import logged_to
from marft_jax.run import models
from marft_jax.run.reporters import open_reporter
from marft_jax.settings.config import Mesh

pytestmark = pytest.mark.usefixtures("one_device")

FILES = {
    "team.yaml": "agents: [{name: a, answers: true}]",
    "list.yaml": "[{role: a, prompt: b, with_answer: true}]",
    "bases.yaml": "bases: {big: {model: BASE}}\nagents: [{name: a}, {name: b, base: big, "
    "answers: true}]",
    "teacher.yaml": "bases: {big: {model: no/such-model}}\nagents: [{name: a, answers: true, "
    "teacher: {base: big}}]",
    "settings.yaml": "run: {steps: 3}\nalgo: {episodes: 8}",
    "lora.yaml": "lora: {rank: 4}",
    "guarded.yaml": "guard: {max_kl: 4}\nrollout: {slots: 4}",
    "half.yaml": "algo: {episodes: 4.5}",
    "wrong.yaml": "run: {steps: many}\nmodel: {dtype: int3}",
    "grpo.yaml": "algo: {name: grpo, credit: tree, branches: 2}",
    "rows.csv": "question,answer\n1+1,2\n",
    "rows.jsonl": '{"question": "1+1", "answer": "2"}\n',
    "program.py": "def three():\n    return 3\ndef nothing():\n    pass\ndef one(task):\n    pass\n"
    "async def waits():\n    pass\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def line_of(capsys, main, *words: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    *_, line = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert left.value.code == code, line
    return line


@pytest.mark.parametrize(
    "words, parts",
    [
        (["--config", "team.yaml"], ["--config team.yaml", "got a team", "--team.file"]),
        (["--config", "list.yaml"], ["--config list.yaml", "--team.file"]),
        (["--config", "bases.yaml"], ["--config bases.yaml", "--team.file"]),
        (["--team.file", "settings.yaml"], ["--team.file settings.yaml", "--config"]),
        (["--team.file", "lora.yaml"], ["--team.file lora.yaml", "--config"]),
        (["--team.file", "guarded.yaml"], ["--team.file guarded.yaml", "--config"]),
        (["--config", "half.yaml", "--algo.episodes", "8"], ["--algo.episodes", "'4.5'"]),
        (["--config", "half.yaml", "--config", "settings.yaml"], ["--algo.episodes", "'4.5'"]),
        (["--config", "wrong.yaml", "--run.steps", "4", "--model.dtype", "bfloat16"],
         ["--run.steps", "'many'"]),
        (["--run.dir", "s3://"], ["--run.dir", "s3://BUCKET/PATH", "got 's3://'"]),
        (["--model.base", "no/such-model"], ["--model.base", "no/such-model", "fetch_model.py"]),
        (["--model.base", "such.gguf"], ["--model.base", "such.gguf", "fetch_model.py"]),
    ],
    ids=lambda x: " ".join(x) if x[0].startswith("--") else "",
)  # fmt: skip
def test_a_wrong_word_is_one_line_with_how_to_go_on(words, parts, capsys):
    run = [] if "--run.dir" in words else ["--run.dir", "run"]
    line = line_of(capsys, train.main, *words, *run)
    assert all(part in line for part in parts) and len(line) < 600, line  # the hub has its say


@pytest.mark.parametrize("words", [["settings.yaml", "--algo.episodes", "4"], ["grpo.yaml", *(
    "--algo.name appo --algo.credit last".split())]], ids=" ".join)  # fmt: skip
def test_a_right_value_that_a_later_one_replaces_is_no_mistake(words):
    assert cli.parse(["--config", *words]).algo.credit == "last"


@pytest.mark.parametrize(
    "base, team, more, key",
    [("no/such-model", "bases.yaml", [], "bases.big.model"),
     ("no-such-folder", "bases.yaml", [], "bases.big.model"),
     ("no.gguf", "bases.yaml", [], "bases.big.model"),
     ("MODEL, thinking: high", "bases.yaml", [], "bases.big.thinking"),
     ("", "teacher.yaml", ["--algo.name", "distill"], "bases.big.model")],
)  # fmt: skip
def test_a_fault_of_a_base_of_the_team_file_names_its_key(here, base, team, more, key, capsys):
    if "MODEL" in base:
        base = base.replace("MODEL", str(real_bases.directory(here / "model", 512)))
    (here / "bases.yaml").write_text(FILES["bases.yaml"].replace("BASE", base))
    line = line_of(capsys, train.main, "--team.file", team, "--run.dir", "run", *more)
    assert f"--team.file: {key}" in line and "--model." not in line


@pytest.mark.parametrize(
    "main, got",
    [("three", "got 3"), ("nothing", "got None"), ("one", "(task, client)"),
     ("waits", "got <coroutine")],
)  # fmt: skip
def test_a_function_that_makes_no_environment_is_named(main, got, capsys):
    words = ["--env.name", f"program:{main}", "--run.dir", "run", "--algo.episodes", "4"]
    with pytest.raises(SystemExit):
        train.main(words)
    line = capsys.readouterr().err.splitlines()[-1]
    assert got in line and f"program:{main}" in line and "(task, client)" in line


@pytest.mark.parametrize("file", ["rows.csv", "rows.jsonl", "team.yaml", "program.py"])
def test_a_file_without_demonstrations_is_told_what_they_are(file, capsys):
    line = line_of(capsys, imitate.main, "--data", file, "--out", "run")
    assert 'expected {"task"' in line and file in line


def test_what_a_command_logs_is_a_line_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    with cli.boundary():
        logging.getLogger("marft_jax").warning("a\n\x1b[31mb %s", "c")
    assert capsys.readouterr().err == "marft_jax: a \\x1b[31mb c\n"
    assert logging.getLogger("marft_jax").propagate


def test_what_a_run_logs_is_shown_once(here, capsys):
    with cli.boundary(), open_reporter(here / "run", 3) as reporter:
        reporter.event("hello")
        logging.getLogger("marft_jax").warning("beware")
    found = capsys.readouterr()
    assert found.out.split() == ["hello", "beware"] and not found.err


def test_a_setting_that_is_not_read_is_a_line_of_the_command(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--base", "tiny", "--mesh.rollout", "1", "--limit", "0"])
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("marft_jax: this run does not read --mesh.rollout 1")
    assert "--limit" in last


@pytest.mark.parametrize("name", ["file", "folder", "named"])
def test_a_cache_that_cannot_be_written_is_one_line(here, monkeypatch, recwarn, name):
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    place = here / "cache"
    if name == "folder":
        place.mkdir()
        place.chmod(stat.S_IRUSR)
        monkeypatch.setattr(models.tempfile, "TemporaryFile", _refuse)
    else:
        place.write_text("")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(place) if name == "named" else None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        with logged_to(handler):
            models.open_devices(Mesh())
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    [line] = lines
    assert str(place) in line and "JAX_COMPILATION_CACHE_DIR" in line and not recwarn.list


def _refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")
