"""Parity on this machine's devices: the same numbers, whatever computes them.

    python scripts/check_parity.py          # a line per check; exit code 1 where one failed
    python scripts/check_parity.py --json   # the same as JSON, one object per line
    python scripts/check_parity.py --write  # on a CPU: the numbers that other devices must give

All is of the built-in model in float32. Products keep all of its digits, but where a line says "as
trained": there they are what the device makes of float32 by itself (TF32 on a GPU, bfloat16 on a
TPU), and bounds are wider. Differences are relative, |x - y| / |y| of the worst array, but for
log-probs, whose differences are in nats, of the worst token.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_works import Bench, dealt, open_base, play, turn_of
from parity_operations import apart, attention_here, mesh, operation, rows_attended

from marft_jax import cli
from marft_jax.errors import BadInput, described
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.batch import Batch
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import resolve
from marft_jax.models import decoder, lora
from marft_jax.models.ops import platforms
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel import processes
from marft_jax.policy.logprobs import forward
from marft_jax.policy.rows import microbatches
from marft_jax.settings import config as config_lib
from marft_jax.types import MAIN, Episode, StepResult

FILE = Path(__file__).with_suffix(".json")
_EPISODES, _PROMPTS, _SLOTS = 8, ("plan", "solve"), 8
_GIVEN = [np.frombuffer(b"so, is it 9?", np.uint8)] * (_EPISODES * len(_PROMPTS))
"""Written in the update that is compared with a CPU's. It is unlikely and paid, so that gradients
add up; those of what was sampled cancel, and leave the rounding."""
_NEW = len(_GIVEN[0])
_PLAIN = {"normalize": "none", "entropy_coef": 0.0, "max_grad_norm": 0.0}
_AS_TRAINED = {"gpu": 2.0**-11, "tpu": 2.0**-8}
"""Rounding of a factor of float32 in a product, by platform."""


class Check(NamedTuple):
    """A difference that must not exceed its bound."""

    name: str
    bound: float
    measure: Callable[[], float]


class Subject:
    """Built-in model with the adapters of two agents, to sample from and to update.

    Args:
        layers: as of ``--model.layers``.
        precision: of products of float32; None: what the device makes of them.
        quantize: as of ``--model.quantize``.
    """

    def __init__(self, layers: str, precision: str | None, quantize: str = "none"):
        self._precise = functools.partial(jax.default_matmul_precision, precision)
        self.mesh = mesh()
        self.base = open_base("tiny", "float32", self.mesh, layers=layers, quantize=quantize)
        self._bench = Bench(self.base, self.mesh, rank=4, repeats=1, microbatch_tokens=1024)
        config, team = self._bench.team(len(_PROMPTS), name="tppo", **_PLAIN)
        every = config_lib.Lora(rank=4, alpha=8.0)
        self._config = dataclasses.replace(config, lora=every)
        self._learner = Learner(
            resolve(self._config, {MAIN: (self._config.model.base, self.base.config)}),
            {MAIN: self.base},
            team,
            find_algorithm("tppo"),
            self.mesh,
        )
        self._state = self._learner.init()
        self.adapters = self._drawn(self._state.adapters[MAIN])

    def _drawn(self, like: lora.Adapters) -> lora.Adapters:
        """Adapters whose B is not zero either, the same on every device."""
        rng = np.random.default_rng(0)
        drawn = jax.tree.map(
            lambda x: (0.1 * rng.normal(size=x.shape) * x.shape[2] ** -0.5).astype(np.float32), like
        )
        return jax.device_put(drawn, mesh_lib.replicated(self.mesh))

    @functools.cached_property
    def prompts(self) -> list[np.ndarray]:
        """What the agents are shown in each episode, in turn."""
        rng, shown = np.random.default_rng(1), []
        for _ in range(_EPISODES):
            task = {"role": "user", "content": "+".join(map(str, rng.integers(1, 10, 3))) + "=?"}
            for own in _PROMPTS:
                ids = self.base.tokenizer.chat([{"role": "system", "content": own}, task])
                shown.append(np.asarray(ids, np.int32))
        return shown

    @functools.cached_property
    def played(self) -> list[Episode]:
        """Episodes of a turn of each agent, sampled by the engine."""
        agents, turns = len(_PROMPTS), len(self.prompts)
        engine = self._bench.engine(_SLOTS, agents, 96, _NEW)
        with self._precise():
            engine.load({MAIN: self.adapters}, 0)
            said = play(engine, self.prompts, dealt(turns, agents), [_NEW] * turns)
        return self.episodes([c.ids for c in said], [c.logprobs for c in said])

    def episodes(self, actions: Sequence[Any], logprobs: Sequence[Any]) -> list[Episode]:
        """Episodes in which the agents write these, turn by turn."""
        agents = len(_PROMPTS)
        turns = [
            turn_of(i % agents, prompt, np.asarray(ids, np.int32), np.asarray(own, np.float32))
            for i, (prompt, ids, own) in enumerate(
                zip(self.prompts, actions, logprobs, strict=True)
            )
        ]
        paid = [StepResult("", 1 + i / _EPISODES, True) for i in range(_EPISODES)]
        own = [turns[i * agents :][:agents] for i in range(_EPISODES)]
        return [Episode(i, i, 0, "", own[i], [paid[i]]) for i in range(_EPISODES)]

    @functools.cached_property
    def _scorer(self) -> Callable[..., Any]:
        return self._compiled(forward)

    def score(self, actions: Sequence[Any]) -> np.ndarray:
        """Log-probs of actions through the update's forward pass, turn by turn."""
        places = np.arange(len(actions) * _NEW).reshape(len(actions), _NEW)  # rows are packed
        split, scored = mesh_lib.rows(self.mesh), np.zeros(places.shape, np.float32)
        run, scale = self._scorer, lora.scale_of(self.adapters, self._config.lora.alpha)
        for rows in microbatches(self._pack(self.episodes(actions, places)).parts[MAIN].rows.rows):
            with self._precise():
                found = run(
                    base=self.base.params, adapters=self.adapters, scale=scale,
                    r=mesh_lib.put(rows, split),
                )  # fmt: skip
            there = rows.actions.mask_BA > 0
            scored.flat[rows.actions.behaviour_BA[there].astype(int)] = np.asarray(found)[there]
        return scored

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of (graphdef, ...), compiled for this model."""
        own = functools.partial(function, self.base.graphdef)
        return jax.jit(mesh_lib.with_mesh(self.mesh, own))

    def update(self, episodes: Sequence[Episode]) -> tuple[float, dict[str, np.ndarray]]:
        """Greatest ``logprob_gap`` of an agent, and all gradients, as Adam has seen them."""
        state = jax.tree.map(jnp.copy, self._state.with_adapters({MAIN: self.adapters}))
        with self._precise():
            state, _, report = self._learner.learn(state, self._pack(episodes), 0)
        own = state.policies[MAIN].adapters_opt, state.critic_opt[MAIN]
        moments = jax.tree_util.tree_flatten_with_path(own)[0]
        named = ((jax.tree_util.keystr(path), x) for path, x in moments)
        gradients = {name: np.asarray(x) for name, x in named if ".mu" in name and x.size}
        return float(np.max(report["logprob_gap"])), gradients

    def _pack(self, episodes: Sequence[Episode]) -> Batch:
        rewards = [np.asarray([0.0, e.reward], np.float32) for e in episodes]
        return self._learner.pack(episodes, rewards)

    def logits(self) -> np.ndarray:
        """Of the model without adapters, for rows of 128 tokens."""
        height = 2 * mesh_lib.row_shards(self.mesh)
        ids_BT = np.random.default_rng(5).integers(0, 256, (height, 128)).astype(np.int32)
        positions_BT = np.broadcast_to(np.arange(128, dtype=np.int32), ids_BT.shape)

        def run(graphdef: Any, params: Any, *rows: Any) -> Any:
            hidden, _ = decoder.forward(graphdef, params, *rows)
            return decoder.project(graphdef, params, hidden)

        rows = ids_BT, positions_BT, np.full_like(ids_BT, 127)
        with self._precise():
            placed = mesh_lib.put(rows, mesh_lib.rows(self.mesh))
            return np.asarray(self._compiled(run)(self.base.params, *placed))


_subject = functools.cache(Subject)


def _exact(layers: str = "auto") -> Subject:
    return _subject(layers, "highest")


def written(subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs of all that was sampled, turn by turn."""
    turns = [turn for episode in subject.played for turn in episode.turns]
    return np.stack([t.action for t in turns]), np.stack([t.logprobs for t in turns])


