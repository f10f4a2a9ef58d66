"""Compiles the programs that calls need, before a server takes calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time

from rich.console import Console

from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Call
from marft_jax.extras.gateway.served_team import ServedTeam
from marft_jax.parallel.ladder import bucket
from marft_jax.run.metrics import Compilations
from marft_jax.run.reporters import Progress

_LONGEST = 1024  # tokens of a prompt
_SAMPLING = {"max_new_tokens": 2, "temperature": 0.0}
_FORM = json.dumps({"type": "string"})


def warm_up(served: ServedTeam) -> None:
    """Has prompts of each length answered: with any text, and with a form, as in calls with tools
    and schemas; new prompts, and those whose first half was read before.

    Programs for longer prompts, and for several calls at once, are compiled when the first such
    call comes.
    """
    console, began = Console(file=sys.stderr), time.monotonic()
    with Compilations() as compilations, Progress("marft_jax: compiles", console) as progress:
        team = served.team
        agents = {base: agent for agent, base in enumerate(team.bases)}.values()
        lengths = [(agent, length) for agent in agents for length in _lengths(team.contexts[agent])]
        kinds = [(*prompts, form) for prompts in lengths for form in ("", _FORM)]
        for done, (agent, length, form) in enumerate(kinds):
            progress(done, len(kinds), f", prompts of {length} tokens")
            model, encode = team.names[agent], team.tokenizers[agent].encode
            ids = encode(f"{done}. " + f"How are you, {model}? " * length)[:length]
            other = encode(f"{done} and so on, as before. " * length)
            with contextlib.suppress(ApiError):  # no form is offered
                for prompt in (ids, [*ids[: length // 2], *other][:length]):
                    call = Call(model, (), _SAMPLING, form=form, prompts=(tuple(prompt),))
                    asyncio.run(served.answer(call, ends=False))
    compiled, seconds = compilations.metrics()["device/compiled"], time.monotonic() - began
    line = f"{compiled:.0f} programs are compiled, in {seconds:.1f} s"
    print(f"marft_jax: {line}", file=sys.stderr, flush=True)


def _lengths(context: int) -> list[int]:
    """Lengths of prompts for which different programs are compiled; two tokens are left for an
    action."""
    most = min(context - 2, _LONGEST)
    return sorted({min(bucket(n, 16, rungs=2), most) for n in range(1, most + 1)})
