"""What the READMEs print works as printed: commands are known, snippets run, names exist."""

from __future__ import annotations

import ast
import csv
import importlib.util
import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import small
import yaml
from scripted import Scripted

from marft_jax import cli
from marft_jax.background import DaemonThreads
from marft_jax.envs.base import BUILT_IN
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.settings import SETTINGS, Appo
from marft_jax.rollout.rollout import Rollout
from marft_jax.settings import setting
from marft_jax.team.team_files import load_team

ROOT = Path(__file__).resolve().parent.parent
_FILES = [*(ROOT / "marft_jax").glob("*/*.py"), *(ROOT / "marft_jax" / "extras").glob("*/*.py")]
ROOMS = sorted({file.parent for file in _FILES})
PAGE, GUIDE = ROOT / "README.md", ROOT / "marft_jax" / "README.md"
READMES = [PAGE, GUIDE, ROOT / "scripts" / "README.md", *(r / "README.md" for r in ROOMS)]
TEXT = "\n\n".join(file.read_text("utf-8") for file in READMES if file.is_file())
MODULES = {
    "alone": "verbs.open_policy(", "brief": "def score(text, row)", "flows": "def two_drafts",
    "parity": "class Parity", "soft_clip": "SOFT = ", "sums": "marft_jax.configure(",
    "sums_env": "class Digits", "sums_program": "def play(task, client)",
}  # fmt: skip
"""The modules that the snippets are files of, each with what it defines."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def module(name: str) -> str:
    """The snippet that is the module of that name."""
    [block] = [block for block in blocks("python") if MODULES[name] in block]
    return block


def commands() -> list[str]:
    """Every command of the shell blocks, and those that stand in a sentence."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:\.venv/bin/)?(?:python3?|pip) [^`]+)`", prose)
    lines = [line.strip() for line in [*text.splitlines(), *inline]]
    return list(dict.fromkeys(" ".join(line.split()) for line in lines if line))


def parts(command: str) -> list[list[str]]:
    """The programs of a line, which && or | joins."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        found.append([]) if word in ("&&", "|") else found[-1].append(word)
    return found


@pytest.fixture(scope="module")
def extras() -> dict[str, list[str]]:
    """What pip installs with each extra."""
    given: dict[str, Any] = {}
    # a new environment of Python 3.12 has no setuptools
    with pytest.MonkeyPatch.context() as patch:
        tools = SimpleNamespace(setup=given.update, find_packages=lambda **_: [])
        patch.setitem(sys.modules, "setuptools", tools)
        runpy.run_path(str(ROOT / "setup.py"))
    return given["extras_require"]


def test_whatever_is_missing_is_installed_by_one_form_that_works_from_a_checkout(extras):
    """Of each message of the package; exports go to people who have no checkout."""
    files = [f for f in (ROOT / "marft_jax").rglob("*.py") if f.parent.name != "export"]
    advice = [line for f in files for line in f.read_text().splitlines() if "pip install" in line]
    assert len(advice) > 9
    for line in advice:
        [form] = re.findall(r"pip install (?:-U )?(?:\"$|'?-e \\?\"?\.(?:\[([\w{}-]+)\])?)", line)
        assert form in ("", "{extra}", "{name}") or form in extras, line


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory as a reader's: the checkout's files, and those that the READMEs print."""
    for name in ("configs", "scripts", "marft_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mine.yaml").write_text("run: {steps: 1}\n")
    (tmp_path / "rows.csv").write_text(
        "question,answer\n" + "".join(f"{n}+1=?,{n + 1}\n" for n in range(20))
    )
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(module(name))
    [drafts] = [block for block in blocks("yaml") if "two_drafts" in block]
    (tmp_path / "drafts.yaml").write_text(drafts)
    [team] = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "team.yaml").write_text(team)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def left(run, *arguments: Any) -> int:
    try:
        result = run(*arguments)
    except SystemExit as exit:
        result = exit.code
    return result if isinstance(result, int) else 0


HELP: dict[str, str] = {}


def help_of(program: str, capsys) -> str:
    """What a module or script says to --help."""
    if program not in HELP:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [program, "--help"])
            if program.endswith(".py"):
                patch.syspath_prepend(str(Path(program).parent))
                assert left(runpy.run_path, program, None, "__main__") == 0
            else:
                assert left(importlib.import_module(program).main, ["--help"]) == 0
        HELP[program] = capsys.readouterr().out
    return HELP[program]


def check_python(words: list[str], capsys) -> None:
    """The program is there and knows every flag; settings can be parsed."""
    if words[:2] == ["-m", "pytest"] or words[:2] == ["-m", "venv"]:
        return
    program, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    settings: list[str] = []
    mine: list[str] = settings if program == "marft_jax.train" else []
    for word in arguments:
        if word.startswith("--"):
            dotted = "." in word or word == "--config" or program == "marft_jax.train"
            mine = settings if dotted else []
            if not dotted:
                assert re.search(rf"{word}\b", help_of(program, capsys)), word
        mine.append(word)
    if program.startswith("marft_jax") and not {"--schema", "--help"} & {*settings}:  # they end
        cli.parse(settings)


