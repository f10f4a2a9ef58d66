"""Profiles and team files: overrides, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from marft_jax.errors import BadInput
from marft_jax.settings import config
from marft_jax.team import team_files
from marft_jax.team.profiles import Profile
from marft_jax.types import Sampling

TEAM_FILES = sorted((Path(__file__).parents[2] / "configs" / "teams").iterdir())


def team_file(tmp_path, text: str, name: str = "team.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def complaint(file: str) -> str:
    with pytest.raises(BadInput) as caught:
        team_files.load_team(file)
    message = str(caught.value)
    assert file in message
    return message.replace(file, "FILE")


def test_a_profile_overrides_the_teams_sampling_field_by_field():
    sampling = dict(temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, stop=("x",))
    team = config.Team(max_new_tokens=24, **sampling)
    assert Profile("a").sampling(team) == Sampling(24, 0.7, 0.9, 50, 0.1, ("x",))
    own = Profile("a", max_new_tokens=8, temperature=0.0, top_p=0.5, top_k=0, min_p=0.0, stop=())
    assert own.sampling(team) == Sampling(8, 0.0, 0.5, 0, 0.0)
    assert Profile("a", temperature=0).sampling(team) == Sampling(24, 0, 0.9, 50, 0.1, ("x",))


BAD = {
    "name": "", "prompt": None, "answers": "perhaps", "max_new_tokens": 2.5,
    "temperature": float("nan"), "top_p": 1.1, "top_k": -1, "min_p": -0.1, "stop": ("",),
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD.items())
def test_a_bad_field_is_refused_by_name(field, value):
    with pytest.raises(ValidationError, match=rf"\n{field}"):
        Profile(**({"name": "a"} | {field: value}))


NO_FOLDERS = ["..", ".hidden", "a.", "a\\b", "a?", "x" * 300, "Base", "team.yaml", "Turns.json"]


@pytest.mark.parametrize("name", NO_FOLDERS)
@pytest.mark.parametrize("field", ["name", "adapter"])
def test_a_name_that_could_not_be_a_folder_of_its_own_is_refused(field, name, tmp_path):
    row = {"name": "a", "answers": True} | {field: name}
    message = complaint(team_file(tmp_path, json.dumps({"agents": [row]})))
    assert message.startswith(f"FILE: agents[0].{field}: expected a name")
    assert len(message) < 300


def test_without_a_file_the_team_is_planner_and_solver():
    team = team_files.load_team(None).agents
    found = [(p.name, p.prompt, p.answers) for p in team]
    assert found == [("planner", "plan", False), ("solver", "solve", True)]


@pytest.mark.parametrize("file", TEAM_FILES, ids=lambda file: file.stem)
def test_each_shipped_team_loads_and_one_agent_answers(file):
    """The first release grades the agent before the verifier."""
    team = team_files.load_team(str(file)).agents
    named = {"trio": "actor", "quartet": "executor", "judged": "writer"}
    answering = named.get(file.stem, team[-1].name)
    assert [p.name for p in team if p.answers] == [answering]
    boxed = [r"\boxed{}" in p.prompt for p in team if p.answers]
    assert boxed == [file.stem != "judged"]  # a judge reads the whole text
    assert all(p.prompt and p.description for p in team)


def test_every_setting_of_a_profile_can_stand_in_a_file(tmp_path):
    text = """
    agents:
      - {name: a, prompt: p, description: d, answers: true, max_new_tokens: 9,
         temperature: 5e-1, top_p: 0.8, top_k: 3, min_p: 1e-2,
         adapter: x, trainable: false, init: folder, reward: "module:function",
         stop: [a, "b c"], past: y, tools: ["module:tool"]}
    """
    folder = str(tmp_path / "folder")
    profile = Profile(
        "a", "p", "d", True, "x", False, folder, "module:function", 9, 0.5, 0.8, 3, 0.01,
        ("a", "b c"), "y", ("module:tool",),
    )  # fmt: skip
    assert team_files.load_team(team_file(tmp_path, text)).agents == (profile,)


def test_the_list_of_the_first_release_loads(tmp_path):
    rows = [
        {"role": "reasoner", "prompt": "think", "with_answer": False, "device": "cuda:0"},
        {"role": "actor", "prompt": "act", "with_answer": True},
    ]
    file = team_file(tmp_path, json.dumps(rows, indent="\t"), "profiles.json")
    team = team_files.load_team(file).agents
    assert team == (Profile("reasoner", "think"), Profile("actor", "act", answers=True))


def test_the_chat_tags_that_the_first_release_spells_out_are_taken_off(tmp_path):
    spelled = ["<|im_start|>system: You act.<|im_end|>\n",
               "<|im_start|>system\nYou\nact. <|im_end|>", "You act."]  # fmt: skip
    rows = [{"role": f"a{i}", "prompt": p, "with_answer": True} for i, p in enumerate(spelled)]
    team = team_files.load_team(team_file(tmp_path, json.dumps(rows), "profiles.json")).agents
    assert [" ".join(p.prompt.split()) for p in team] == ["You act."] * 3


def test_a_missing_file_is_named(tmp_path):
    message = complaint(str(tmp_path / "none.yaml"))
    assert message == "--team.file FILE: cannot be read (No such file or directory)"


@pytest.mark.parametrize("name", ["team.yaml", "team.json"])
def test_a_file_that_does_not_parse_is_named(tmp_path, name):
    kind = "JSON" if name.endswith("json") else "YAML"
    message = complaint(team_file(tmp_path, "agents:\n  - name: [\n b", name))
    assert f": not {kind}: " in message and "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a mapping, got None"),
        ("agents:", "agents: expected a list of at most 300, got None"),
        ("members: []", "members: unknown key; known are agents, bases"),
        ("agents: [{name: a}]\nagent: 3", "agent: unknown key; did you mean 'agents'?"),
        ("agents: [{name: a, answer: true}]", "agents[0].answer: unknown key; did you mean"),
        ("agents: [1]", "agents[0]: expected a mapping, got 1"),
        ("agents: [{prompt: p}]", "agents[0].name: expected text"),
        ("[{role: a, prompt: }]", "agents[0].prompt: expected text, got None"),
        ("agents: [{name: a, format: {1: 2}}]", "agents[0].format[1].[key]: expected a valid"),
        ("agents: [{name: a}, {name: b, top_p: 2}]", "agents[1].top_p: expected a number above 0"),
        ("agents: []\nbases: {a: {lr: 0}}", "bases.a.model: expected text"),
        ("agents: [{name: a, answers: true}, {name: A}]", "expected distinct names, got 'A' twice"),
        ("agents: [{name: a}]", "expected an agent with `answers: true`, got none; add it to"),
    ],
)
def test_a_file_of_another_form_is_one_line(tmp_path, text, expected):
    message = complaint(team_file(tmp_path, text))
    assert message.startswith(f"FILE: {expected}") and "\n" not in message
