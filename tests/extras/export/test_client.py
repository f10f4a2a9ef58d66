"""``client.py`` of an exported team: what it shows the agents is what training shows them."""

from __future__ import annotations

import json
import runpy
import shlex
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

from marft_jax.cli import parse_run
from marft_jax.extras.export import turns
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.settings import config
from marft_jax.team.assemble import make_team
from marft_jax.team.team_files import load_team
from marft_jax.team.workflows import find_workflow
from marft_jax.types import MAIN, Turn

pytestmark = pytest.mark.usefixtures("one_device")

TASK = "3+5+{texts[0]}=? {x}"
FORM = {"type": "object", "properties": {"n": {"enum": [7, 12]}}, "required": ["n"],
        "additionalProperties": False}  # fmt: skip
ANN = {"name": "ann", "prompt": "plan {task}"}
BOB = {"name": "bob b", "prompt": "solve", "answers": True}
NODES = [{"id": "a", "role": "ann"}, {"id": "b", "role": "bob b", "message": "look {0}"},
         {"id": "c", "role": "ann"}, {"id": "d", "role": "bob b"}]  # fmt: skip
DEBATE = {"workflow": "debate", "agents": [ANN, BOB, {"name": "cy", "answers": True}]}
TEAMS = {
    "sequential": {"agents": [ANN, BOB]},
    "messages": {"agents": [ANN, BOB], "messages": ["first {}", "then"]},
    "dag": {"workflow": "dag", "agents": [ANN, BOB], "nodes": NODES,
            "edges": [["a", "b"], ["a", "c"], ["b", "d"], ["c", "d"]]},
    "solo": {"workflow": "solo", "agents": [ANN, BOB]},
    "debate": DEBATE,
    "judged": DEBATE | {"judge": "ann"},
}  # fmt: skip
TEXTS = ["", "a {task} b", "{texts[0]}", "<think>no</think> 7", "said</think>\n8", "a\n\nb ", None]


def made(tmp_path, name, **settings):
    (tmp_path / "team.yaml").write_text(yaml.safe_dump(TEAMS[name]))
    blueprint = load_team(str(tmp_path / "team.yaml"))
    how = config.Team(**settings), "per_agent", blueprint, {MAIN: (ByteTokenizer(), 900)}
    return make_team(*how)._replace(workflow=blueprint.workflow)


def shown_in_training(team, texts):
    """Prompts of the turns of one step, where the agents write these texts."""
    given, prompts, none = iter(texts), list[list[int]](), np.zeros(0, np.int32)
    play = find_workflow(team.workflow)(team, TASK)
    acts = next(play)
    while isinstance(acts, list):
        turns = list[Turn]()
        for act in acts:
            prompts.append(act.prompt.tolist())
            text = (next(given) or "").strip()
            name = team.names[act.agent]
            turns.append(Turn(act.agent, name, 0, none, none, none, text, True, (), False, 1.0))
        acts = play.send(turns)
    return prompts


@pytest.mark.parametrize("anonymous", [False, True])
@pytest.mark.parametrize("first", range(len(TEXTS)))
@pytest.mark.parametrize("name", TEAMS)
def test_each_agent_is_shown_what_training_shows_it(name, first, anonymous, tmp_path):
    team = made(tmp_path, name, anonymous=anonymous)
    texts = (TEXTS[first:] + TEXTS[:first]) * 2
    turns.write(tmp_path, team, 0.0)
    plan = json.loads((tmp_path / "turns.json").read_text("utf-8"))
    prompts, said = list[list[int]](), iter(texts)

    def create(messages, **_):
        prompts.append(team.tokenizers[0].chat(messages))
        message = SimpleNamespace(content=next(said))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    play = runpy.run_path(str(tmp_path / "client.py"))["play"]
    assert [*play(plan, TASK, dict.fromkeys(team.names, client))]
    assert prompts == shown_in_training(team, texts)


SERVED = {
    "sampling": {"agents": [ANN, {**BOB, "stop": ["+", "="], "top_k": 9, "max_new_tokens": 7}]},
    "formatted": {"agents": [{**ANN, "adapter": "x"}, {**BOB, "adapter": "x", "format": FORM}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.release
def test_the_commands_of_the_card_play_the_team_of_the_run(name, tmp_path, monkeypatch):
    if "format" in name:
        pytest.importorskip("llguidance")
    (tmp_path / "team.yaml").write_text(yaml.safe_dump(SERVED[name]))
    run = saved_run(tmp_path / "run", str(tmp_path / "team.yaml"))
    asked = LoadedTeam(run).ask(TASK).turns
    assert run_export("--run", run, "--out", out := tmp_path / "out") == 0
    text = (out / "README.md").read_text()
    serve = text.split("marft_jax.serve --base ")[1].splitlines()[0].split()
    monkeypatch.chdir(out)
    with served(None, parse_run(None, serve[0], serve[1:], plays_tasks=False)) as http:
        url = f"{http.base_url}/v1"
        words = [sys.executable, "client.py", TASK, "--url", url]
        played = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        client = openai.OpenAI(base_url=url, api_key="none")
        prompts, create = [], client.chat.completions.create

        def watch(extra_body, **fields):
            reply = create(extra_body=extra_body | {"return_token_ids": True}, **fields)
            prompts.append(reply.model_extra["prompt_token_ids"])
            return reply

        client.chat.completions.create = watch
        plan = json.loads((out / "turns.json").read_text("utf-8"))
        play = runpy.run_path("client.py")
        assert [*play["play"](plan, TASK, dict.fromkeys(("ann", "bob b"), client))]
    assert prompts == [turn.prompt.tolist() for turn in asked]
    assert played.stdout == "".join(f"{turn.name}: {turn.text}\n" for turn in asked)
    folders = ("x", "x") if name == "formatted" else ("ann", "bob b")
    assert shlex.join(["--lora-modules", f"ann={folders[0]}", f"bob b={folders[1]}"]) in text
    refused = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 1 and refused.stderr.startswith(url)  # it serves no more
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "changes",
    [{"workflow": "orchestrated"}, {"workflow": "package.module:function"}, {"shared": True},
     {"workflow": "program"}, {"view": lambda name, seen: seen},
     {"tools": (SimpleNamespace(sources=["calculator"]),)}],
)  # fmt: skip
def test_a_team_whose_turns_are_not_known_before_has_no_client(changes, tmp_path):
    team = made(tmp_path, "sequential")
    assert turns.is_static(team) and not turns.is_static(team._replace(**changes))


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
