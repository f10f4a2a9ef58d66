"""Work that is measured and compared: prefill, decode, generation, update, a whole iteration."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from marft_jax.cli import configure
from marft_jax.engine.compiled import Shape
from marft_jax.engine.engine import Engine
from marft_jax.extras.planning import cost
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import resolve
from marft_jax.models.config_json import read_config
from marft_jax.models.lora import Adapters
from marft_jax.models.ops import blocks
from marft_jax.models.ops.remat import Remat
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights.load import BaseModel, decoder_on, load_base
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.sampling.bases import SamplerOfBases
from marft_jax.sampling.constraints import forms_of
from marft_jax.sampling.protocol import Completion, Request, Sampler
from marft_jax.settings import config as config_lib
from marft_jax.team.assemble import make_team
from marft_jax.team.bases import Base
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.types import MAIN, Episode, Sampling, StepResult, Turn

_SMALL = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8192, "rope_theta": 1e5, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "qwen2.5-1.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    },
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_SMALL},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_SMALL,
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "delta": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **_SMALL,
        "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
"""``config.json`` of each: 54 M dense; 177 M, 45 M chosen; 60 M with delta nets."""
OTHER = "other"
"""Name of a second base."""
PROMPT, NEW = 250, 64  # tokens of the generation and of the update, as in the README's tables
SCHEMA = '{"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, \
"number": {"type": "integer"}}, "required": ["name", "number"]}, "minItems": 100}'
"""Schema that no text of ``NEW`` tokens completes."""


class Work(NamedTuple):
    """Settings of the measurements.

    Attributes:
        tokens: of one run.
        run: does it; gives the seconds that count where those are not all that it takes.
        flops, bytes: the least that a run computes and reads; 0 where it is not counted.
        python_s: of each run, what the host takes between two steps while the device waits.
        peer: does the same in another way, in turn.
    """

    tokens: float
    run: Callable[[], float | None]
    flops: float = 0
    bytes: float = 0
    python_s: list[float] | None = None
    peer: Callable[[], float | None] | None = None


class Bench:
    """A base, and the sizes of the work."""

    def __init__(self, base: BaseModel, mesh, rank: int, repeats: int, microbatch_tokens: int):
        self.base, self.mesh, self.rank, self.repeats = base, mesh, rank, repeats
        self.microbatch_tokens = microbatch_tokens
        leaves = jax.tree.leaves(base.params)
        self.weight_bytes = sum(x.nbytes for x in leaves)
        self.block_weights = cost.active_weights(base.config)
        self.vocabulary_weights = base.config.vocab_size * base.config.d_model
        self.dtype = base.params["embed"]["embedding"].dtype

    def team(self, agents: int, apart: bool = False, **algo: Any) -> tuple[config_lib.Config, Team]:
        """A team on the base; ``apart``: every other agent on a second one of the same weights."""
        on = [OTHER if apart and i % 2 else None for i in range(agents)]
        profiles = tuple(Profile(f"agent{i}", answers=True, base=own) for i, own in enumerate(on))
        given = {"epochs": 1, "minibatches": 1, "microbatch_tokens": self.microbatch_tokens}
        adapters = {"rank": self.rank, "alpha": 2.0 * self.rank, "targets": ("q", "v")}
        config = configure(lora=adapters, algo=given | algo)
        team, mode = Blueprint(profiles, bases={OTHER: Base("copy")}), config.lora.mode
        talk = ByteTokenizer(), PROMPT + 2 * NEW
        return config, make_team(
            config.team, mode, team, dict.fromkeys(dict.fromkeys(team.on), talk)
        )

    def engine(self, rows: int, agents: int, context: int, longest: int, chunk: int = 32) -> Engine:
        config, _ = self.team(agents)
        engine = Engine(
            self.base.config,
            self.base.graphdef,
            self.base.params,
            self.mesh,
            Shape(rows, chunk, context, longest),
            eos_ids=(self.base.config.vocab_size,),  # never drawn: every row runs to its limit
            seed=0,
            alpha=config.lora.alpha,
            decode=self.base.tokenizer.decode,
            forms=forms_of(self.base.tokenizer, self.base.config.vocab_size),
        )
        engine.load({MAIN: self.adapters(agents)}, 0)
        return engine

    def adapters(self, agents: int) -> Adapters:
        """Adapters as a training begins with."""
        config, team = self.team(agents)
        settings, algorithm = (
            resolve(config, {MAIN: (config.model.base, self.base.config)}),
            find_algorithm("appo"),
        )
        learner = Learner(settings, {MAIN: self.base}, team, algorithm, self.mesh)
        return learner.init().adapters[MAIN]


def open_base(
    model: str,
    dtype: str,
    mesh,
    remat: Remat = "products",
    layers: str = "auto",
    quantize: str = "none",
) -> BaseModel:
    """A shape by name with random weights, or a real model."""
    how: Any = dict(remat=remat, layers=layers, quantize=quantize)
    settings = config_lib.Model(model, dtype, **how)
    if model not in SHAPES:
        return load_base(settings, mesh_lib.placer(mesh))
    config, graphdef, abstract = decoder_on(
        jax.default_backend(), read_config(SHAPES[model], model), settings
    )
    key = jax.random.key(0)

    def draw(keys: tuple[Any, ...], leaf: Any) -> Any:
        """One by one: drawn together, they would take three times their size."""
        if keys[-1] in ("scale", "bias"):
            return leaf.replace(jnp.ones(leaf.shape, leaf.dtype))
        own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, keys)).encode()))
        shape = jax.tree.leaves(leaf)[0].shape  # of the values, where they are packed
        drawn = jax.random.normal(own, shape, dtype) * jnp.asarray(shape[-2:][0] ** -0.5, dtype)
        plain = isinstance(leaf.get_value(), jax.ShapeDtypeStruct)
        return leaf.replace(drawn if plain else blocks.pack(drawn, quantize))

    base = nnx.map_state(draw, abstract)
    return BaseModel(config, graphdef, base, ByteTokenizer(), model, "random")


def prompts(rows: int, length: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """Random ids, nothing shared between rows."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocabulary, (rows, length)).astype(np.int32)


