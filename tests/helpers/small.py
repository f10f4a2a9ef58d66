"""A small random model, a team on it with adapters that matter, and episodes made by hand."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax.cli import configure
from marft_jax.engine.compiled import Shape
from marft_jax.engine.engine import Engine
from marft_jax.learning.batch import Batch
from marft_jax.learning.credit import make_credit
from marft_jax.learning.settings import Appo
from marft_jax.models import decoder, lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.families import dense
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from marft_jax.models.weights.load import BaseModel, abstract_decoder, fill, shapes_of
from marft_jax.parallel import mesh
from marft_jax.sampling.constraints import Constraint, masks_of
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.settings import config as config_lib
from marft_jax.team.assemble import make_team
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.types import MAIN, Episode, Sample, StepResult, Turn

SIZES: dict[str, Any] = dict(
    vocab_size=264, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64,
    max_position=512,
)  # fmt: skip
CONFIG = dense(**SIZES)
CONTEXT = 64
RANK, ALPHA = 3, 6.0
QV = ("q", "v")
"""The matrices of ``adapters``."""
NAMES = ("planner", "solver", "checker")


def config(**sections: Any) -> config_lib.Config:
    """The quickstart's settings with other sections."""
    return dataclasses.replace(configure(), **sections)


def config_of(**changes: Any) -> DecoderConfig:
    """The small decoder with other sizes."""
    return dense(**(SIZES | changes))


@functools.cache
def one_device() -> Mesh:
    return mesh.make_mesh(config_lib.Mesh(), jax.devices()[:1])


@functools.cache
def mesh_of(data: int, fsdp: int = 1, tensor: int = 1) -> Mesh:
    devices = jax.devices()[: data * fsdp * tensor]
    return mesh.make_mesh(config_lib.Mesh(data, fsdp, tensor), devices)


@functools.cache
def base_on(
    where: Mesh, layers: int = 2, stacked: bool = False, config: DecoderConfig = CONFIG
) -> BaseModel:
    """The same random weights, on any mesh."""
    parts = tuple(config.layers[i % config.n_layers] for i in range(layers))
    config = dataclasses.replace(config, layers=parts, stacked=stacked)
    graphdef, abstract = abstract_decoder(config, jnp.float32)
    _, in_order = abstract_decoder(dataclasses.replace(config, stacked=False), jnp.float32)
    rng = np.random.default_rng(0)

    def without_parts(path: str) -> str:
        return re.sub("/(mixer|mlp)/", "/", path)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.normal(size=shape)
        if path.endswith("scale"):
            return 1 + 0.1 * noise
        return noise if path.startswith("embed") else noise * (2 / shape[0]) ** 0.5

    shapes = shapes_of(in_order)
    tensors = [(path, draw(path, shapes[path])) for path in sorted(shapes, key=without_parts)]
    params = fill(abstract, tensors, mesh.placer(where))
    return BaseModel(config, graphdef, params, ByteTokenizer(), "small", "0123")


def base(layers: int = 2, config: DecoderConfig = CONFIG) -> BaseModel:
    return base_on(one_device(), layers, config=config)


def team(agents: int = 2, *, context: int = CONTEXT, shared: bool = False, **settings: Any) -> Team:
    """That many agents of which the last is graded; ``settings`` as in ``team_of``."""
    profiles = tuple(
        Profile(name, prompt=name[:1], answers=i == agents - 1)
        for i, name in enumerate(NAMES[:agents])
    )
    return team_of(Blueprint(profiles), context=context, shared=shared, **settings)


def with_tokenizer(team: Team, tokenizer: Tokenizer) -> Team:
    """The team with another tokenizer for all its agents."""
    return team._replace(tokenizers=(tokenizer,) * len(team.profiles))


def team_of(
    blueprint: Blueprint, *, context: int = CONTEXT, shared: bool = False,
    team_context: Any = "own", **settings: Any,
) -> Team:  # fmt: skip
    """The team of a blueprint; ``settings`` are those of the section ``team``.

    ``context`` is the model's, ``team_context`` what agents see, ``shared`` the adapter.
    """
    settings = config(
        team=config_lib.Team(**{"max_new_tokens": 8, "context": team_context, **settings}),
        lora=config_lib.Lora(mode="shared" if shared else "per_agent"),
    )
    bases = {MAIN: (ByteTokenizer(), context)}
    return make_team(settings.team, settings.lora.mode, blueprint, bases)


