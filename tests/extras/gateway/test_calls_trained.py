"""Calls that are sampled and trained in a step of a real run, for every family of models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import real_bases
from families_of_calls import FAMILIES, PLAIN, call_of, tokenizer_of
from run_files import lines_of

import marft_jax
from marft_jax.engine.engine import Engine
from marft_jax.learning.learner import Learner
from marft_jax.tools import find_calls, for_model
from marft_jax.tools.calls import FORMS, find_form

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

MODELS = {
    "LlamaForCausalLM": "llama3", "Ministral3ForCausalLM": "mistral", "Qwen3ForCausalLM": "hermes",
    "GraniteForCausalLM": "granite3", "Olmo3ForCausalLM": "olmo3", "Phi3ForCausalLM": "phi4",
    "Gemma3ForCausalLM": "gemma3", "Gemma4ForCausalLM": "gemma4", "GptOssForCausalLM": "gpt-oss",
    "Qwen3MoeForCausalLM": "hermes", "Lfm2ForCausalLM": "lfm2.5", "Qwen3_5ForCausalLM": "qwen3.5",
}  # fmt: skip
"""The families of models/README.md, and how they write calls."""
RECORDED = ("olmo3", "gemma4", "lfm2.5")
"""No grammar holds their calls: a recorded call takes the place of the first action."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["n"], "additionalProperties": False}  # fmt: skip
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": ADD}]
USER = {"role": "user", "content": "go"}
SEEN: list[tuple[str, int]] = []
RECORDS: list[list[int]] = []


def play(task, client):
    """The agent calls a tool, reads its answer and writes; the number that it chose is paid."""
    messages = [{"role": "system", "content": "solve"}, USER]
    common = {"model": "solver", "tools": TOOLS}
    forced = {} if RECORDS else {"tool_choice": "required"}
    told = client.chat.completions.create(messages=messages, **common, **forced).choices[0].message
    [call] = told.tool_calls
    n = json.loads(call.function.arguments)["n"]
    answer = f"[{n + 1000}]"
    calls = [call_of("add", call.function.arguments) | {"id": call.id}]
    own = {"role": "assistant", "content": told.content, "tool_calls": calls}
    tool = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": answer}
    messages += [own, tool]
    said = client.chat.completions.create(messages=messages, **common, max_tokens=6)
    SEEN.append((answer, n))
    return n / 100 + len(said.choices[0].message.content or "") / 9


def record(monkeypatch, tokenizer):
    """Lets engines answer the first act of each episode with a recorded call, as any sampler may,
    and with log-probs that nothing depends on in REINFORCE."""
    call = {**call_of("add", {"n": 7}), "id": "call00000"}
    told = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages, tools = for_model([USER, told], TOOLS, tokenizer)
    before = tokenizer._render(messages[:1], tools=tools)
    whole = tokenizer._render(messages, prompt=False, tools=tools)[len(before) :].strip("\n")
    ids = [i for i in tokenizer.encode(whole) if i not in tokenizer.eos_ids]
    RECORDS.append([*ids, tokenizer.end_id])
    submit, step, first = Engine.submit, Engine.step, set[int]()

    def submitted(self, request):
        ticket = submit(self, request)
        if "[1007]" not in tokenizer.decode(request.prompt.tolist()):  # the tool has not answered
            first.add(ticket)
        return ticket

    def stepped(self):
        ids, logprobs = np.asarray(RECORDS[0], np.int32), np.full(len(RECORDS[0]), -1, np.float32)
        recorded = {"ids": ids, "logprobs": logprobs, "reason": "end"}
        return [(t, done._replace(**recorded) if t in first else done) for t, done in step(self)]

    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr(Engine, "step", stepped)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.release
def test_a_call_is_sampled_answered_and_learned_from(architecture, tmp_path, monkeypatch):
    name = MODELS[architecture]
    tokenizer = tokenizer_of(name)
    base = real_bases.family(tmp_path, architecture, tokenizer, max_position_embeddings=1024)
    RECORDS.clear(), SEEN.clear()
    if name in RECORDED:
        record(monkeypatch, tokenizer)
    packed, pack = [], Learner.pack

    def packs(self, episodes, *args, **more):
        packed.append((episodes, batch := pack(self, episodes, *args, **more)))
        return batch

    monkeypatch.setattr(Learner, "pack", packs)
    settings = {
        "model.base": str(base), "model.context": 1024, "team.workflow": "program",
        "team.max_new_tokens": 140, "env.name": f"{__name__}:play", "algo.name": "reinforce",
        "algo.episodes": 4, "algo.group_size": 4, "lora.rank": 2, "critic.mode": "none",
        "run.dir": str(tmp_path / "run"), "run.steps": 1, "run.loggers": "none",
        "rollout.max_failed_fraction": 0,
    }  # fmt: skip
    marft_jax.train_team(marft_jax.configure(settings))
    [(episodes, batch)], [line] = packed, lines_of(tmp_path / "run")
    assert len(episodes) == len(SEEN) == 4 and line["episode/rewritten"] == 0
    answers = dict(SEEN)
    for episode in episodes:
        asked, told = episode.turns
        [call] = find_calls(asked.action.tolist(), TOOLS, tokenizer)[1]
        answer = f"[{json.loads(call.arguments)['n'] + 1000}]"
        assert call.name == "add" and answer in answers
        assert told.prompt[: told.start].tolist() == [*asked.prompt, *asked.action]
        assert answer in tokenizer.decode(told.prompt[told.start :].tolist(), special=True)
    [part] = batch.parts.values()
    rows = part.rows.rows
    learned = np.sort(rows.actions.targets_BA[rows.actions.mask_BA > 0])
    actions = np.sort(np.concatenate([t.action for e in episodes for t in e.turns]))
    np.testing.assert_array_equal(learned, actions)  # no token of a tool's answer among them
    assert line["agent/solver/grad_norm"] > 0
    assert find_form(tokenizer) is FORMS[(FAMILIES | PLAIN)[name].form]
