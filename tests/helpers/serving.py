"""A team behind a real server on a loopback port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from unittest import mock

import httpx
import jax
import jax.numpy as jnp
import numpy as np

from marft_jax import cli
from marft_jax.extras.gateway import command as serve
from marft_jax.extras.gateway import warm_up
from marft_jax.extras.gateway.http import Limits, make_server
from marft_jax.run.directory import write_settings
from marft_jax.run.models import open_models
from marft_jax.run.saving import open_checkpoints
from marft_jax.run.states import restore_state
from marft_jax.team.team_files import load_team

KEY = "a key"
OF_THE_PROCESS = ("signals", "async code")
"""Threads that stay."""


def saved_run(folder, team=None, **sections):
    config = cli.configure(run={"dir": str(folder)}, rollout={"slots": 8}, **sections)
    blueprint = load_team(team)
    with open_models(config, blueprint) as models:
        fresh, rng = restore_state(models, None), np.random.default_rng(0)
        folder.mkdir()
        write_settings(folder, models.config, blueprint)
        with open_checkpoints(models, models.config.run.dir) as checkpoints:
            for step in (1, 3):
                noise = jax.tree.map(
                    lambda x: x + rng.normal(0, 0.05, x.shape).astype(x.dtype), fresh.adapters
                )
                saved = fresh.with_adapters(noise)._replace(step=jnp.int32(step))
                checkpoints.save(step, saved)
    return folder


@contextlib.contextmanager
def served(run, config=None, warm=False, **given):
    """Serves a run, or a bare base; yields a client, and after it all is gone that was begun."""
    cold = mock.patch.object(warm_up, "warm_up", lambda team: None)
    limits = given.get("limits", Limits())
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        with contextlib.nullcontext() if warm else cold:  # other servers of a module may be warm
            app = stack.enter_context(
                serve.open_app(run, config or cli.configure_run(run), **given)
            )
        server = make_server(app, limits)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        head = {"authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, headers=head, timeout=120) as client:
            try:
                while not server.started:
                    time.sleep(0.01)
                yield client
            finally:
                server.should_exit = True
                thread.join(30)
        assert not thread.is_alive()
    deadline = time.monotonic() + 60
    while left := {t for t in set(threading.enumerate()) - before if t.name not in OF_THE_PROCESS}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def events(reply):
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