def adapters(n: int = 2, seed: int = 0, layers: int = 2) -> lora.Adapters:
    """Random adapters with a B that is not zero, so that each owner writes something else."""
    tree = {}
    for i, target in enumerate(QV):
        rng = np.random.default_rng([seed, i])
        d_in, d_out, *_ = CONFIG.matrices()[target][0]
        a = rng.normal(size=(n, layers, d_in, RANK)) * d_in**-0.5
        b = rng.normal(size=(n, layers, RANK, d_out)) * 0.5
        tree[target] = {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32)}
    return tree


def engine(
    where: Mesh | None = None, *, slots: int = 4, chunk: int = 4, context: int = CONTEXT,
    longest: int = 16, eos_ids: Sequence[int] = (CONFIG.vocab_size,), seed: int = 0, n: int = 3,
    layers: int = 2, reuse: bool = True, stacked: bool = False, config: DecoderConfig = CONFIG,
    forms: Any = None,
) -> Engine:  # fmt: skip
    """An engine on the small model, with its adapters loaded."""
    where = where or one_device()
    model = base_on(where, layers, stacked, config)
    made = Engine(
        model.config, model.graphdef, model.params, where, Shape(slots, chunk, context, longest),
        eos_ids=eos_ids, seed=seed, alpha=ALPHA, decode=model.tokenizer.decode, reuse=reuse,
        forms=forms,
    )  # fmt: skip
    made.load({MAIN: adapters(n, layers=layers)}, 0)
    return made


def copied(engine: Engine) -> float:
    """Prompt tokens that were copied from the prefix cache since adapters were loaded."""
    return engine.stats()["tokens/prefix_cached"]


