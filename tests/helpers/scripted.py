"""A sampler that says what a test wants, and environments that need no model."""

from __future__ import annotations

import time

import numpy as np

from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.sampling.protocol import Capabilities, Completion
from marft_jax.sampling.stops import stopped_at
from marft_jax.types import StepResult

END = ByteTokenizer.END


class Scripted:
    """A sampler that says what ``speak`` makes of a request, ``slots`` at a time."""

    partial = {}

    def __init__(self, speak, slots: int = 4):
        self.capabilities = Capabilities({}, slots, streams=False)
        self._speak, self._slots, self._version = speak, slots, ""
        self._waiting, self.requests, self.batches = [], [], []

    def load(self, adapters, version):
        self._version = version

    def cancel(self, ticket):
        self._waiting = [own for own in self._waiting if own[0] != ticket]

    def start(self):
        pass

    def verify_adapters(self):
        pass

    def release(self):
        self._waiting = []

    def stats(self):
        return {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, request) -> int:
        self.requests.append(request)
        self._waiting.append((len(self.requests) - 1, request))
        return len(self.requests) - 1

    def step(self):
        now, self._waiting = self._waiting[: self._slots], self._waiting[self._slots :]
        self.batches += [now] if now else []
        done = []
        for ticket, request in now:
            ids = np.array([*self._speak(request).encode(), END], np.int32)
            ids = ids[: request.sampling.max_new_tokens]
            end = stopped_at(ids, request.sampling.stop, ByteTokenizer().decode)
            ids, why = ids[:end], "length" if end is None and ids[-1] != END else "end"
            logprobs = np.full(len(ids), -1, np.float32)
            answer = Completion(ids, logprobs, why, version=self._version)
            done.append((ticket, answer))
        return done


class Slow:
    """Wants ``steps`` steps, and answers each after a while that depends on the task."""

    delay = 0.0

    def __init__(self, steps: int = 2):
        self._left = steps

    def reset(self, seed: int) -> str:
        self._seed = seed
        return f"t{seed}"

    def step(self, turns):
        time.sleep(self.delay * (self._seed * 7 % 5))
        self._left -= 1
        said = " ".join(turn.text for turn in turns)
        reward = len(said) / 8 - self._seed
        return StepResult(f"t{self._seed} {said[-2:]!a:.6}", reward, self._left == 0)


def text(prompt) -> str:
    """A prompt of the byte tokenizer, its special tokens as <s>, <u> and <a>."""
    special = {258: "<s>", 259: "<u>", 260: "<a>", END: "<e>"}
    return "".join(special.get(i, chr(i) if i < 256 else "?") for i in prompt.tolist())
