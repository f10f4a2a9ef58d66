"""Taking a team out of a run, and picking a checkpoint by its step, ``best`` or ``latest``."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import runpy
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from imitated_hub import imitated
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from marft_jax import cli, export
from marft_jax.background import DaemonThreads
from marft_jax.cli import configure
from marft_jax.envs.maths import Settings
from marft_jax.errors import BadInput
from marft_jax.extras.export import card, exporting, huggingface, turns
from marft_jax.extras.structured.grammar import constraint
from marft_jax.interop import peft
from marft_jax.learning.settings import Imitation
from marft_jax.models.families import FAMILIES
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.directory import write_settings
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.run.models import open_models
from marft_jax.run.states import initial_state, make_learner, restore_state
from marft_jax.settings.setting import replaced
from marft_jax.team.dag import Graph, Node
from marft_jax.team.profiles import BUILT_IN
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.tools import EpisodeTools, ToolCall, form_with_calls, load_toolboxes
from marft_jax.types import MAIN

pytestmark = pytest.mark.usefixtures("one_device")

METRICS = {3: 0.9, 5: 0.4}  # the newest is not the best


@pytest.fixture(scope="module")
def models():
    with open_models(configure(), Blueprint(BUILT_IN)) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A run directory with two checkpoints; the adapters tell the step they are of."""
    folder = tmp_path_factory.mktemp("run")
    config = replaced(models.config, "run.dir", str(folder))
    state = make_learner(models).init()
    write_settings(folder, config, Blueprint(BUILT_IN))
    with Checkpoints(folder, identity_of(config, models.bases, models.team), 2) as checkpoints:
        for step, metric in METRICS.items():
            numbers = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), state.adapters)
            saved = state.with_adapters(numbers)._replace(step=jnp.int32(step))
            checkpoints.save(step, saved, metric=metric)
    lines = [{"step": s, "reward/mean": m, "tokens/action": 7} for s, m in METRICS.items()]
    half = '{"step": 6, "rewa'  # of a run that goes on
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + half)
    return folder


def run_export(*flags):
    with pytest.raises(SystemExit) as left:
        export.main([str(flag) for flag in flags])
    return left.value.code


@pytest.mark.parametrize(("step", "found"), [("latest", 5), ("best", 3), ("3", 3), ("5", 5)])
def test_a_checkpoint_is_found_by_step_best_or_latest(models, run, step, found):
    state = restore_state(models, str(run), step)
    assert int(state.step) == found
    assert float(state.adapters[MAIN]["q"]["b"][0, 0, 0, 0]) == found


@pytest.mark.parametrize(
    ("run_dir", "step", "message"),
    [
        (True, "4", "--step 4: expected .* there are: 3, 5"),
        (True, "newest", "--step newest: expected best, latest"),
        (False, "3", "only a --run has steps"),
    ],
)
def test_a_step_that_is_not_there_is_one_clear_line(models, run, run_dir, step, message):
    with pytest.raises(BadInput, match=message):
        restore_state(models, str(run) if run_dir else None, step)


@pytest.mark.slow
def test_a_team_is_pushed_and_a_training_begins_with_it(models, run, tmp_path, monkeypatch, capsys):
    assert run_export("--run", run, "--out", tmp_path / "no", "--push", "sums") == 2
    assert not (tmp_path / "no").exists()
    with imitated(tmp_path, monkeypatch) as hub:
        assert run_export("--run", run, "--out", tmp_path / "out", "--push", "me/sums") == 0
        assert f"pushed: {hub.url}/me/sums" in capsys.readouterr().out
        begun = models._replace(config=configure(lora={"init": "hub:me/sums"}))
        state = initial_state(begun, make_learner(models).init())
    assert all((np.asarray(leaf) == 5).all() for leaf in jax.tree.leaves(state.adapters))


