"""Reports how well a team does on benchmarks, or on the held-out tasks of its own environment.

    python -m marft_jax.evaluate --run runs/quickstart
    python -m marft_jax.evaluate --run DIR --benchmark math500 aime2024:16@0.6 gsm8k humaneval --data FOLDER
    python -m marft_jax.evaluate --run DIR --benchmark gsm8k --compare
    python -m marft_jax.evaluate --base tiny --env.name arithmetic --samples 4 --eval.temperature 1

``--run`` takes a trained team with its settings, ``--base`` a model without adapters. Further flags
are those of training: ``--eval.temperature``, ``--env.name``, ``--team.max_new_tokens``, ... Every
response is saved as it comes: started again, the same command goes on where it ended.
"""  # noqa: E501

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from marft_jax import cli
from marft_jax.errors import Stopped
from marft_jax.plugins import load_extra


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: nothing can be written; 2: bad configuration or input; 75: stopped by
    a signal."""
    parser = cli.run_parser("marft_jax.evaluate", __doc__)
    parser.add_argument(
        "--benchmark", nargs="+", default=[], metavar="NAME[:SAMPLES][@TEMPERATURE]",
        help="benchmarks by name, or files; without it what training evaluates on",
    )  # fmt: skip
    parser.add_argument("--data", metavar="FOLDER", help="where their files are; else the hub")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per task")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N tasks of each only")
    parser.add_argument(
        "--compare", action="store_true",
        help="also the base model and a single agent, in one table",
    )  # fmt: skip
    games = load_extra("evaluation.games")
    games.add_flags(parser)
    parser.add_argument("--out", metavar="FOLDER", help="where all responses and figures go")
    with cli.boundary():
        args, rest = parser.parse_known_args(argv)
        rest += ["--eval.benchmarks", *args.benchmark] if args.benchmark else []
        rest += ["--eval.data", args.data] if args.data is not None else []
        config = cli.parse_run(args.run, args.base, rest)
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.run import evaluating
        from marft_jax.run.signals import EXIT_STOPPED
        from marft_jax.run.storage import storage_of

        if games.is_wanted(args):
            storage = storage_of(args.run or "")
            kept = storage if args.run else None
            folder = evaluating.writable_folder(args.out, kept, config.model.base)
            with storage.keeping("evaluations"):
                games.evaluate(args, config, folder)
            sys.exit(0)
        try:
            evaluating.evaluate_team(
                args.run, config, step=args.step, samples=args.samples,
                limit=args.limit, compare=args.compare, out=args.out,
            )  # fmt: skip
        except Stopped:
            sys.exit(EXIT_STOPPED)
    sys.exit(0)


if __name__ == "__main__":
    main()
