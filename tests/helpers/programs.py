"""Programs that are played without a model, and a tokenizer whose chat template has tools."""

from __future__ import annotations

import asyncio
import threading
import time

import small
from scripted import Scripted
from transformers import PreTrainedTokenizerFast

from marft_jax.background import DaemonThreads, users_loop
from marft_jax.extras.gateway import program
from marft_jax.models.tokenizers import tokenizer
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.workflows import find_workflow
from scripts.conformance import TEMPLATE

TAGGED = TEMPLATE
"""Calls as of Hermes and Qwen."""
BARE = TAGGED.replace("<tool_call>", "").replace("</tool_call>", "")
LLAMA = BARE.replace('"arguments"', '"parameters"').replace(
    "answer: {{ m.content }}", "answer: {{ m.content | tojson }}"
)
"""Calls as of Llama 3, which shows answers as JSON."""
MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}<|user|>{{ m.content }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "
{{- m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '[TOOL_CALLS] [' if loop.first else ', ' }}{"name": "
{{- c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{{- ']' if loop.last }}{% endfor %}{% endif %}
{%- if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Calls as of Mistral."""


def with_template(template):
    """The built-in tokenizer, as transformers reads it, with another chat template."""
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer.ByteTokenizer.FILES)
    fast.chat_template = template
    return tokenizer.Tokenizer(fast)


def user(content):
    return {"role": "user", "content": content}


def by_key(request):
    """What is sampled depends on the random stream alone, as with a model."""
    return f"{sum(request.key) % 9973:x}"


def play(
    function, monkeypatch, tasks=(0,), speak=by_key, max_failed=0.0, team=None, over=None, **rollout
):
    """Plays a program; the episodes, and the engine that answered. ``over`` is set after it."""
    source = program.source(function, "train")
    engine, team = Scripted(speak), team or small.team(2, context=200)
    workflow = find_workflow("program")
    played = Rollout(
        engine, team, workflow, source.create, DaemonThreads(), max_failed=max_failed, **rollout
    ).play(small.samples(tasks), 3)
    source.close()
    if over is not None:
        over.set()
    deadline = time.monotonic() + 60
    while "program" in [t.name for t in threading.enumerate()] or asyncio.all_tasks(users_loop()):
        assert time.monotonic() < deadline, "a program or the endpoint is left"
        time.sleep(0.01)
    return played, engine


def turns_of(played):
    """What repeats of the turns of each episode."""
    return [[(t.name, t.prompt.tolist(), t.action.tolist(), t.sees, t.start) for t in e.turns]
            for e in played.episodes]  # fmt: skip
