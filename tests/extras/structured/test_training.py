"""Training with a form: the update learns under the mask that sampled."""

from __future__ import annotations

import bounds
import jax
import numpy as np
import pytest
from commands import code_of
from run_files import arrays_of, killed_after, lines_of

from marft_jax import train
from marft_jax.models.weights import tiny

TEAM = """
agents:
  - name: planner
    prompt: Plan.
  - name: solver
    answers: true
    tools: [calculator]
    format:
      type: object
      properties: {answer: {type: integer, minimum: 0, maximum: 27}}
      required: [answer]
      additionalProperties: false
"""
FLAGS = """--run.steps 4 --run.save_every 2 --run.loggers none --algo.name grpo --algo.kl_coef 0.1
--algo.group_size 4 --algo.episodes 8 --rollout.lag 1 --team.max_new_tokens 20
--model.context 400""".split()


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.release
def test_a_run_with_a_form_resumes_bit_for_bit_and_its_log_probs_have_no_gap(tmp_path, monkeypatch):
    (team := tmp_path / "team.yaml").write_text(TEAM)

    def run_train(run):
        assert code_of(train.main, *FLAGS, "--team.file", team, "--run.dir", run) == 0

    run_train(whole := tmp_path / "whole")
    with killed_after(3, monkeypatch):
        run_train(killed := tmp_path / "killed")
    run_train(killed)
    assert not [*killed.glob("unsaved-*")]  # it went on
    assert lines_of(killed) == lines_of(whole)
    both = [jax.tree.leaves(arrays_of(run, 4)) for run in (whole, killed)]
    for one, two in zip(*both, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    first = lines_of(whole)[0]
    assert first["agent/solver/kept"] < 0.5 < first["agent/planner/kept"]
    for name in ("planner", "solver"):
        assert first[f"agent/{name}/logprob_gap"] < bounds.logprobs(tiny.CONFIG)
