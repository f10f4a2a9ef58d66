"""How a process starts."""

from __future__ import annotations

import glob
import importlib.util

import jax
import pytest

from marft_jax.parallel import processes
from marft_jax.settings import config as config_lib


@pytest.mark.parametrize("installed, chips, asked, passed_over", [
    (["libtpu"], [], "", True),
    ([], [], "", False),
    (["libtpu"], ["/dev/accel0"], "", False),
    (["libtpu"], [], "tpu", False),
])  # fmt: skip
def test_a_tpu_is_looked_for_where_there_may_be_one(
    monkeypatch, installed, chips, asked, passed_over
):
    """The compiler for TPUs, installed to make plans, does not make a run look for a TPU."""
    changed = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(
        glob, "glob", lambda pattern: [x for x in chips if x[:-1] == pattern.partition("[")[0]]
    )
    monkeypatch.setattr(jax.config, "update", lambda *setting: changed.append(setting))
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    processes.start(config_lib.Mesh())
    assert changed == [("jax_platforms", "cpu")] * passed_over
