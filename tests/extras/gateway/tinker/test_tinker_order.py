"""The order of work: numbers of a model's calls, and turns of clients, without a model."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

pytest.importorskip("tinker")

from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.tinker.order import MOST_WAITING, Numbered, Worker


def test_a_number_that_comes_again_is_a_repetition_and_other_content_fails():
    numbers = Numbered()
    assert not numbers.is_repeated(1, b"x")
    [(_, promise)] = numbers.add(1, b"x", None)
    assert numbers.is_repeated(1, b"x") and numbers.promise(1) is promise
    with pytest.raises(ApiError, match="other content") as refused:
        numbers.is_repeated(1, b"y")
    assert refused.value.status == 409
    for number, status in ((0, 400), (-1, 400), (1 + MOST_WAITING, 429), (1 << 30, 429)):
        with pytest.raises(ApiError, match="numbered from 1|try again later") as refused:
            numbers.is_repeated(number, b"")
        assert refused.value.status == status
    promise.set_result(b"")
    assert not numbers.is_repeated(1 + MOST_WAITING, b"")


def test_results_of_calls_that_are_long_done_are_forgotten_and_waiting_ones_kept():
    numbers = Numbered()
    for number in range(1, 3 * MOST_WAITING):
        [(_, promise)] = numbers.add(number, b"", None)
        promise.set_result(b"")
    assert numbers.promise(1) is None and numbers.is_repeated(1, b"other")
    assert numbers.promise(2 * MOST_WAITING) is not None


def submit(worker, key, work):
    promise = Future()
    worker.submit(key, work, promise)
    return promise


def test_who_had_the_fewest_tokens_is_next_and_a_clients_own_calls_keep_their_order():
    done, gate = list[str](), threading.Event()

    def work(name, pieces, cost):
        for i in range(pieces):
            gate.wait(10)
            done.append(f"{name}{i}")
            yield cost

    with Worker() as worker:
        futures = [submit(worker, "a", lambda: work("a", 4, 100))]
        futures += [submit(worker, "b", lambda n=n: work(n, 2, 30)) for n in ("b", "c")]
        gate.set()
        for future in futures:
            future.result(10)
    assert [x for x in done if x[0] in "bc"] == ["b0", "b1", "c0", "c1"]
    assert done.index("c1") < done.index("a2")  # 4 · 30 tokens before a's third piece
    assert done[0] == "a0"  # the oldest