def play(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    owners: Sequence[int],
    new: Sequence[int],
    form: str = "",
) -> list[Completion]:
    """So many new tokens for each prompt."""
    submit(engine, prompts, owners, new, form)
    done = drain(engine)
    return [done[ticket] for ticket in sorted(done)]


def submit(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    owners: Sequence[int],
    new: Sequence[int],
    form: str = "",
) -> None:
    for i, (ids, owner, n) in enumerate(zip(prompts, owners, new, strict=True)):
        engine.submit(Request(ids, owner, Sampling(int(n)), (0, i, owner), form=form))


def drain(engine: Sampler) -> dict[int, Completion]:
    done = {}
    while engine.busy:
        done |= dict(engine.step())
    return done


@contextlib.contextmanager
def waiting() -> Iterator[list[float]]:
    """Seconds of each wait for the device."""
    seconds, fetch = [], jax.device_get

    def fetch_when_ready(x: Any) -> Any:
        started = time.perf_counter()
        jax.block_until_ready(x)
        seconds.append(time.perf_counter() - started)
        return fetch(x)

    with mock.patch.object(jax, "device_get", fetch_when_ready):
        yield seconds


def prefill(bench: Bench, rows: int) -> Work:
    """Prompts of 250 tokens, and one token each."""
    tokens = rows * PROMPT
    flops = 2 * (bench.block_weights * tokens + bench.vocabulary_weights * rows)
    return generate(bench, rows, new=1)._replace(tokens=tokens, flops=flops)


