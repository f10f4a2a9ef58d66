"""Each command starts with each shipped team and each shipped config, on every kind of base.

Whatever is known before the first program is compiled is checked here: settings, the team, the
base, and what the run directory will say.
"""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path

import pytest
import real_bases
import yaml

from marft_jax import chat, cli, evaluate, export, imitate, plan, train
from marft_jax.cli import unused_settings
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.command import open_app
from marft_jax.learning.settings import Imitation
from marft_jax.run import imitation, models
from marft_jax.run.directory import write_settings
from marft_jax.run.models import TeamModels, open_models
from marft_jax.run.samplers import open_sampler
from marft_jax.run.states import make_learner
from marft_jax.sampling.bases import SamplerOfBases
from marft_jax.settings.config import Config, dump
from marft_jax.settings.setting import replaced
from marft_jax.team.team_files import load_team

pytestmark = pytest.mark.usefixtures("one_device")

CONFIGS = Path(__file__).parent.parent / "configs"
BASES = ("tiny", "directory", "gguf")


def shipped() -> tuple[list[Path], list[Path]]:
    """Configs and teams of the repository."""
    found: tuple[list[Path], list[Path]] = ([], [])
    for file in sorted(CONFIGS.rglob("*.yaml")):
        tree = yaml.safe_load(file.read_text())
        if "agents" in tree:
            found[1].append(file)
        elif tree.keys() <= {"run", "model", "team", "env", "lora", "critic", "algo", *_OTHERS}:
            found[0].append(file)
    return found


_OTHERS = ("rollout", "mesh", "eval", "guard")
SHIPPED, TEAMS = shipped()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Each kind of base, with more positions than a config asks for; and two short ones."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        "tiny": "tiny",
        "directory": str(real_bases.directory(folder / "model", 16384)),
        "gguf": str(real_bases.gguf_file(folder / "model.gguf", 16384)),
        "short directory": str(real_bases.directory(folder / "short", 200)),
        "short gguf": str(real_bases.gguf_file(folder / "short.gguf", 200)),
    }


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """A base is read once; that it fits is checked each time."""

    def load(meshes, model, check, name):
        base = _load(meshes, model, None, name)
        check(base.config)
        return base

    monkeypatch.setattr(models, "load_onto", load)


_load = functools.cache(models.load_onto)


def nameless(config: Config) -> str:
    return dump(replaced(config, "team.file", None))


def opened(config: Config) -> TeamModels:
    with open_models(config, load_team(config.team.file)) as start, open_sampler(start, at_once=1):
        make_learner(start)
        return start


def started(flags: list[str], base: str, folder: Path) -> TeamModels:
    """Opens what each command opens for a training with these flags; returns that of ``train``."""
    flags = [*flags, "--model.base", base, "--run.dir", str(folder)]
    start = opened(cli.parse_training(flags))
    opened(imitation.settings_of(cli.parse_training([*flags, "--algo.name", Imitation.name])))
    cli.parse(flags, prog="marft_jax.plan")
    write_settings(folder, start.config, load_team(start.config.team.file))
    for command in ("evaluate", "chat", "serve", "export"):
        asked = opened(cli.parse_run(str(folder), None, [], f"marft_jax.{command}"))
        assert asked.team.sampling == start.team.sampling, command
        assert asked.team.contexts == start.team.contexts, command
    again = cli.parse(["--config", str(folder / "config.yaml"), "--run.dir", str(folder)])
    assert nameless(again) == nameless(start.config)  # a run directory shows what was used
    return start


