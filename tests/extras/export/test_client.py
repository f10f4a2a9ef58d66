"""``client.py`` of an exported team: what it shows the agents is what training shows them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import yaml
from serving import saved_run, served
from test_export import run_export
from transformers import PreTrainedTokenizerFast

from marft_jax.cli import configure, parse_run
from marft_jax.extras.export import turns
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.run.models import open_models
from marft_jax.team.profiles import BUILT_IN
from marft_jax.team.prompts import State
from marft_jax.team.team_files import Blueprint
from marft_jax.types import Turn

pytestmark = pytest.mark.usefixtures("one_device")

TASK = "3+5+{texts[0]}=? {x}"
FORM = {"type": "object", "properties": {"n": {"enum": [7, 12]}}, "required": ["n"],
        "additionalProperties": False}  # fmt: skip
ANN = {"name": "ann", "prompt": "plan {task}"}
BOB = {"name": "bob b", "prompt": "solve", "answers": True}
NODES = [
    {"id": "a", "role": "ann"},
    {"id": "b", "role": "bob b", "message": "look {0}"},
    {"id": "c", "role": "ann"},
    {"id": "d", "role": "bob b"},
]
DEBATE = {"workflow": "debate", "agents": [ANN, BOB, {"name": "cy", "answers": True}]}
TEAMS = {
    "sequential": {"agents": [ANN, {**BOB, "stop": ["+", "="], "top_k": 9, "max_new_tokens": 7}]},
    "dag": {"workflow": "dag", "agents": [ANN, BOB], "nodes": NODES,
            "edges": [["a", "b"], ["a", "c"], ["b", "d"], ["c", "d"]]},
    "solo": {"workflow": "solo", "agents": [ANN, BOB]},
    "debate": DEBATE,
    "judged": DEBATE | {"judge": "ann"},
    "formatted": {"agents": [ANN, {**BOB, "format": FORM}]},
    "one adapter": {"agents": [{**ANN, "adapter": "both"}, {**BOB, "adapter": "both"}]},
}  # fmt: skip


@pytest.fixture(scope="module", params=[*TEAMS, "nameless"])
def exported(request, tmp_path_factory, one_device):
    """A run of a team, and its export."""
    top, name = tmp_path_factory.mktemp("client"), request.param
    team = TEAMS["dag" if name == "nameless" else name]
    (top / "team.yaml").write_text(yaml.safe_dump(team))
    changes = {"team": {"anonymous": True}} if name == "nameless" else {}
    run = saved_run(top / "run", str(top / "team.yaml"), **changes)
    assert run_export("--run", run, "--out", top / "out") == 0
    return run, top / "out"


@pytest.fixture(scope="module")
def models():
    with open_models(configure(), Blueprint(BUILT_IN)) as opened:
        yield opened


def test_each_agent_is_shown_what_training_shows_it(exported):
    run, out = exported
    asked = LoadedTeam(run).ask(TASK).turns
    plan = json.loads((out / "turns.json").read_text("utf-8"))
    play = runpy.run_path(str(out / "client.py"))["play"]
    with served(run) as http:
        client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
        prompts, create = [], client.chat.completions.create

        def watch(extra_body, **fields):
            reply = create(extra_body=extra_body | {"return_token_ids": True}, **fields)
            prompts.append(reply.model_extra["prompt_token_ids"])
            return reply

        client.chat.completions.create = watch
        texts = [*play(plan, TASK, {model.id: client for model in client.models.list()})]
    assert prompts == [turn.prompt.tolist() for turn in asked]
    assert texts == [(turn.name, turn.text) for turn in asked]


def test_the_commands_of_the_card_play_the_exported_team(exported, monkeypatch):
    run, out = exported
    text = (out / "README.md").read_text()
    serve = text.split("marft_jax.serve --base ")[1].splitlines()[0].split()
    monkeypatch.chdir(out)
    with served(None, parse_run(None, serve[0], serve[1:], plays_tasks=False)) as http:
        url = f"{http.base_url}/v1"
        words = [sys.executable, "client.py", TASK, "--url", url]
        played = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    asked = LoadedTeam(run).ask(TASK).turns
    assert played.stdout == "".join(f"{turn.name}: {turn.text}\n" for turn in asked)
    names = {turn.name for turn in asked}
    assert all(f"{name}=" in text for name in names) and "--max-loras" in text
    refused = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and refused.stderr.startswith(url)  # it serves no more
    assert "Traceback" not in refused.stderr


TEXTS = ["", "a {task} b", "{texts[0]}", "<think>no</think> 7", "said</think>\n8", "a\n\nb ", None]


@pytest.mark.parametrize("anonymous", [False, True])
@pytest.mark.parametrize("texts", [TEXTS[i:] + TEXTS[:i] for i in range(len(TEXTS))])
def test_texts_of_others_are_shown_as_training_shows_them(texts, anonymous, models, tmp_path):
    team = models.team._replace(anonymous=anonymous)
    turns.write(tmp_path, team, 0.0)
    plan = json.loads((tmp_path / "turns.json").read_text("utf-8"))
    shown, said = [], iter(texts)

    def create(messages, **_):
        shown.append(messages)
        message = SimpleNamespace(content=next(said))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    play = runpy.run_path(str(tmp_path / "client.py"))["play"]
    seen, none = list[Turn](), np.zeros(0, np.int32)
    for agent, (name, text) in enumerate(play(plan, "1+1", dict.fromkeys(team.names, client))):
        assert shown[-1] == team.shown(agent, State("1+1"), seen)
        assert text == (texts[agent] or "").strip()
        seen.append(Turn(agent, name, 0, none, none, none, text, True, (), False, 1.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"workflow": "orchestrated"},
        {"workflow": "package.module:function"},
        {"workflow": "program"},
        {"workflow": "players"},
        {"shared": True},
        {"view": lambda name, seen: seen},
        {"tools": (SimpleNamespace(sources=["calculator"]),)},
    ],
)
def test_a_team_whose_turns_are_not_known_before_has_no_client(changes, models):
    assert turns.is_static(models.team) and not turns.is_static(models.team._replace(**changes))


NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort or '' }}"
)
BOTH = NO_SYSTEM + THINKS.partition("{% endfor %}")[2]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("thinking", [None, False, True, "low"])
@pytest.mark.parametrize("template", [NO_SYSTEM, THINKS, BOTH, None])
def test_other_servers_render_the_prompts_of_training(template, thinking, system):
    def backend():
        return PreTrainedTokenizerFast.from_pretrained(ByteTokenizer.FILES)

    fast = backend()
    fast.chat_template = template
    tokenizer = Tokenizer(fast)
    if thinking is not None and template and (not thinking or "think" in template):
        tokenizer.think(thinking)
    messages = [{"role": "system", "content": "sol{v}e"}, {"role": "user", "content": "1 + 1"}]
    messages = messages if system else messages[1:]
    given = {"chat_template": tokenizer.template(), "tokenize": False}
    text = backend().apply_chat_template(messages, add_generation_prompt=True, **given)
    assert tokenizer.encode(text) == tokenizer.chat(messages)
