"""Adapters that do not arrive are noticed in the play in which that begins, whatever the way.

With ``MARFT_VLLM=http://...``, a vLLM that serves the model of ``scripts/conformance.py base`` (see
the README of ``extras/remote``), the release tests plant the same faults before the real server.
"""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import numpy as np
import proxied
import pytest
import small
from stand_in import LONGEST, StandIn

from marft_jax import cli
from marft_jax.errors import RunFailed
from marft_jax.extras.remote.sampler import HttpSampler, HttpSettings
from marft_jax.models.lora import named
from marft_jax.models.weights.load import load_base
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.run.samplers import adapter_tools
from marft_jax.sampling import Request, version_of
from marft_jax.sampling.settings import SampledBase, SamplerSetup
from marft_jax.settings.config import Lora
from marft_jax.types import MAIN, Sampling

VLLM = os.environ.get("MARFT_VLLM", "")
NAMES = ("planner", "solver")


def sampled_base(base, source, lora, context, longest):
    lora = Lora(rank=lora[0], alpha=lora[1], targets=lora[2])
    models = SimpleNamespace(
        config=small.config(lora=lora), bases={MAIN: base._replace(source=source)},
        team=SimpleNamespace(adapters={MAIN: 2}),
        devices=SimpleNamespace(learning=small.one_device()),
    )  # fmt: skip
    ends, decode = tuple(base.tokenizer.eos_ids), base.tokenizer.decode
    how = base.config.vocab_size, adapter_tools(models, MAIN)
    return SampledBase(source, NAMES, ends, decode, context, longest, *how)


def small_base():
    return sampled_base(small.base(), "tiny", (small.RANK, small.ALPHA, small.QV), 256, LONGEST)


def open_http(folder, *urls, base=None, **settings):
    base = base or small_base()
    how = HttpSettings(sampler="http", urls=urls, **settings)
    return HttpSampler(SamplerSetup(how, {MAIN: base}, 0, small.ALPHA, folder, str(folder or "")))


def version(base, k):
    """Adapters after k updates."""
    size = 0.02 if len(base.tools.draw()) > 2 else 0.3  # the built-in model has more to adapt
    rng, drawn = np.random.default_rng(1), base.tools.draw()
    moved = {n: [rng.normal(size=x["b"].shape) for _ in range(9)] for n, x in drawn.items()}
    b = {n: size * own[0] + size / 8 * sum(own[1 : k + 1], 0 * own[0]) for n, own in moved.items()}
    return {n: {"a": x["a"], "b": b[n].astype(np.float32)} for n, x in drawn.items()}


def requests(n=16, length=60, most=16, **sampling):
    """Acts of both agents, with a long common beginning."""
    rng = np.random.default_rng(5)
    begin = rng.integers(3, 256, length)
    prompts = [np.concatenate([begin, rng.integers(3, 256, 4)]).astype(np.int32) for _ in range(n)]
    how = Sampling(most, **sampling)
    return [Request(ids, i % 2, how, (1, 0, i, 0, 0, 0)) for i, ids in enumerate(prompts)]


def play(sampler, base, k, asked):
    adapters = {MAIN: version(base, k)}
    sampler.load(adapters, version_of(adapters))
    found = small.answers(sampler, asked)
    sampler.verify_adapters()
    return found


