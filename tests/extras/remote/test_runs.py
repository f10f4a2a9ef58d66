"""Whole runs of the command, sampled by a stand-in for a server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import bounds
import proxied
import pytest
import small
from stand_in import StandIn

from marft_jax.extras.export import huggingface
from marft_jax.models.weights import tiny

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server():
    with StandIn() as server:
        yield server


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "small"
    huggingface.write_model(folder, small.base()._replace(source="tiny"), {}, 1.0, {})
    return folder


def start(run, base, url, log, *flags):
    words = (
        f"""{sys.executable} -m marft_jax.train --run.dir {run} --run.loggers none
        --model.base {base} --lora.targets {" ".join(small.QV)} --lora.rank {small.RANK}
        --lora.alpha {small.ALPHA} --algo.name grpo --algo.group_size 4 --algo.episodes 8
        --team.max_new_tokens 8 --model.context 256 --env.name scripted:Slow --run.save_every 1
        --rollout.sampler http --rollout.urls {url}""".split()
        + [*flags]
    )
    paths = f"{ROOT}:{ROOT / 'tests' / 'helpers'}"
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "1"}
    out = log.open("w")
    return subprocess.Popen(words, env=os.environ | own, stdout=out, stderr=subprocess.STDOUT)


def start_two(run, base, urls, logs, *flags):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        how = ["--mesh.coordinator", f"localhost:{probe.getsockname()[1]}", "--mesh.processes", "2"]
    how += ["--mesh.wait_seconds", "60", *flags]
    each = enumerate(zip(urls, logs, strict=True))
    return [start(run, base, url, log, *how, "--mesh.process", str(i)) for i, (url, log) in each]


def metrics(run):
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.release
def test_each_of_two_processes_asks_for_its_share_and_one_without_proof_ends_both(
    base, server, tmp_path
):
    """From the fourth step on the second process's server has adapters that do nothing."""
    logs = [tmp_path / f"{i}.log" for i in range(3)]
    with proxied.Proxy(server.url, tmp_path / "kept") as proxy:
        # two are measured at the start, and each step has two
        proxy.fault = proxied.changed_files(no_more_after(8, proxied.without("")))
        urls = [server.url, proxy.url]
        both = start_two(tmp_path / "two", base, urls, logs[:2], "--run.steps", "5")
        assert [one.wait(300) for one in both] == [1, 1], [log.read_text() for log in logs[:2]]
    assert all("adapters did not arrive" in log.read_text() for log in logs[:2])
    assert not server.places
    alone = start(tmp_path / "one", base, server.url, logs[2], "--run.steps", "3")
    assert alone.wait(300) == 0, logs[2].read_text()
    for two, one in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        names = [n for n in one if n.startswith(("reward", "agent", "episode", "tokens/action"))]
        got, expected = ({n: row[n] for n in names} for row in (two, one))
        bounds.close(got, expected, bounds.update(tiny.CONFIG), size=1.0)
    assert [row["step"] for row in metrics(tmp_path / "two")] == [1, 2, 3]
    assert metrics(tmp_path / "two")[0]["reward/std"] > 0 and not server.places


def no_more_after(files, change):
    """Changes the files that come after the first few."""
    seen = []

    def own(tensors, known):
        seen.append(known)
        return change(tensors, known) if len(seen) > files else tensors

    return own
