"""Fine-tunes a team on demonstrations: a supervised start, before reinforcement learning or alone.

    python -m marft_jax.imitate --out runs/start --demonstrations 200
    python -m marft_jax.imitate --out runs/start --data mine.jsonl --run.steps 100
    python -m marft_jax.imitate --out runs/again --data runs/first/transcripts/*.jsonl --min_reward 1
    python -m marft_jax.train --lora.init runs/start

A demonstration is a line of JSON: ``{"task": ..., "turns": [{"agent": ..., "text": ...}, ...]}``,
or one of a transcript. Each is played through the team's own workflow; every agent learns its own
turns, given the prompts that it will see (the loss is the cross-entropy of their tokens). A step
takes the next ``algo.episodes`` demonstrations; each pass over all of them is shuffled anew. Further
flags are those of training. The same command goes on where it ended, and so does ``--out`` alone.
"""  # noqa: E501

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from marft_jax import cli
from marft_jax.learning.settings import Imitation
from marft_jax.settings.setting import check_local


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: could not go on; 2: bad input; 75: stopped by a signal; finished
    steps are saved."""
    parser = cli.Parser("marft_jax.imitate", __doc__)
    parser.add_argument("--out", metavar="DIR", required=True, help="the run directory")
    parser.add_argument("--data", metavar="FILE", nargs="+", default=[], help="demonstrations")
    parser.add_argument(
        "--demonstrations", metavar="N", type=int, default=0,
        help="N that the environment offers, of tasks apart from those that training begins with",
    )  # fmt: skip
    parser.add_argument(
        "--min_reward", metavar="R", type=float, help="only those that earn as much"
    )
    with cli.boundary():
        args, rest = parser.parse_known_args(argv)
        check_local("--out", args.out, is_run=True)
        config = cli.parse_training([*rest, "--run.dir", args.out, "--algo.name", Imitation.name])
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.parallel import processes
        from marft_jax.run.imitation import Wanted, imitate_team

        wanted = Wanted(args.data, args.demonstrations, args.min_reward)
        code = processes.end_together(lambda: imitate_team(config, wanted))
    sys.exit(code)


if __name__ == "__main__":
    main()