@pytest.fixture(scope="module")
def server():
    with StandIn() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server, tmp_path_factory):
    with proxied.Proxy(server.url, tmp_path_factory.mktemp("kept")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def sampler(proxy, tmp_path_factory):
    return open_http(tmp_path_factory.mktemp("run"), proxy.url, answer_seconds=60.0)


def noticed(sampler, base, proxy, fault, asked):
    """A play without the fault, one with it; returns what was said."""
    proxy.fault = None
    for name in [*proxy.given]:
        proxy.ask("/v1/unload_lora_adapter", {"lora_name": name})
    for agent in NAMES:
        proxy.ask("/v1/unload_lora_adapter", {"lora_name": f"fixed-{agent}"})
    proxy.given.clear()
    proxy.state.clear()
    proxy.fault = fault if fault is proxied.in_place else None
    if fault is not proxied.in_place:
        proxy.fault = lambda proxy, route, body: (
            (200, "Success") if "unload" in route else proxy.ask(route, body)
        )
    play(sampler, base, 2, asked)
    proxy.fault = fault
    try:
        with pytest.raises(RunFailed) as error:
            play(sampler, base, 3, asked)
        return str(error.value)
    finally:
        proxy.fault = None
        sampler.release()


@pytest.mark.parametrize("name", proxied.ARRIVE_NOT)
def test_what_does_not_arrive_is_noticed_in_the_play_in_which_it_begins(name, sampler, proxy):
    """Invariant 23."""
    hot = {"temperature": 0.8} if "temperature" in name else {}
    said = noticed(sampler, small_base(), proxy, proxied.ARRIVE_NOT[name], requests(**hot))
    assert re.search(r"adapters did not arrive: http://[^ ]*: (planner|solver): .*version \w", said)


@pytest.mark.parametrize("name", proxied.NO_ANSWER)
def test_an_answer_that_is_none_costs_its_episode_and_says_why(name, sampler, proxy):
    base, asked = small_base(), requests(4)
    proxy.fault = proxied.NO_ANSWER[name]
    try:
        found = play(sampler, base, 1, asked)
    finally:
        proxy.fault = None
    assert {one.reason for one in found} == {"cancelled"}
    assert all(re.match(r"(planner|solver): http://[^ ]*: ", one.why) for one in found)
    assert sampler.stats()["sampler/failed"] == len(asked)


@pytest.mark.parametrize("name", proxied.PASSES)
def test_a_server_that_is_busy_is_asked_again(name, sampler, proxy, monkeypatch):
    monkeypatch.setattr("marft_jax.extras.remote.sampler._WAITS", (0.01,) * 8)
    monkeypatch.setattr(sampler.servers[0]._client, "timeout", 1.0)
    base, asked = small_base(), requests(2)
    proxy.state.clear()
    proxy.fault = proxied.PASSES[name]
    try:
        found = play(sampler, base, 1, asked)
    finally:
        proxy.fault = None
    assert {one.reason for one in found} <= {"length", "end"}
    assert sampler.stats()["sampler/retried"] > 0


needs_vllm = pytest.mark.skipif(not VLLM, reason="it needs MARFT_VLLM")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not VLLM:
        pytest.skip("it needs MARFT_VLLM")
    config = cli.parse([])
    where = mesh_lib.placer(small.one_device())
    loaded = load_base(config.model, where, "cpu")
    targets = tuple(named(loaded.config, config.lora.targets))
    base = sampled_base(loaded, "tiny", (config.lora.rank, config.lora.alpha, targets), 512, 32)
    with proxied.Proxy(VLLM, tmp_path_factory.mktemp("kept")) as proxy:
        sampler = open_http(tmp_path_factory.mktemp("run"), proxy.url, base=base)
        print(f"\n{VLLM}: precision {sampler.servers[0].precision:.2g}")
        yield base, proxy, sampler


@pytest.mark.release
@pytest.mark.parametrize("name", [*proxied.ARRIVE_NOT, *proxied.NO_ANSWER])
def test_before_a_real_vllm(name, real):
    base, proxy, sampler = real
    hot = {"temperature": 0.8} if "temperature" in name else {}
    asked = requests(16, length=170, most=24, **hot)
    if name in proxied.ARRIVE_NOT:
        said = noticed(sampler, base, proxy, proxied.ARRIVE_NOT[name], asked)
        print(f"\n{name}: {said}")
        assert re.search(r"did not arrive: http://[^ ]*: (planner|solver): ", said)
        return
    proxy.fault = proxied.NO_ANSWER[name]
    try:
        found = play(sampler, base, 1, asked[:4])
    finally:
        proxy.fault = None
    print(f"\n{name}: {found[0].why}")
    assert {one.reason for one in found} == {"cancelled"}
