"""Benchmark's generation on a server of vLLM that serves the same model.

python scripts/conformance.py base FOLDER                        # the built-in model, for both
vllm serve FOLDER --enable-lora --lora-modules a=ADAPTER ...     # in an environment of its own
python scripts/benchmark.py --model FOLDER --peer vllm --url http://127.0.0.1:8000 [a]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import numpy as np


def works(
    url: str, adapters: list[str], vocabulary: int, prompt: int, new: int
) -> dict[str, Callable[[], None]]:
    """Work by the names of ``benchmark.py``.

    Args:
        adapters: names under which the server has some, which the rows have in turn; none: its
            base.
    """
    asked = {"max_tokens": new, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    names = adapters or [httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]]
    rng = np.random.default_rng()  # other prompts each time: the server keeps prefixes

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            rows = rng.integers(3, min(vocabulary, 256), (8, prompt)).tolist()
            bodies = [
                asked | {"model": names[i % len(names)], "prompt": ids, "seed": i}
                for i, ids in enumerate(rows)
            ]
            posts = (client.post("/v1/completions", json=body) for body in bodies)
            for answer in await asyncio.gather(*posts):
                if answer.raise_for_status().json()["usage"]["completion_tokens"] != new:
                    raise RuntimeError(f"{url}: expected {new} tokens, got {answer.text:.200}")

    return {f"generate, 8 rows x {prompt} + {new} tokens": lambda: asyncio.run(run())}