def local(team: Path, base: str, folder: Path) -> str:
    """The team with that base in the place of those that are not here."""
    text = re.sub(r"model: (?!tiny)[^,} ]+", f"model: {base}", team.read_text())
    copy = folder / team.name
    copy.write_text(text)
    return str(copy)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("team", TEAMS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_each_command_starts_with_each_shipped_team(team, kind, bases, folder):
    flags = ["--team.file", local(team, bases[kind], folder.parent)]
    flags += ["--algo.name", "distill"] if "teacher" in team.read_text() else []
    started(flags, bases[kind], folder)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.slow
def test_each_command_starts_with_each_shipped_config(file, kind, bases, folder):
    config, flags = cli.parse(["--config", str(file)]), ["--config", str(file)]
    if config.team.file:
        flags += ["--team.file", local(Path(config.team.file), bases[kind], folder.parent)]
    if kind == "tiny" and config.model.context > 1024:
        flags += ["--model.context", "1000", "--team.max_new_tokens", "99"]
    flags += ["--lora.init", "none", "--mesh.data", "-1", "--mesh.fsdp", "1", "--mesh.tensor", "1"]
    start = started(flags, bases[kind], folder)
    assert start.config.env == config.env and start.config.algo.name == config.algo.name


OWN = {
    "max_new_tokens": (9, 11),
    "temperature": (0.5, 0.75),
    "top_p": (0.5, 0.75),
    "top_k": (3, 4),
    "min_p": (0.1, 0.2),
    "stop": ("x", "y"),
}
"""Each sampling setting: an agent's own value, and one for the team."""


def sampled(value: object) -> object:
    return (value,) if isinstance(value, str) else value


@pytest.mark.parametrize("kind", [*BASES, "short directory", "short gguf"])
@pytest.mark.parametrize("who", [(), (0,), (1,), (0, 1)], ids=["none", "first", "last", "all"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.slow
def test_what_agents_say_themselves_and_what_follows_from_the_base_go_together(
    name, who, kind, bases, folder
):
    """A value that follows from the base was given by nobody, so it is never one too many."""
    own, of_team = OWN[name]
    agents = [{"name": "a"}, {"name": "b", "answers": True}]
    for i in who:
        agents[i] |= {name: own}
    team = folder.parent / "team.yaml"
    team.write_text(yaml.safe_dump({"agents": agents}))
    flags, short = ["--team.file", str(team)], "short" in kind
    start = started(flags, bases[kind], folder)
    lengths = (256, 24) if kind == "tiny" else (200, 50) if short else (1024, 256)
    assert (start.config.model.context, start.config.team.max_new_tokens) == lengths
    usual = getattr(start.config.team, name)
    expected = [sampled(own) if i in who else usual for i in range(2)]
    assert [getattr(s, name) for s in start.team.sampling] == expected

    given = [*flags, f"--team.{name}", str(of_team), "--model.base", bases[kind]]
    config = cli.parse(given)
    start = opened(config)
    expected = [sampled(own if i in who else of_team) for i in range(2)]
    assert [getattr(s, name) for s in start.team.sampling] == expected
    is_named = f"--team.{name} " in unused_settings.warning(config)
    assert is_named == (len(who) == 2)  # nobody reads it


TWO = """
bases: {{other: {{model: {0}{1}}}}}
agents: [{{name: a, base: other}}, {{name: b, answers: true}}]
"""


@pytest.mark.parametrize("kind", ["directory", "gguf"])
@pytest.mark.parametrize(("flags", "fault"), [
    (["--model.context", "201"], "--model.context: expected at most 200, .*, got 201"),
    (["--model.context", "100000"], "--model.context: expected at most 200, .*, got 100000"),
    (["--model.context", "1024"], "--model.context: expected at most 200, .*, got 1024"),
    (["--model.context", "200", "--team.max_new_tokens", "200"], "less than .* 200, got 200"),
    (["--team.max_new_tokens", "250"], "'planner': max_new_tokens: expected less than 200, .* 250"),
    (["--team.file", "own.yaml"], "'b': max_new_tokens: expected less than 200, .* got 300"),
    (["--team.file", "two.yaml"], "bases: other: context: expected at most 200, .* got 300"),
    (["--team.file", "one.yaml", "--model.base", "tiny", "--model.context", "1000"],
     "bases: other: context: expected at most 200, .* got 1000"),
])  # fmt: skip
def test_a_length_that_the_base_lacks_is_refused(flags, fault, kind, bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = bases[f"short {kind}"]
    Path("own.yaml").write_text("agents: [{name: b, answers: true, max_new_tokens: 300}]")
    Path("two.yaml").write_text(TWO.format(short, ", context: 300"))
    Path("one.yaml").write_text(TWO.format(short, ""))
    flags = flags if "--model.base" in flags else [*flags, "--model.base", short]
    with pytest.raises(BadInput, match=fault) as caught:
        opened(cli.parse(flags))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_what_is_closed_holds_no_weights_and_samples_no_more(monkeypatch):
    released = []
    monkeypatch.setattr(SamplerOfBases, "release", lambda self: released.append(self))
    with open_models(cli.parse([]), load_team(None)) as start, open_sampler(start, 1) as sampler:
        assert start.bases and not released
    assert released == [sampler] and not start.bases


def test_a_context_is_refused_before_weights_are_read(bases, monkeypatch):
    monkeypatch.setattr(models, "load_onto", _load.__wrapped__)
    monkeypatch.setattr("marft_jax.models.weights.load.fill", None)
    with pytest.raises(BadInput, match="expected at most 200"):
        opened(cli.parse(["--model.base", bases["short directory"], "--model.context", "201"]))


@pytest.mark.parametrize(("flags", "contexts", "longest"), [
    (["--model.base", "{long}"], (200, 1024), (50, 256)),
    (["--model.base", "{long}", "--team.max_new_tokens", "30"], (200, 1024), (30, 30)),
    (["--model.base", "{short}"], (200, 200), (50, 50)),
    (["--model.base", "tiny"], (200, 256), (24, 24)),
    (["--model.base", "tiny", "--model.context", "20"], (20, 20), (5, 5)),
    (["--model.base", "{long}", "--model.context", "120"], (120, 120), (30, 30)),
])  # fmt: skip
def test_lengths_that_nobody_gave_are_those_of_each_agents_base(
    flags, contexts, longest, bases, tmp_path
):
    (tmp_path / "team.yaml").write_text(TWO.format(bases["short gguf"], ""))
    words = [w.format(long=bases["directory"], short=bases["short directory"]) for w in flags]
    start = opened(cli.parse(["--team.file", str(tmp_path / "team.yaml"), *words]))
    assert start.team.contexts == contexts
    assert tuple(s.max_new_tokens for s in start.team.sampling) == longest


SMALL = """--run.steps 1 --algo.name grpo --algo.episodes 2 --algo.group_size 2 --run.loggers none
--model.context 96 --eval.every 0 --rollout.slots 2 --lora.targets q""".split()


@pytest.mark.release  # compiles a whole run for each base: a minute each
@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_each_command_works_on_a_base_of_a_users_own(kind, bases, tmp_path, monkeypatch, capsys):
    """A usual team, in which each agent has its own limit, from training to an export."""
    team, run = tmp_path / "team.yaml", tmp_path / "run"
    team.write_text(
        "agents:\n- {name: a, max_new_tokens: 12}\n- {name: b, answers: true, max_new_tokens: 12}\n"
    )
    of_team = ["--team.file", str(team), "--model.base", bases[kind]]

    def done(main, *argv) -> str:
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in argv])
        assert left.value.code == 0, capsys.readouterr()
        return capsys.readouterr().out

    done(train.main, *SMALL, *of_team, "--run.dir", run, "--dry_run")
    done(train.main, *SMALL, *of_team, "--run.dir", run)
    done(train.main, "--run.dir", run, "--run.steps", 2)
    done(evaluate.main, "--run", run, "--limit", 2)
    done(evaluate.main, "--base", bases[kind], *of_team[:2], "--limit", 2)
    few = ["--algo.episodes", 2, "--run.steps", 1, "--demonstrations", 4]
    done(imitate.main, *few, *of_team, "--out", tmp_path / "start")
    monkeypatch.setattr("sys.stdin", io.StringIO("3+4=?\n"))
    assert "3+4=?" in done(chat.main, "--run", run)
    with open_app(run, cli.parse_run(str(run), None, [])) as app:
        assert app.routes
    for form in ("peft", "merged"):
        done(export.main, "--run", run, "--out", tmp_path / form, "--format", form)
    assert opened(cli.parse(["--team.file", str(tmp_path / "peft" / "team.yaml"), *of_team[2:]]))
    merged = cli.parse([*of_team[:2], "--model.base", str(tmp_path / "merged" / "b")])
    assert opened(merged).config.model.context == 1024
    done(plan.main, *SMALL, *of_team[:2], "--model.base", bases[kind], "--topology", "cpu:1")