@pytest.mark.slow
def test_a_team_travels_as_peft_folders_and_comes_back(models, run, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_export("--run", run, "--out", out, "--step", "best") == 0
    assert "step 3" in capsys.readouterr().out
    for name in ("planner", "solver"):
        weights = load_file(out / name / peft.WEIGHTS)
        assert len(weights) == 4 * 7 * 2 and all((w == 3).all() for w in weights.values())
        settings = json.loads((out / name / peft.CONFIG).read_text())
        assert settings["base_model_name_or_path"] == "base"
        assert (settings["r"], settings["lora_alpha"]) == (8, 16)
    card = (out / "README.md").read_text()
    for told in ("arithmetic", "| reward/mean | 0.9 |", "for 3 steps", "PeftModel"):
        assert told in card
    assert (out / "base" / "model.safetensors").is_file()
    for file in out.rglob("*"):  # nothing says where it was made, everybody may read it
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes()
        assert file.stat().st_mode & 0o777 == (
            out.stat().st_mode & (0o777 if file.is_dir() else 0o666)
        )
    (tmp_path / "elsewhere").mkdir()
    out = out.rename(tmp_path / "elsewhere" / "moved")
    saved = restore_state(models, str(run), "best").adapters
    as_team = models._replace(
        team=models.team._replace(profiles=load_team(str(out / "team.yaml")).agents)
    )
    config = cli.parse(["--lora.init", str(out)])
    for other in (as_team, models._replace(config=config)):  # by the team file, by the setting
        loaded = restore_state(other, None).adapters
        jax.tree.map(np.testing.assert_array_equal, loaded, saved)


def played(folder, question, answers, watch=lambda turn: None):
    """Prompts as ids that an exported ``team.py`` makes where the model writes the answers."""
    source = (folder / "team.py").read_text("utf-8")
    assert len(source.splitlines()) <= 85
    for name in ("team_tools", "forms", "calculator"):  # of another export
        sys.modules.pop(name, None)
    script = {"__name__": "script", "__file__": str(folder / "team.py")}
    before = sys.path.copy()
    sys.path.insert(0, str(folder))
    exec(compile(source, "team.py", "exec"), script)
    team = json.loads((folder / "turns.json").read_text("utf-8"))
    tokenizers = [AutoTokenizer.from_pretrained(folder / own["model"]) for own in team["bases"]]
    prompts, written = [], iter(answers)

    def write(turn, ids):
        prompts.append(ids)
        watch(turn)
        return next(written)

    turns = list(script["play"](team, question, tokenizers, write))
    sys.path[:] = before
    return prompts, [(turn["agent"], text) for turn, text in turns]


def test_team_py_shows_each_agent_what_chat_shows_it(run, tmp_path):
    assert run_export("--run", run, "--out", out := tmp_path / "out") == 0
    asked = LoadedTeam(run).ask("3+5+9=?").turns
    prompts, texts = played(out, "3+5+9=?", [turn.action.tolist() for turn in asked])
    assert prompts == [turn.prompt.tolist() for turn in asked]
    assert texts == [(turn.name, turn.text) for turn in asked]
    plan = json.loads((out / "turns.json").read_text("utf-8"))
    assert [turn["stop"] for turn in plan["turns"]] == ["(?!)"] * 2
    plan["turns"][0]["stop"] = "b|c"
    (out / "turns.json").write_text(json.dumps(plan))
    assert played(out, "3+5+9=?", [[*b" a cb"], [*b"x b "]])[1] == [
        ("planner", "a"),
        ("solver", "x b"),
    ]


def test_team_py_walks_a_graph_and_is_left_out_where_the_order_is_decided_on_the_way(models):
    nodes = [Node("a", "planner"), Node("b", "solver", "look"), Node("c", "solver")]
    graph = Graph(tuple(nodes), (("a", "b"), ("b", "c")))
    team = models.team._replace(graph=graph, messages=("first", "then"))
    assert turns.turns_of(team, "dag") == [(0, [], "first"), (1, [0], "look"), (1, [0, 1], "then")]
    assert turns.turns_of(team, "solo") == [(1, [], "then")]
    assert turns.turns_of(team, "orchestrated") is None


def with_agents(run, folder, **changes):
    """The run with other fields of its solver."""
    copy = shutil.copytree(run, folder)
    agents = [BUILT_IN[0], dataclasses.replace(BUILT_IN[1], **changes)]
    config = replaced(replaced(configure(), "run.dir", str(copy)), "model.context", 900)
    write_settings(copy, config, Blueprint(tuple(agents)))
    return copy


SERVER = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "mcp_server.py")]