@pytest.mark.parametrize("command", commands())
def test_every_command_names_programs_flags_and_extras_that_exist(command, here, extras, capsys):
    for program, *arguments in parts(command):
        name = Path(program).name
        if name in ("python", "python3"):
            check_python(arguments, capsys)
        elif name == "pip":
            asked = re.findall(r"\[([\w,-]+)\]", " ".join(arguments))
            assert {extra for group in asked for extra in group.split(",")} <= set(extras)
        elif name == "bash":  # a shell script passes its flags to the Python script of its name
            assert Path(arguments[0]).is_file()
            check_python([str(Path(arguments[0]).with_suffix(".py")), *arguments[1:]], capsys)
        else:
            assert name == "echo" or [program, *arguments] == [".", ".venv/bin/activate"]


ONE_STEP = ["--run.steps", "1", "--algo.episodes", "4"]
DRY = ["--dry_run"]
STORY = [
    ("python -m marft_jax.train --run.seed 0", ONE_STEP),
    ("python -m marft_jax.evaluate --run runs/quickstart --compare", ["--limit", "2"]),
    ('echo "4+7+8=?" | python -m marft_jax.chat --run runs/quickstart', []),
    ("python -m marft_jax.export --run runs/quickstart --out team", []),
    ("python -m marft_jax.export --run runs/quickstart --out models --format merged", []),
    ("python -m marft_jax.evaluate --run runs/quickstart --step best", ["--limit", "2"]),
    ("python -m marft_jax.train --lora.init team --run.dir runs/again", DRY),
    ("python -m marft_jax.imitate --out runs/start --demonstrations 200 --run.steps 10", ONE_STEP),
    ("python -m marft_jax.train --lora.init runs/start --run.dir runs/trained", DRY),
    ("python scripts/example_rows.py", []),
    ("python -m marft_jax.train --env.data rows.csv --env.reward brief:score "
     "--run.dir runs/brief", ONE_STEP),
    ("python -m marft_jax.train --team.file drafts.yaml --run.dir runs/drafts", ONE_STEP),
    ("python -m marft_jax.train --team.file team.yaml --env.name sums_env:Digits "
     "--run.dir runs/sums_env", ONE_STEP),
    ("python -m marft_jax.train --env.name parity:Parity --run.dir runs/parity", DRY),
    ("python -m marft_jax.train --team.workflow program --env.name sums_program:play "
     "--run.dir runs/program", ONE_STEP),
    ("python -m marft_jax.check parity:Parity", []),
]  # fmt: skip


