"""The order of work: numbers of a model's calls, and turns of clients, without a model."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("tinker")

from marft_jax.extras.gateway.tinker.order import Numbered, Worker
from marft_jax.extras.gateway.tinker.wire import TinkerError


def test_calls_begin_in_the_order_of_their_numbers_whenever_they_come():
    numbers = Numbered[str]()
    assert numbers.ready(3, "c") == [] and numbers.ready(2, "b") == []
    assert numbers.ready(1, "a") == [(1, "a"), (2, "b"), (3, "c")]
    assert numbers.done == 3


def test_a_number_that_comes_again_is_a_repetition_and_other_content_fails():
    numbers = Numbered[str]()
    assert not numbers.is_repeated(1, b"x")
    numbers.note(1, b"x")
    assert numbers.is_repeated(1, b"x")
    with pytest.raises(TinkerError, match="other content") as refused:
        numbers.is_repeated(1, b"y")
    assert refused.value.status == 409
    for number in (0, -1, 1 << 30):
        with pytest.raises(TinkerError, match="numbered from 1"):
            numbers.is_repeated(number, b"")


def test_who_had_the_fewest_tokens_is_next_and_a_clients_own_calls_keep_their_order():
    done, gate = list[str](), threading.Event()

    def work(name, pieces, cost):
        for i in range(pieces):
            gate.wait(10)
            done.append(f"{name}{i}")
            yield cost

    with Worker() as worker:
        futures = [worker.submit("a", lambda: work("a", 4, 100))]
        futures += [worker.submit("b", lambda n=n: work(n, 2, 30)) for n in ("b", "c")]
        gate.set()
        for future in futures:
            future.result(10)
    assert [x for x in done if x[0] in "bc"] == ["b0", "b1", "c0", "c1"]
    assert done.index("c1") < done.index("a2")  # 4 · 30 tokens before a's third piece
    assert done[0] == "a0"  # the oldest


def test_a_failure_is_its_own_clients_alone():
    def fails():
        yield 1
        raise ValueError("mine")

    def passes():
        yield 1
        return 7

    with Worker() as worker:
        first, other = worker.submit("a", fails), worker.submit("b", passes)
        again = worker.submit("a", passes)
        with pytest.raises(ValueError, match="mine"):
            first.result(10)
        assert other.result(10) == again.result(10) == 7