def sketch(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """16 projections of each array on random signs, whose relative difference is about its own."""

    def project(name: str, x: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return (2.0 * rng.integers(0, 2, (16, x.size), np.int8) - 1) @ x.ravel().astype(float)

    return {name: project(name, x) for name, x in gradients.items()}


def other_layers() -> Subject:
    """Subject whose layers are unrolled where they are stacked here, and stacked elsewhere."""
    return _exact("unrolled" if _exact().base.config.stacked else "stacked")


def layers_apart() -> float:
    """Gradients through stacked layers, against those through unrolled ones."""
    played = _exact().played
    return apart(other_layers().update(played)[1], _exact().update(played)[1])


def engine_gap(subject: Subject) -> float:
    """Log-probs of sampled tokens by the engine, against the learner's: the worst token."""
    actions, logprobs = written(subject)
    return float(np.abs(logprobs - subject.score(actions)).max())


def own_gap(subject: Subject) -> float:
    """``logprob_gap`` of an update on what it sampled itself."""
    return subject.update(subject.played)[0]


def sampled_apart() -> float:
    """Share of tokens that stacked and unrolled layers sample differently."""
    return float(np.mean(written(_exact())[0] != written(other_layers())[0]))


def stored() -> dict[str, Any]:
    """A CPU's numbers."""
    return json.loads(FILE.read_text())


def score_apart(subject: Subject) -> float:
    """Log-probs of given actions, against a CPU's: the worst token."""
    return float(np.abs(subject.score(_GIVEN) - stored()["logprobs"]).max())


def gradients_apart(subject: Subject) -> float:
    """Gradients of an update on given actions, against a CPU's."""
    expected = stored()
    _, gradients = subject.update(subject.episodes(_GIVEN, expected["logprobs"]))
    there = {name: np.asarray(x) for name, x in expected["gradients"].items()}
    return apart(sketch(gradients), there)


def checks() -> Iterator[Check]:
    """All that is compared on this machine."""
    for reference in platforms.FORMS:
        bound = 2.0**-8 if reference.__name__ in ("_dot", "_put") else 1e-5  # bfloat16, float32
        name = f"operation {reference.__name__.lstrip('_')}"
        yield Check(name, bound, functools.partial(operation, reference))
    for dtype, bound in ((np.float32, 1e-4), (jnp.bfloat16, 2e-2)):
        form, name = attention_here(dtype).__name__, jnp.dtype(dtype).name
        name = f"{form} and its gradients, {name}"
        yield Check(name, bound, functools.partial(rows_attended, dtype))
    two = "stacked, unrolled layers"
    yield Check(f"{two}: logits", 1e-4, lambda: apart(other_layers().logits(), _exact().logits()))
    yield Check(f"{two}: sampled ids", 0.0, sampled_apart)
    yield Check(f"{two}: gradients", 1e-3, layers_apart)
    yield from models_checked("highest", 2.0**-18)
    for kind in ("int8", "int4", "nf4"):
        name = f"engine, learner on a base in {kind}: logprob_gap"
        one = functools.partial(_subject, "auto", "highest", kind)
        yield Check(name, 2.0**-15, lambda one=one: own_gap(one()))
    if jax.default_backend() in _AS_TRAINED:
        yield from models_checked(None, _AS_TRAINED[jax.default_backend()], ", as trained")


def models_checked(precision: str | None, rounding: float, note: str = "") -> Iterator[Check]:
    """Engine beside the learner, and both beside a CPU.

    Args:
        rounding: of a factor in a product. Bounds are a few times what it makes of the numbers.
    """

    def check(name: str, times: float, measure: Callable[[Subject], float]) -> Check:
        one = functools.partial(_subject, "auto", precision)
        return Check(f"{name}{note}", times * rounding, lambda: measure(one()))

    yield check("engine, learner: worst token", 64, engine_gap)
    yield check("engine, learner: logprob_gap", 8, own_gap)
    yield check("here, CPU: log-probs", 64, score_apart)
    yield check("here, CPU: gradients", 64, gradients_apart)


def outcome(check: Check) -> dict[str, Any]:
    """What was measured, or why nothing was."""
    try:
        measured, error = check.measure(), None
    except Exception as fault:  # whatever it is, the other checks go on
        measured, error = None, described(fault)
    passed = measured is not None and measured <= check.bound
    return {
        "check": check.name, "passed": passed, "measured": measured,
        "bound": check.bound, "error": error,
    }  # fmt: skip


def _readable(found: dict[str, Any]) -> str:
    state = "passed" if found["passed"] else "FAILED"
    measured = found["error"] or f"{found['measured']:.1e}"
    return f"{state}  {found['check']}: {measured}, at most {found['bound']:.1e}"


def write() -> None:
    """Stores a CPU's numbers.

    Raises:
        BadInput: this is no CPU.
    """
    if jax.default_backend() != "cpu":
        raise BadInput("--write: expected a CPU, got a faster device; set JAX_PLATFORMS=cpu")
    subject = _exact()
    logprobs = subject.score(_GIVEN).astype(float).round(6).tolist()
    found = sketch(subject.update(subject.episodes(_GIVEN, logprobs))[1])
    gradients = {name: [float(f"{x:.7g}") for x in projected] for name, projected in found.items()}
    FILE.write_text(json.dumps({"logprobs": logprobs, "gradients": gradients}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    own = parser.parse_args()
    processes.start(config_lib.Mesh())
    if own.write:
        return write()
    failed = 0
    for check in checks():
        found = outcome(check)
        failed += not found["passed"]
        shown = json.dumps(found) if own.json else _readable(found)
        print(shown, flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    with cli.boundary():
        main()
