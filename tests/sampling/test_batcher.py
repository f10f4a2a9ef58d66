"""What mixes the requests of several callers loses none of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from scripted import Scripted

from marft_jax.errors import BadInput, RunFailed
from marft_jax.sampling.batcher import Batcher
from marft_jax.sampling.protocol import Request
from marft_jax.types import Sampling


def asked(**more) -> Request:
    return Request(np.array([1, 2], np.int32), 0, Sampling(4, 1.0), (0, 0, 0), **more)


def test_adapters_that_others_replace_before_they_are_loaded_leave_nobody_waiting():
    begun, go_on = threading.Event(), threading.Event()

    def speak(request):
        begun.set()
        go_on.wait(60)
        return "a"

    sampler = Scripted(speak)
    with Batcher(sampler) as batcher:
        first = batcher.submit(asked())
        assert begun.wait(60)
        loads = [batcher.load({}, version) for version in ("one", "two", "three")]
        go_on.set()
        assert [load.result(60) for load in loads] == [None] * 3
        assert first.result(60).version == ""
        assert batcher.submit(asked()).result(60).version == "three"


def test_a_request_that_the_sampler_cannot_serve_is_refused_in_one_line():
    sampler = Scripted(lambda request: "a")
    sampler.capabilities = sampler.capabilities._replace(masks_choices=False)
    with Batcher(sampler) as batcher:
        with pytest.raises(BadInput, match="cannot restrict what it draws; use engine"):
            batcher.submit(asked(form="a schema"))
        assert batcher.submit(asked()).result(60).version == ""


def test_a_sampler_that_failed_to_serve_goes_on_serving():
    """A server elsewhere may be gone for a while: whoever waits hears of it; others are served."""

    class Fails(Scripted):
        fails = True

        def load(self, adapters, version):
            if self.fails:
                raise RunFailed("no server")
            super().load(adapters, version)

    sampler = Fails(lambda request: "a")
    with Batcher(sampler) as batcher:
        for expected in (batcher.load({}, "1"), batcher.load({}, "1")):
            with pytest.raises(RunFailed, match="the sampler has failed: RunFailed: no server"):
                expected.result(60)
        sampler.fails = False
        batcher.load({}, "2").result(60)
        assert batcher.submit(asked()).result(60).version == "2" and batcher.alive


def test_a_request_that_comes_after_a_call_between_steps_is_handed_over_after_it():
    """Also where both come while the sampler's thread is between two steps."""
    seen = list[str]()

    def come():
        asks.append(batcher.run_between_steps(lambda: seen.append("call")))
        asks.append(batcher.submit(asked()))

    asks = []
    with Batcher(Scripted(lambda request: seen.append("request") or "a")) as batcher:
        batcher.run_between_steps(come).result(60)
        for ask in asks:
            ask.result(60)
    assert seen == ["call", "request"]