def generate(bench: Bench, rows: int, shared: int = 0, new: int = NEW, form: str = "") -> Work:
    """Prompts of 250 tokens and new ones for each row, prefill included.

    Args:
        shared: the first so many tokens are the same in all prompts.
        form: that the texts follow, see ``Request``.
    """
    engine, adapters = bench.engine(rows, 2, PROMPT + NEW, NEW), bench.adapters(2)
    ids = prompts(rows, PROMPT, bench.base.config.vocab_size)
    ids[:, :shared] = ids[0, :shared]

    def run() -> None:
        engine.load({MAIN: adapters}, 0)  # as in a training step: nothing is held from before
        play(engine, ids, dealt(rows, 2), [new] * rows, form)

    return Work(rows * new, run)


def generate_apart(bench: Bench, rows: int) -> Work:
    """``generate`` with half of the rows on a second base of the same weights."""
    bases, adapters = (MAIN, OTHER), bench.adapters(1)
    engines = {base: bench.engine(rows // 2, 1, PROMPT + NEW, NEW) for base in bases}
    sampler = SamplerOfBases(engines)
    ids = prompts(rows, PROMPT, bench.base.config.vocab_size)

    def run() -> None:
        sampler.load(dict.fromkeys(bases, adapters), 0)
        for i, own in enumerate(ids):
            sampler.submit(Request(own, 0, Sampling(NEW), (0, i, 0), base=bases[i % 2]))
        drain(sampler)

    return Work(rows * NEW, run)


def decode(bench: Bench, rows: int, agents: int) -> Work:
    """A token for every row, step by step, after short prompts; the prefill is not counted."""
    steps, short = 3 * 32, 32
    engine = bench.engine(rows, agents, short + steps + 32, steps + 1)
    ids = prompts(rows, short, bench.base.config.vocab_size)
    counted, python = steps - 32, []

    def run() -> float:
        submit(engine, ids, dealt(rows, agents), [steps + 1] * rows)
        engine.step()  # prefill, and the first chunk
        started = time.perf_counter()
        with waiting() as waited:
            drain(engine)
        seconds = time.perf_counter() - started
        python.append((seconds - sum(waited)) / counted)
        return seconds

    held = jax.eval_shape(lambda: bench.base.config.init_cache(rows, short + steps, bench.dtype))
    cache = sum(x.size * bench.dtype.itemsize for x in jax.tree.leaves(held))
    flops = 2 * (bench.block_weights + bench.vocabulary_weights) * rows
    unread = cost.unread_weights(bench.base.config, rows) / cost.block_weights(bench.base.config)
    in_layers = sum(x.nbytes for x in jax.tree.leaves(bench.base.params["layers"]))
    read = bench.weight_bytes - unread * in_layers + cache
    return Work(rows * counted, run, counted * flops, counted * read, python)


def dealt(rows: int, agents: int) -> list[int]:
    """Owner of each row."""
    return [i % agents for i in range(rows)]


def made_up(rows: int, agents: int, vocabulary: int, shared: int = 0) -> list[Episode]:
    """Episodes of one turn, of 320 tokens with 64 action tokens each.

    Args:
        shared: the first so many tokens are the same in all prompts.
    """
    ids_BT = prompts(rows, 320, vocabulary, seed=1)
    ids_BT[:, :shared] = ids_BT[0, :shared]
    rng = np.random.default_rng(2)
    logprobs = np.full(NEW, -10.8, np.float32)
    return [
        Episode(
            i,
            i,
            0,
            "",
            [turn_of(i % agents, ids[:-NEW], ids[-NEW:], logprobs)],
            [StepResult("", float(rng.random()), True)],
        )
        for i, ids in enumerate(ids_BT)
    ]


def lesson(
    bench: Bench,
    rows: int,
    agents: int,
    name: str = "reinforce",
    shared: int = 0,
    share: bool = True,
    apart: bool = False,
) -> Work:
    """One optimiser step on made-up episodes: forward, backward, Adam; no critic and no entropy
    bonus but with appo.

    Args:
        shared: as of ``made_up``.
        share: turns of a row share their prefixes.
        apart: as of ``Bench.team``.
    """
    extra = {} if name == "appo" else {"baseline": "moving", "entropy_coef": 0.0}
    config, team = bench.team(agents, apart, name=name, episodes=rows, reuse=share, **extra)
    algorithm = find_algorithm(name)
    episodes = made_up(rows, agents, bench.base.config.vocab_size, shared)
    rewards = [np.asarray([e.reward], np.float32) for e in episodes]
    shape = config.model.base, bench.base.config
    settings = resolve(config, dict.fromkeys(team.adapters, shape))
    bases = dict.fromkeys(team.adapters, bench.base)
    learner = Learner(settings, bases, team, algorithm, bench.mesh)
    batch = learner.pack(episodes, rewards)
    state = learner.init()

    def run() -> None:
        nonlocal state
        state, _, report = learner.learn(state, batch, 0)
        jax.block_until_ready((state, report))

    return Work(sum(len(t.prompt) + len(t.action) for e in episodes for t in e.turns), run)


def update(bench: Bench, rows: int, agents: int, name: str = "reinforce") -> Work:
    """That step, and the least that it computes: forward, and backward through frozen weights."""
    work = lesson(bench, rows, agents, name)
    products = 3 if name == "appo" else 2
    flops = 4 * bench.block_weights * work.tokens
    flops += 2 * products * bench.vocabulary_weights * rows * NEW
    return work._replace(flops=flops)


def iteration(bench: Bench, episodes: int = 8, mixed: bool = False, apart: bool = False) -> Work:
    """One training step of a dual team: both turns are played, then learned from with APPO.

    Args:
        mixed: tasks of 125 to 250 tokens, actions that stop by themselves after 8 to 64.
        apart: as of ``Bench.team``.
    """
    config, team = bench.team(2, apart, name="appo", episodes=episodes)
    algorithm = find_algorithm("appo")
    shape, bases = (config.model.base, bench.base.config), dict.fromkeys(team.adapters, bench.base)
    settings = resolve(config, dict.fromkeys(team.adapters, shape))
    learner = Learner(settings, bases, team, algorithm, bench.mesh)
    context, agents = PROMPT + 2 * NEW, 2 // len(bases)
    engines = {base: bench.engine(episodes, agents, context, NEW) for base in bases}
    state, step = learner.init(), 0
    rng = np.random.default_rng(4)
    lengths = rng.integers(PROMPT // 2, PROMPT, episodes) if mixed else [PROMPT] * episodes
    new = rng.integers(8, NEW, (2, episodes)) if mixed else np.full((2, episodes), NEW)
    drawn = prompts(episodes, PROMPT, bench.base.config.vocab_size, seed=3)
    tasks = [ids[:length] for ids, length in zip(drawn, lengths, strict=True)]

    def act(agent: int, ids: Sequence[np.ndarray]) -> list[Turn]:
        engine, owner = engines[team.bases[agent]], team.owners[agent]
        said = play(engine, ids, [owner] * episodes, new[agent])
        return [turn_of(agent, x, *c[:2]) for x, c in zip(ids, said, strict=True)]

    def run() -> None:
        nonlocal state, step
        for base, engine in engines.items():
            engine.load({MAIN: state.adapters[base]}, step)
        plans = act(0, tasks)
        answers = act(
            1, [np.concatenate([x[NEW:], p.action]) for x, p in zip(tasks, plans, strict=True)]
        )
        played = [
            Episode(i, i, 0, "", list(turns), [StepResult("", float(i % 2), True)])
            for i, turns in enumerate(zip(plans, answers, strict=True))
        ]
        rewards = [np.asarray([0.0, e.reward], np.float32) for e in played]
        for engine in engines.values():
            engine.release()
        batch = learner.pack(played, rewards)
        state, _, report = learner.learn(state, batch, step)
        jax.block_until_ready((state, report))
        step += 1

    return Work(float(new.sum()), run)


def turn_of(agent: int, prompt: np.ndarray, action: np.ndarray, logprobs: np.ndarray) -> Turn:
    """A graded turn whose text does not matter."""
    return Turn(
        agent=agent,
        name=f"agent{agent}",
        step=0,
        prompt=prompt,
        action=action,
        logprobs=logprobs,
        text="a",
        answers=True,
        sees=(),
        truncated=False,
        temperature=1.0,
    )
