"""scripts/benchmark.py: a profile names the scopes in which the time went."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def test_the_time_of_a_work_is_told_by_scope_and_pass(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    import benchmark_scopes as scopes

    def block(x):
        with jax.named_scope("dear"):
            for _ in range(20):
                x = jnp.tanh(x @ x)
        with jax.named_scope("layer_1"):
            return x + 1

    @jax.jit
    def update(x):
        return jax.grad(lambda x: jax.checkpoint(block)(x).sum())(x)

    x = jnp.ones((256, 256))
    with scopes.known() as names:
        update(x).block_until_ready()
    times = scopes.times(lambda: update(x).block_until_ready(), names)
    assert names == {"dear", "layer_1"}
    assert times["update/dear"].keys() == {"again", "backward"}
    assert all(seconds > 0 for seconds in times["update/dear"].values())