@pytest.mark.slow
def test_the_commands_of_a_first_hour_run_one_after_the_other(here, monkeypatch, capsys):
    """In one process, with steps and tasks cut down; what they say goes to the test's report."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *backend: first)
    printed = [re.sub(r"\s+#.*", "", command) for command in commands()]
    for command, cheap in STORY:
        assert command in printed, command
        for program, *arguments in parts(command):
            if program == "echo":
                monkeypatch.setattr(sys, "stdin", io.StringIO(f"{arguments[0]}\n"))
                continue
            run, words = arguments[0], arguments[1:]
            if run == "-m":
                run, words = words[0], words[1:]
                code = left(importlib.import_module(run).main, [*words, *cheap])
            else:
                monkeypatch.setattr(sys, "argv", [run, *words])
                code = left(runpy.run_path, run, None, "__main__")
            assert code == 0, (command, capsys.readouterr().err)
    for made in ("team/team.yaml", "models/solver/config.json", "runs/drafts"):
        assert Path(made).exists()
    assert "solver:" in capsys.readouterr().out


def test_the_workflow_and_the_environment_play(here):
    pasted: dict[str, Any] = {}
    for name in ("flows", "parity"):
        exec(module(name), pasted)
    team = small.team_of(load_team("drafts.yaml"), context=300)
    engine = Scripted(lambda request: str(request.key.task % 2))
    rollout = Rollout(engine, team, pasted["two_drafts"], pasted["Parity"], DaemonThreads())
    episodes = rollout.play(small.samples(range(4)), 0).episodes
    assert {episode.reward for episode in episodes} == {1.0}
    assert episodes[0].dependency.astype(int).tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]


def test_the_example_has_rows_to_grade_and_demonstrations_of_its_team(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example_rows.py"])
    assert left(runpy.run_path, "scripts/example_rows.py", None, "__main__") == 0
    assert left(importlib.import_module("marft_jax.check").main, ["--data", "rows.csv"]) == 0
    assert "294 rows, 294 tasks, 0 left out" in capsys.readouterr().out
    [team] = [yaml.safe_load(x) for x in blocks("yaml") if "Write the first step" in x]
    shown = [json.loads(line) for line in Path("shown.jsonl").read_text("utf-8").splitlines()]
    acted = {tuple(turn["agent"] for turn in one["turns"]) for one in shown}
    assert acted == {tuple(agent["name"] for agent in team["agents"])}
    assert not {one["task"] for one in shown} & {task for task, _ in read_rows("rows.csv")}


def read_rows(file: str) -> list[list[str]]:
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines))


def test_the_environment_is_activated_before_a_command_needs_it():
    first, *others = commands()
    assert ". .venv/bin/activate" in first
    assert [command for command in others if ".venv" in command] == []


@pytest.mark.slow
def test_the_functions_are_used_as_printed(here, one_device):
    names = runpy.run_path("sums.py")
    assert len(names["rewards"]) in range(1, 6) and names["rewards"][-1] > names["rewards"][0]
    assert [names["plan"].name, names["answer"].name] == ["planner", "solver"]
    assert names["scores"]["arithmetic", "team"].tasks > 10


@pytest.mark.slow
def test_adapters_learn_without_a_team_as_printed(here, one_device, capsys):
    runpy.run_path("alone.py")
    printed = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[:16]]
    assert printed[0] == ["7.174", "7.174"]
    # each of 16 steps passes on the roundings of those before it
    assert [float(x) for x in printed[-1]] == pytest.approx([0.157, 0.514], abs=0.02)
    assert Path("small.safetensors").exists()


def test_the_algorithm_is_ppo_near_the_old_policy_and_stays_in_the_clip(here):
    soft = importlib.import_module("soft_clip").SOFT

    def loss(logprobs):
        return soft.policy_loss(Appo(clip=0.2), logprobs, jnp.float32(0), jnp.float32(2))

    assert jax.value_and_grad(loss)(jnp.float32(0)) == (-2, -2)
    assert loss(jnp.float32(3)) == pytest.approx(-2.4)
    assert isinstance(soft, Algorithm) and soft.level == "action" and soft.settings.has_critic


def test_every_python_snippet_is_one_of_the_modules_that_run():
    assert sorted(blocks("python")) == sorted(module(name) for name in MODULES)


def test_every_room_has_a_readme_and_the_page_is_short():
    assert [file for file in READMES if not file.is_file()] == []
    page = PAGE.read_text("utf-8")
    assert len(page.splitlines()) <= 110 and len(page.split()) <= 900
    assert max(map(len, [*page.splitlines(), *GUIDE.read_text("utf-8").splitlines()])) <= 120
    links = set(re.findall(r"\]\(([\w/]+)\)", GUIDE.read_text("utf-8")))
    assert links == {str(room.relative_to(ROOT / "marft_jax")) for room in ROOMS}


def test_every_link_to_a_section_leads_there():
    headings = re.findall(r"^## (.+)$", GUIDE.read_text("utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    linked = re.findall(r"\(marft_jax/README\.md#([\w-]+)\)", PAGE.read_text("utf-8"))
    linked += re.findall(r"\(#([\w-]+)\)", GUIDE.read_text("utf-8"))
    for file in (ROOT / "marft_jax").rglob("*.py"):  # what a command prints when it ends
        linked += re.findall(r"marft_jax/README\.md#([\w-]+)", file.read_text("utf-8"))
    assert len(linked) > 10 and set(linked) <= anchors


def test_every_link_to_a_file_leads_there():
    for file in filter(Path.is_file, READMES):
        links = re.findall(r"\]\(([^)\s]+)\)", file.read_text("utf-8"))
        local = [link.partition("#")[0] for link in links if "://" not in link]
        assert {link for link in local if not (file.parent / link).exists()} == set(), file


def test_every_function_is_where_the_table_says():
    table = GUIDE.read_text("utf-8").partition("## How it works")[2].partition("\n## ")[0]
    places = re.findall(r"`([\w/]+\.py):(\w+)`", table)
    assert len(places) > 15
    for path, name in places:
        tree = ast.parse((ROOT / "marft_jax" / path).read_text("utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        assert name in {x.name for x in ast.walk(tree) if isinstance(x, kinds)}, (path, name)


def test_every_yaml_snippet_is_a_team(tmp_path):
    for block in blocks("yaml"):
        assert "agents" in yaml.safe_load(block)
        (tmp_path / "team.yaml").write_text(block)
        assert load_team(str(tmp_path / "team.yaml")).agents


def test_every_flag_that_is_named_exists():
    configs = [cli.parse(["--algo.name", name]) for name in SETTINGS]
    configs += [cli.parse(["--env.name", name]) for name in BUILT_IN]
    configs += [cli.parse(["--rollout.sampler", name]) for name in ("engine", "http")]
    known = {key for one in configs for key, _ in setting.settings(one)}
    sections = vars(configs[0])
    flags = set(re.findall(rf"--((?:{'|'.join(sections)})\.[a-z_]+)", TEXT))
    assert len(flags) > 60
    assert flags <= known


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"\b((?:marft_jax|configs|scripts|tests)/[\w./-]+\.\w+)", TEXT))
    assert len(named) > 20
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_module_that_a_room_names_exists():
    for room in ROOMS:
        text = (room / "README.md").read_text("utf-8")
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text)) - {"program.py"}
        named -= {f"{name}.py" for name in MODULES}  # they are printed in a README
        named = {
            name for name in named if not name.startswith(("scripts/", "marft_jax/", "tests/"))
        }
        named -= {name for name in named if (ROOT / "marft_jax" / name).exists()}
        assert {name for name in named if not (room / name).exists()} == set(), room