def answers(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Submits all requests at once; their completions in the order of the requests."""
    tickets = [engine.submit(request) for request in requests]
    done: dict[int, Completion] = {}
    while engine.busy:
        done |= dict(engine.step())
    return [done[ticket] for ticket in tickets]


@functools.cache
def _scorer(layers: int, config: DecoderConfig):
    model = base(layers, config)

    def score(params, adapters, tokens_BT, lengths_B, owners_B, temperature_B):
        b, t = tokens_BT.shape
        positions_BT = jnp.broadcast_to(jnp.arange(t)[None], (b, t))
        until_BT = jnp.maximum(positions_BT, lengths_B[:, None] - 1)
        owners_BT = jnp.broadcast_to(owners_B[:, None], (b, t))
        fused = lora.fuse(adapters, lora.scale_of(adapters, ALPHA), jnp.float32)
        hidden, _ = decoder.forward(
            model.graphdef, params, tokens_BT, positions_BT, until_BT, fused,
            lora.owner_mask(owners_BT, fused),
        )  # fmt: skip
        logits = decoder.project(model.graphdef, params, hidden)
        return jax.nn.log_softmax(logits / temperature_B[:, None, None], axis=-1)

    return jax.jit(score)


def full_forward(
    adapters: lora.Adapters, prompts: Sequence[np.ndarray], actions: Sequence[np.ndarray],
    owners: Sequence[int], temperatures: Sequence[float], rows: int = 16, width: int = CONTEXT,
    config: DecoderConfig = CONFIG,
) -> list[np.ndarray]:  # fmt: skip
    """Without any cache: log-probs over the vocabulary at each action token, ``[tokens, V]``."""
    tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    own, heat = np.zeros(rows, np.int32), np.ones(rows, np.float32)
    for i, (prompt, action) in enumerate(zip(prompts, actions, strict=True)):
        whole = np.concatenate([prompt, action])
        tokens[i, : len(whole)], lengths[i] = whole, len(whole)
        own[i], heat[i] = owners[i], temperatures[i] or 1.0
    layers = adapters["q"]["a"].shape[1]
    score, params = _scorer(layers, config), base(layers, config).params
    scored = np.asarray(score(params, adapters, tokens, lengths, own, heat))
    return [
        scored[i, len(prompt) - 1 : len(prompt) - 1 + len(action)]
        for i, (prompt, action) in enumerate(zip(prompts, actions, strict=True))
    ]


def of_full_forward(requests: Sequence[Any], done: Sequence[Any]) -> list[np.ndarray]:
    """``full_forward`` of what an engine with three adapters was asked, and answered."""
    return full_forward(
        adapters(3), [r.prompt for r in requests], [c.ids for c in done],
        [r.owner for r in requests], [r.sampling.temperature for r in requests],
    )  # fmt: skip


def masked(logprobs: np.ndarray, ids: np.ndarray, constraint: Constraint) -> np.ndarray:
    """Log-probs of an action among what was allowed, from those over the vocabulary."""
    masks = masks_of(constraint, ids.tolist())
    rows = [row if mask is None else np.where(mask, row, -np.inf)
            for row, mask in zip(logprobs, masks, strict=True)]  # fmt: skip
    return np.array([row[i] - np.logaddexp.reduce(row) for row, i in zip(rows, ids, strict=True)])


def turn(
    agent: int, prompt: Sequence[int], action: Sequence[int], *, step: int = 0,
    logprobs: Sequence[float] | None = None, text: str = "a b", temperature: float = 1.0,
    sees: tuple[int, ...] = (), limit: int | None = 8,
) -> Turn:  # fmt: skip
    """A turn made by hand; its behaviour log-probs are -5 unless told."""
    return Turn(
        agent=agent, name=NAMES[agent], step=step, prompt=np.asarray(prompt, np.int32),
        action=np.asarray(action, np.int32),
        logprobs=np.asarray([-5.0] * len(action) if logprobs is None else logprobs, np.float32),
        text=text, answers=False, sees=sees, truncated=False, temperature=temperature, limit=limit,
    )  # fmt: skip


def episode(index: int, turns: Sequence[Turn], rewards: Sequence[float]) -> Episode:
    """Those turns, and one result per step; turns without another D see all before them."""
    turns = [t if t.sees else t._replace(sees=tuple(range(k))) for k, t in enumerate(turns)]
    results = [StepResult("", r, i == len(rewards) - 1) for i, r in enumerate(rewards)]
    return Episode(index, index, 0, f"task {index}", tuple(turns), results)


def samples(tasks: Iterable[int]) -> list[Sample]:
    """A sample for each of these tasks; those of one task are members of a group."""
    numbers = list(tasks)
    return [Sample(task, task, numbers[:i].count(task)) for i, task in enumerate(numbers)]


def paid(episodes: Sequence[Episode], **algo: Any) -> list[np.ndarray]:
    """The reward of each turn, credited to the last one unless told."""
    return list(map(make_credit(Appo(**algo), team(3)).pay, episodes))


def places_EJ(batch: Batch) -> np.ndarray:
    """Flat position of each decision in the rows of the one base, in acting order."""
    packed, shape = batch.parts[MAIN].rows, decisions_shape(batch)
    flat = np.arange(np.prod(shape)).reshape(shape)
    of_turns = batch.parts[MAIN].data.by_turn(packed.by_datum(flat, batch.level), batch.level)
    return batch.chain.lay(batch.chain.in_order(of_turns)).astype(int)


def rows_of(batch: Batch) -> Any:
    """The rows of the one base, ``[U, B, ...]``."""
    return batch.parts[MAIN].rows.rows


def with_rows(batch: Batch, rows: Any) -> Batch:
    """The batch with other rows of the one base."""
    part = batch.parts[MAIN]
    return batch._replace(parts={MAIN: part._replace(rows=part.rows._replace(rows=rows))})


def decisions_shape(batch: Batch) -> tuple[int, ...]:
    return rows_of(batch).decision_mask(batch.level).shape


def random_episodes(
    n: int = 6, *, agents: int = 2, steps: int = 1, seed: int = 0, longest: int = 6,
    on_policy: lora.Adapters | None = None, temperature: float = 1.0, shared: bool = False,
    group: int = 1,
) -> list[Episode]:  # fmt: skip
    """Every agent acts in every step, with random ids and rewards.

    Behaviour log-probs are those of ``on_policy`` if given, else random.
    """
    rng = np.random.default_rng(seed)
    episodes = []
    for index in range(n):
        turns = [
            turn(
                agent,
                rng.integers(0, 256, rng.integers(2, 12)),
                rng.integers(0, 256, rng.integers(1, longest + 1)),
                step=step,
                text=" ".join("w" * rng.integers(1, 4)),
                temperature=temperature,
            )
            for step in range(steps)
            for agent in range(agents)
        ]
        noise = [t._replace(logprobs=-5 + 0.3 * rng.normal(size=len(t.action))) for t in turns]
        turns = [t._replace(logprobs=t.logprobs.astype(np.float32)) for t in noise]
        episodes.append(episode(index // group, turns, rng.normal(size=steps).round(3).tolist()))
    return episodes if on_policy is None else with_policy(episodes, on_policy, shared)


def with_policy(
    episodes: Sequence[Episode], policy: lora.Adapters, shared: bool = False, width: int = 32
):
    """The episodes with the behaviour log-probs that this policy gives their actions."""
    turns = [t for e in episodes for t in e.turns]
    scored = full_forward(
        policy, [t.prompt for t in turns], [t.action for t in turns],
        [0 if shared else t.agent for t in turns], [t.temperature for t in turns], rows=64,
        width=width,
    )  # fmt: skip
    own = iter(
        t._replace(logprobs=lp[np.arange(len(t.action)), t.action])
        for t, lp in zip(turns, scored, strict=True)
    )
    return [e._replace(turns=tuple(next(own) for _ in e.turns)) for e in episodes]
