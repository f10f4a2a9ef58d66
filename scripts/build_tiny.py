"""Makes the built-in model again, from nothing, and says how good it is.

    python scripts/build_tiny.py            # measures what is there
    python scripts/build_tiny.py --write    # builds, and replaces the shipped weights

Nothing is downloaded: the recipe in ``marft_jax/models/weights/tiny.py`` writes its own
training text.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax import cli
from marft_jax.envs.arithmetic import eval_tasks
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights import tiny

TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="build and replace the weights")
    if parser.parse_args().write:
        started = time.perf_counter()
        weights, losses = tiny.build()
        tiny.save(weights, tiny.SHIPPED)
        print(f"built in {time.perf_counter() - started:.0f} s, loss {np.mean(losses[-20:]):.3f}")
    params = {path: jnp.asarray(x, jnp.float32) for path, x in tiny.tensors()}
    size = sum(x.size for x in params.values())
    print(f"{size:,} parameters, recipe {tiny.DIGEST}, {tiny.SHIPPED}")
    for name, value in quality(params).items():
        print(f"{name:24s} {value:.3f}")


def quality(params: dict[str, jax.Array], repeats: int = 2) -> dict[str, float]:
    """Shares of held-out sums of three digits, sampled at temperature 1 unless said otherwise."""
    tasks = [(t.question, t.answer) for t in eval_tasks(3, tiny.RECIPE.holdout)] * repeats
    planned = speak(params, [("plan", question) for question, _ in tasks], seed=1)
    greedy = speak(params, [("plan", question) for question, _ in tasks], seed=None)
    facts = [tiny.plan(_numbers(question)) for question, _ in tasks]
    answers = [answer for _, answer in tasks]

    def solve(plans: list[str], seed: int | None) -> list[str]:
        shown = [f"{q}\nplanner: {p}" for (q, _), p in zip(tasks, plans, strict=True)]
        return speak(params, [("solve", text) for text in shown], seed)

    solved, from_facts = solve(planned, 2), solve(facts, 3)
    careful = [s for s in from_facts if not s.startswith("maybe")]
    careful_answers = [
        a for s, a in zip(from_facts, answers, strict=True) if not s.startswith("maybe")
    ]
    argued = speak(params, [("argue", question) for question, _ in tasks], seed=4)
    alone = [(s, a) for s, a in zip(argued, answers, strict=True) if not s.startswith("maybe")]
    led = speak(params, [("lead", question) for question, _ in tasks], seed=5)
    plans = [(p, f) for p, f in zip(planned, facts, strict=True) if p != "guess"]
    return {
        "team, sampled": _right(solved, answers),
        "team, greedy": _right(solve(greedy, None), answers),
        "planner plans": len(plans) / len(planned),
        "planner's plans right": float(np.mean([p == f for p, f in plans])),
        "solver careful": len(careful) / len(from_facts),
        "careful solver right": _right(careful, careful_answers),
        "debater careful": len(alone) / len(argued),
        "careful debater right": _right(*map(list, zip(*alone, strict=True))),
        "orchestrator calls": sum("planner</call>" in text for text in led) / len(led),
    }


def speak(params, prompts: list[tuple[str, str]], seed: int | None) -> list[str]:
    """One action for each (system, user) prompt; greedy without a seed."""
    tokenizer = ByteTokenizer()
    ids = [
        tokenizer.chat([{"role": "system", "content": s}, {"role": "user", "content": u}])
        for s, u in prompts
    ]
    tokens_BT = np.full((len(ids), TOKENS), tiny.PAD, np.int32)
    for row, prompt in enumerate(ids):
        tokens_BT[row, : len(prompt)] = prompt
    lengths_B = np.array([len(prompt) for prompt in ids])
    done_B = np.zeros(len(ids), bool)
    rng = np.random.default_rng(seed)
    rows = np.arange(len(ids))
    while not done_B.all() and lengths_B.max() < TOKENS:
        logits_BV = np.asarray(_next(params, tokens_BT, lengths_B))
        noise = rng.gumbel(size=logits_BV.shape) if seed is not None else 0.0
        drawn_B = (logits_BV + noise).argmax(-1)
        tokens_BT[rows[~done_B], lengths_B[~done_B]] = drawn_B[~done_B]
        lengths_B = lengths_B + ~done_B
        done_B |= drawn_B == tiny.EOS
    return [
        tokenizer.decode(tokens_BT[i, len(prompt) : lengths_B[i]].tolist())
        for i, prompt in enumerate(ids)
    ]


@jax.jit
def _next(params, tokens_BT, lengths_B):
    b, t = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(t)[None], (b, t))
    ones_BT = jnp.ones((b, t), jnp.int32)
    batch = tiny.Batch(tokens_BT, ones_BT, positions_BT, ones_BT)  # pyright: ignore[reportArgumentType]
    logits_BTV = tiny.logits(params, batch).reshape(b, t, -1)
    return jnp.take_along_axis(logits_BTV, lengths_B[:, None, None] - 1, axis=1)[:, 0]


def _numbers(question: str) -> list[int]:
    return [int(digit) for digit in question.removesuffix("=?").split("+")]


def _right(texts: list[str], answers: list[str]) -> float:
    last = [text.replace("=", " ").split()[-1] if text else "" for text in texts]
    return float(np.mean([x == a for x, a in zip(last, answers, strict=True)]))


if __name__ == "__main__":
    with cli.boundary():
        main()