def test_team_py_calls_the_tools_of_an_agent(run, tmp_path, capsys, monkeypatch):
    """Its own functions, the calculator and those of an MCP server, and reads the answers as in
    training."""
    pytest.importorskip("mcp")
    (tmp_path / "my_own.py").write_text(STROKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = {"mcp": {"command": SERVER, "only": ["count"]}}
    own = with_agents(run, tmp_path / "run", tools=("calculator", "my_own:strokes", server))
    assert run_export("--run", own, "--out", out := tmp_path / "out") == 0
    assert "not exported" not in capsys.readouterr().out
    assert "tools: calculator, strokes, count" in (out / "README.md").read_text()
    tokenizer = ByteTokenizer()
    calls = "".join(
        f"```call {name}\n{given}\n```\n"
        for name, given in [
            ("calculator", "23*2"),
            ("strokes", "ab"),
            ("count", '{"n": 5}'),
            ("nothing", "{}"),
            ("count", "5"),
        ]
    )
    asked = LoadedTeam(own).ask("3+5+9=?").turns
    plan, said = (tokenizer.encode(text) + [tokenizer.end_id] for text in ("guess", calls))
    prompts, texts = played(out, "3+5+9=?", [plan, said, [*b"17"]])
    assert texts == [("planner", "guess"), ("solver", "17")]
    known = "calculator, strokes, count"
    lines = [
        *("calculator: 46", "strokes: 2", "count: 5"),
        f"nothing: error: expected one of the tools {known}, got 'nothing'",
        "count: error: expected a JSON object, got '5'",
    ]
    answered = tokenizer.reply([{"role": "user", "content": "\n".join(lines)}])
    shown = tokenizer.decode(prompts[2])
    assert prompts[2][-len(answered) :] == answered, shown
    assert (
        tokenizer.decode(prompts[1])
        .partition("Assistant")[0]
        .startswith(tokenizer.decode(asked[1].prompt.tolist()).partition("3+5")[0])
    )


REPEATS = '''
def repeats(text: str, times: int = 1) -> str:
    """Repeats."""
    return text * times if times else 1 / times
'''


def test_an_exported_team_answers_calls_as_training_did(run, tmp_path, monkeypatch):
    """Arguments are checked and converted, errors told, and long answers cut off."""
    (tmp_path / "my_repeats.py").write_text(REPEATS)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = "calculator", {"my_repeats:repeats": {"characters": 30}}
    own = with_agents(run, tmp_path / "run", tools=entries)
    assert run_export("--run", own, "--out", out := tmp_path / "out") == 0
    turn = json.loads((out / "turns.json").read_text("utf-8"))["turns"][1]
    given = [f'{{"text": "xy", "times": {n}}}' for n in ('"3"', "99", "0", '"a"', "1.5", "null")]
    calls = [ToolCall("repeats", text) for text in (*given, "{}", '{"text": "a", "b": 1}')]
    calls += [
        ToolCall("calculator", f'{{"expression": "{text}"}}') for text in ("2**9", "1/0", "x")
    ]
    monkeypatch.syspath_prepend(str(out))
    monkeypatch.delitem(sys.modules, "calculator", raising=False)
    answer = runpy.run_path(str(out / "team_tools.py"))["answer"]
    [box] = load_toolboxes({"solver": entries}, "")
    with contextlib.closing(EpisodeTools(DaemonThreads())) as tools:
        answered = tools.answer(box, calls)
    assert [answer(turn, *call) for call in calls] == [call.answer for call in answered]


def test_an_exported_team_marks_what_a_server_calls_an_error(run, tmp_path):
    pytest.importorskip("mcp")
    server = {"mcp": {"command": SERVER, "only": ["act", "count", "total"]}}
    own = with_agents(run, tmp_path / "run", tools=(server,))
    assert run_export("--run", own, "--out", out := tmp_path / "out") == 0
    turn = json.loads((out / "turns.json").read_text("utf-8"))["turns"][1]
    calls = [("act", '{"what": "fail"}'), ("act", '{"what": "so"}'), ("act", '{"what": ""}'),
             ("count", '{"n": "many"}'), ("total", "{}")]  # fmt: skip
    answer = runpy.run_path(str(out / "team_tools.py"))["answer"]
    found = [answer(turn, *call) for call in calls]
    [box] = load_toolboxes({"solver": (server,)}, "")
    with contextlib.closing(EpisodeTools(DaemonThreads())) as tools:
        answered = tools.answer(box, [ToolCall(*call) for call in calls])
    assert found == [call.answer for call in answered]
    assert [text.startswith("error: ") for text in found] == [True, False, False, True, True]


STROKES = '''
def strokes(text: str) -> int:
    """Counts."""
    return len(text)
'''
FORM = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"], "additionalProperties": False}  # fmt: skip
WITHOUT = [
    ("peft", dict(tools=("python",)), "tools of solver (python)"),
    ("merged", dict(tools=("python",)), "tools of solver (python)"),
    ("merged", dict(format=FORM), "the format of solver's texts"),
]


def test_team_py_holds_texts_to_the_schema_of_their_agent(run, tmp_path, monkeypatch, capsys):
    """By the masks that sampled in training; without llguidance it says so and plays on."""
    own = with_agents(run, tmp_path / "run", format=FORM)
    assert run_export("--run", own, "--out", out := tmp_path / "out") == 0
    assert "not exported" not in capsys.readouterr().out
    assert "holds the texts of solver to their JSON schemas" in (out / "README.md").read_text()
    plan = json.loads((out / "turns.json").read_text("utf-8"))
    planner, solver = plan["turns"]
    [base], backend = plan["bases"], AutoTokenizer.from_pretrained(out / plan["bases"][0]["model"])
    masks = runpy.run_path(str(out / "team_tools.py"))["masks"]
    assert (
        not planner["grammar"]
        and not planner["calling"]
        and masks(planner, backend, base["eos"], 3) == []
    )
    rng, tokenizer, begin = np.random.default_rng(0), ByteTokenizer(), 5
    for _ in range(6):
        [mask] = masks(solver, backend, base["eos"], begin)
        ids, allowed = [7] * begin, constraint(tokenizer, 264, json.dumps(FORM))
        while not ids[begin:] or ids[-1] not in base["eos"]:
            scores = mask(np.array([ids]), rng.normal(size=(1, 264)))
            np.testing.assert_array_equal(np.isfinite(scores[0]), allowed(ids[begin:]))
            ids.append(int(scores[0].argmax()))
        assert 0 <= json.loads(tokenizer.decode(ids[begin:]))["n"] <= 99
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert masks(solver, backend, base["eos"], 3) == []
    assert "solver: its texts are not held" in capsys.readouterr().err


def test_team_py_lets_an_agent_with_a_schema_call_its_tools_first(run, tmp_path):
    """And holds the call and, where it may call no more, the JSON to what training held them to."""
    own = with_agents(run, tmp_path / "run", format=FORM, tools=("calculator",))
    assert run_export("--run", own, "--out", out := tmp_path / "out") == 0
    plan = json.loads((out / "turns.json").read_text("utf-8"))
    plan["turns"][1]["most_calls"] = 1
    (out / "turns.json").write_text(json.dumps(plan))
    call, answer, grammars = '```call calculator\n{"expression": "3+5"}\n```', '{"n": 8}', []
    texts = [[*text.encode()] for text in ("guess", call, answer)]
    _, said = played(out, "3+5=?", texts, lambda turn: grammars.append(turn["grammar"]))
    assert said == [("planner", "guess"), ("solver", answer)]
    masks = runpy.run_path(str(out / "team_tools.py"))["masks"]
    backend = AutoTokenizer.from_pretrained(out / plan["bases"][0]["model"])
    turns = LoadedTeam(own, cli.configure_run(own, {"team.max_tool_calls": 0})).ask("1+1=?").turns
    [tool] = load_toolboxes({"solver": ["calculator"]}, "")[0].definitions
    both = form_with_calls(turns[1].form, [tool], ByteTokenizer())
    for grammar, form, firsts in zip(grammars[1:], (both, turns[1].form), ("`{", "{"), strict=True):
        [mask] = masks(plan["turns"][1] | {"grammar": grammar}, backend, [257], 3)
        allowed = np.isfinite(mask(np.array([[7] * 3]), np.zeros((1, 264)))[0])
        np.testing.assert_array_equal(allowed, constraint(ByteTokenizer(), 264, form)([]))
        assert [*np.flatnonzero(allowed)] == [*firsts.encode()]


@pytest.mark.parametrize(("form", "changes", "named"), WITHOUT)
def test_what_an_export_lacks_is_said(form, changes, named, run, tmp_path, capsys):
    own = with_agents(run, tmp_path / "run", prompt="", **changes)
    assert run_export("--run", own, "--out", out := tmp_path / "out", "--format", form) == 0
    assert f"not exported: {named}" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert named in card and '""' not in card
    if form == "peft":
        plan = json.loads((out / "turns.json").read_text())
        assert plan["lacks"].startswith("team.py plays without") and named in plan["lacks"]
        assert 'sys.stderr.write(team["lacks"])' in (out / "team.py").read_text()
        assert "`team.py` plays without" in card
    if "tools" in changes:  # the built-in model's template has none, so the prompt described them
        assert '- solver: "To call a tool, write a block' in card


def test_a_card_has_the_prompts_that_were_shown(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    config = replaced(replaced(configure(), "run.dir", str(copy)), "team.anonymous", True)
    write_settings(copy, config, Blueprint(BUILT_IN))
    assert run_export("--run", copy, "--out", out := tmp_path / "out") == 0
    card = (out / "README.md").read_text()
    assert "- planner: none\n- solver: none\n" in card and "also trained with" not in card
    assert json.loads((out / "turns.json").read_text())["lacks"] == ""


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("named", [True, False])
def test_one_rule_says_how_transformers_loads_a_base(name, named, tmp_path):
    """Published models of text and images have the text in a module of its own."""
    kind = name.partition("For")[0].lower() + ("_text" if name.endswith("ForCausalLM") else "")
    settings = {"architectures": [name]} if named else {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    images = name.endswith("ForConditionalGeneration")
    loader = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    assert huggingface.loader_of(str(tmp_path)) == loader
    inside = "model.language_model" if images else "model"
    assert peft.layers_in(str(tmp_path)) == inside
    facts = card.Facts(str(tmp_path), 3, configure(), Blueprint(BUILT_IN), "owner/name")
    card.write(tmp_path, facts, {"solver": ["solver"]}, "owner/name", True, loader)
    text = (tmp_path / "README.md").read_text()
    assert f"import {loader}, AutoTokenizer" in text and f"base = {loader}.from_pr" in text


def full_disk(folder, *_):
    (folder / "half").parent.mkdir(parents=True, exist_ok=True)
    (folder / "half").write_text("x")
    raise SafetensorError("Error while serializing: IoError: No space left on device (os error 28)")


def read_only(folder, *_):
    raise OSError(errno.EROFS, "Read-only file system", str(folder))


@pytest.mark.parametrize("fault", [full_disk, read_only])
@pytest.mark.parametrize("there", [True, False])
def test_an_export_that_cannot_be_written_leaves_nothing(fault, there, run, tmp_path, capsys,
                                                         monkeypatch):  # fmt: skip
    out = tmp_path / "out"
    if there:
        out.mkdir()
    monkeypatch.setattr(peft, "write", fault)
    assert run_export("--run", run, "--out", out) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"marft_jax: --out {out}: cannot be written (")
    assert [p.name for p in tmp_path.rglob("*")] == ["out"] * there


def test_a_place_that_is_no_folder_is_one_clear_line(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_export("--run", run, "--out", tmp_path / "file" / "out") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line


def test_the_card_of_an_imitated_run_tells_losses(tmp_path):
    config = dataclasses.replace(configure(), algo=Imitation())
    row = {"step": 3, "reward/mean": 1.0, "agent/solver/loss": 0.25, "eval/x/accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    facts = card.Facts(str(tmp_path), 3, config, Blueprint(BUILT_IN), "owner/name")
    folders = {"planner": ["planner"], "solver": ["solver"]}
    card.write(tmp_path, facts, folders, "owner/name", True)
    text = (tmp_path / "README.md").read_text()
    for told in (
        "Fine-tuned together on demonstrations",
        "for 3 steps",
        "| agent/solver/loss | 0.25 |",
        "| eval/x/accuracy | 0.5 |",
        "team.py TASK",
        "--max-loras 2 --max-lora-rank 8 --lora-modules planner=planner solver=",
    ):
        assert told in text, told
    assert "reinforcement" not in text and "reward" not in text


def test_a_card_names_files_without_their_places(models, run, tmp_path):
    data = ["/home/someone/secret/train.jsonl", "owner/name:train"]
    config = dataclasses.replace(models.config, env=Settings(data=tuple(data)))
    facts = card.Facts(str(run), 3, config, Blueprint(BUILT_IN), exporting._portable(str(run)))
    for base in ("model.gguf", ""):
        card.write(tmp_path, facts, {"solver": ["solver"]}, base)
        text = (tmp_path / "README.md").read_text()
        assert "(train.jsonl, owner/name:train)" in text and run.name in text
        assert "/home" not in text and str(run.parent) not in text


def test_a_merged_model_is_written_for_one_agent_or_for_each(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(exporting.Progress, "__call__", lambda self, *counts: shown.append(counts))
    assert run_export("--run", run, "--out", tmp_path / "a", "--format", "merged", "--agent",
                      "solver") == 0  # fmt: skip
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"solver", "README.md"}
    tensors = shown[-1][1]
    loaded, exported = shown[:-tensors], shown[-tensors:]  # in MiB, in tensors
    assert exported == [(n + 1, tensors) for n in range(tensors)] and tensors > 9
    assert loaded == sorted(loaded) and (loaded[0], loaded[-1]) == ((0, 6), (6, 6))
    folder = tmp_path / "a" / "solver"
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert names <= {p.name for p in folder.iterdir()}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["do_sample"] is True and generation["max_new_tokens"] == 24
    assert "complete model" in (tmp_path / "a" / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--agent", "solver"], "--format merged"),
        (["--format", "merged", "--agent", "judge"], "planner, solver"),
        (["--run", "nowhere"], "config.yaml"),
    ],
)
def test_what_cannot_be_exported_is_one_clear_line(run, tmp_path, flags, message, capsys):
    assert run_export("--run", run, "--out", tmp_path / "out", *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("marft_jax: ") and message in line


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert run_export("--run", run, "--out", tmp_path) == 2
    assert "new or empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("form", ["peft", "merged"])
@pytest.mark.parametrize("name", ["..", "base", "team.yaml"])
def test_no_name_leads_out_of_the_folder_or_onto_another_file(name, form, run, tmp_path, capsys):
    hostile = shutil.copytree(run, tmp_path / "run")
    text = (run / "team.yaml").read_text()
    (hostile / "team.yaml").write_text(text.replace("name: solver", f"name: '{name}'"))
    (tmp_path / "README.md").write_text("mine")
    assert run_export("--run", hostile, "--out", tmp_path / "out", "--format", form) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "agents[1].name: expected a name" in line
    assert (tmp_path / "README.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "run"]
