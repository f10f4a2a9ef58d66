"""Checks an environment of yours, or shows the tasks that rows of data become, before a run starts.

    python -m marft_jax.check my_module:MyEnv [--options most=20] [--episodes 20] [--steps 128]
    python -m marft_jax.check --data rows.csv [--base MODEL] [--env.name code] [--env.filters ...]

Of data it prints the number of rows, the first tasks, lengths in tokens, and rejected rows. Further
flags are those of training. To see a task as each agent is shown it, use
``python -m marft_jax.train --dry_run``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from marft_jax import cli
from marft_jax.envs.base import Task, make
from marft_jax.envs.datasets.load import RowSettings, check_weights, sift
from marft_jax.errors import BadInput, one_line, printable
from marft_jax.extras.check.playing import AGENTS, check

_SHOWN, _FAULTS, _LONGEST = 3, 5, 2000
_QUANTILES = {"shortest": 0, "median": 50, "95 %": 95, "longest": 100}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exits with 0: the environment is sound, or the data was shown; 1: the environment has faults;
    2: there is no such environment, or no task in the data."""
    parser = cli.Parser("marft_jax.check", __doc__)
    parser.add_argument("--options", nargs="+", default=(), help="its arguments, as name=value")
    parser.add_argument("--episodes", type=int, default=20, help="seeds to play")
    parser.add_argument("--steps", type=int, default=128, help="steps before an episode is left")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit for all episodes")
    parser.add_argument("--agents", nargs="+", default=AGENTS, help="who acts; the last is graded")
    parser.add_argument("--data", nargs="+", default=[], help="files or hub ids to show")
    parser.add_argument("--base", default="tiny", help="model whose tokens are counted")
    with cli.boundary():
        flags, rest = parser.parse_known_args(argv)
        if flags.data:
            _show(flags.data, flags.base, rest)
            sys.exit(0)
        if not rest or rest[0].startswith("-"):
            parser.error(f"expected package.module:Class, or --data FILE, got {' '.join(rest)!r}")
        options = ["--env.options", *flags.options] if flags.options else []
        env = cli.parse(["--env.name", *rest, *options], prog="marft_jax.check").env
        create = make(env, "train").create
        problems, remarks = check(create, flags.episodes, flags.steps, flags.seconds, flags.agents)
    faults = (f"wrong: {one_line(problem, _LONGEST)}" for problem in problems)
    verdict = f"{len(problems)} things are wrong" if problems else "sound"
    print(*map(printable, remarks), *faults, f"{printable(rest[0])}: {verdict}", sep="\n")
    sys.exit(1 if problems else 0)


def _show(sources: Sequence[str], base: str, flags: Sequence[str]) -> None:
    words = ["--env.name", "math", *flags, "--env.data", *sources]
    env = cli.parse(words, prog="marft_jax.check").env
    if not isinstance(env, RowSettings):
        raise BadInput(f"--env.name {env.name}: expected an environment of rows, such as math")
    check_weights(env)
    # after the settings are checked: JAX takes seconds to import
    from marft_jax.models.weights.sources import load_tokenizer

    try:
        tokenizer = load_tokenizer(base)
    except BadInput as error:
        raise BadInput(str(error).replace("--model.base", "--base")) from error
    for source in sources:
        for line in preview(source, env, base, lambda text: len(tokenizer.encode(text))):
            print(printable(line))
    print("to train on them: marft_jax/README.md#train-on-your-rows")


def preview(
    source: str, env: RowSettings, base: str, length: Callable[[str], int]
) -> Iterator[str]:
    """Yields lines about the tasks of a source.

    Args:
        base: the model whose tokens ``length`` counts.

    Raises:
        BadInput: the source cannot be read; or, after all lines, it has no task.
    """
    sifted = sift(source, env)
    rejected = [*sifted.bad, *sifted.left_out]
    passed = sifted.rows - len(sifted.tasks) - len(rejected)
    counts = f"{sifted.rows} rows, {len(sifted.tasks)} tasks, {len(rejected)} left out"
    yield f"{source}: {counts}" + (f", {passed} do not fit --env.filters" if passed else "")
    for task in sifted.tasks[:_SHOWN]:
        yield f"  question: {one_line(task.question)}"
        yield f"  answer:   {one_line(str(task.answer))}"
        yield from (f"  {line}" for line in env.tried(task))
    if sifted.instructed:
        yield f"{sifted.instructed} tasks have a system message, which stands above the question"
    yield from _lengths(sifted.tasks, base, length)
    yield from (f"left out: {one_line(why)}" for why in rejected[:_FAULTS])
    if more := rejected[_FAULTS:]:
        yield f"left out: {len(more)} more"
    if not sifted.rows:
        raise BadInput(f"{source}: expected rows, got none")
    if not sifted.tasks:
        fix = "name the fields (--env.question_field, --env.answer_field) or see --env.filters"
        raise BadInput(f"{source}: expected rows that are tasks, got {counts}; {fix}")


def _lengths(tasks: Sequence[Task], base: str, length: Callable[[str], int]) -> Iterator[str]:
    """Yields a line for questions, and a line for answers where these are texts."""
    answers = [task.answer for task in tasks if isinstance(task.answer, str)]
    for what, texts in ("questions", [task.question for task in tasks]), ("answers", answers):
        if texts:
            lengths = [length(text) for text in texts]
            figures = (f"{k} {np.percentile(lengths, q):.0f}" for k, q in _QUANTILES.items())
            yield f"{what} in tokens of {base}: {', '.join(figures)}"
