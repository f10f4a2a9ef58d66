"""A server that answers as vLLM or SGLang does, from our own engine in float32.

Its answers have the fields that ``extras.remote`` reads, as a real vLLM 0.32 sent them, and as the
public source of SGLang (``http_server.py``, ``io_struct.py``) has them.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import small
from safetensors.numpy import load_file, save_file

from marft_jax.interop import peft
from marft_jax.models import lora
from marft_jax.sampling import Batcher, Request
from marft_jax.types import MAIN, Sampling

ROOM = 8  # adapters, each in a place of the engine's stack
LONGEST = 32
ROUTES = {
    "vllm": ("/version", "/v1/completions", "/v1"),
    "sglang": ("/get_model_info", "/generate", ""),
}


class JsonHandler(BaseHTTPRequestHandler):
    """Answers ``server.answer(route, body)``: a status with JSON or text, or None to hang up."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._reply(None)

    def do_POST(self):
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body):
        found = self.server.answer(self.path, body)
        if found is None:
            self.close_connection = True
            return
        status, answer = found
        sent = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked has left
            self.wfile.write(sent)

    def log_message(self, *about):
        pass


class JsonServer(ThreadingHTTPServer):
    """Serves in a thread while it is in a ``with``."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), JsonHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.answer = lambda route, body: None  # open connections end, too
        self.shutdown()
        self.server_close()


def joined(each):
    """Tensors of each expert, in one for all as of peft, under the names of published files."""
    found, by_stack = {}, {}
    for name, tensor in each.items():
        stem, e, piece, letter = re.fullmatch(
            r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.lora_([AB])\.weight", name
        ).groups()
        by_stack.setdefault((stem, letter), {})[int(e), piece] = tensor
    for (stem, letter), own in by_stack.items():
        n = 1 + max(e for e, _ in own)
        for pieces, inner in ((["gate_proj", "up_proj"], ".base_layer"), (["down_proj"], "")):
            if letter == "A":  # the gate's and the other's are one
                rows = [own[e, pieces[0]] for e in range(n)]
                whole = np.concatenate(rows)
            else:
                both = [np.concatenate([own[e, p] for p in pieces]) for e in range(n)]
                whole = np.stack(both, axis=-1).reshape(len(both[0]), -1)
            found[f"{stem}{inner}.lora_{letter}.weight"] = whole
    return found


class StandIn(JsonServer):
    """The small model behind the routes of a server.

    Args:
        kind: vllm or sglang.
        logprobs: processed or raw, as of vLLM's ``--logprobs-mode``; SGLang's are of the policy.
        rounding: deviation of the noise in its log-probs.
        config, targets: its base, and what it adapts.

    Attributes:
        each_expert: it reads tensors of each expert; False: those of all in one; None: none.
    """

    def __init__(
        self, kind="vllm", logprobs="processed", rounding=0.0, context=256, model="base",
        config=small.CONFIG, targets=small.QV,
    ):  # fmt: skip
        super().__init__()
        self.kind, self.logprobs, self.rounding = kind, logprobs, rounding
        self.context, self.model, self.each_expert = context, model, False
        self.engine = small.engine(
            slots=16, chunk=4, context=context, longest=LONGEST, n=ROOM, eos_ids=(),
            layers=config.n_layers, config=config,
        )  # fmt: skip
        self.places, self.lock = {}, threading.Lock()
        stack = lora.empty(config, adapters=ROOM, rank=small.RANK, targets=targets)
        self.stack = jax.tree.map(np.array, jax.device_get(stack))
        self.noise = np.random.default_rng(0)
        self.batcher = Batcher(self.engine)

    def __enter__(self):
        self.batcher.__enter__()
        self._reload()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.batcher.__exit__()

    def _reload(self):
        self.batcher.load({MAIN: jax.tree.map(jnp.asarray, self.stack)}, "0").result()

    def restart(self):
        """Forgets the adapters, as a server that was killed and started."""
        self.places.clear()

    def answer(self, route, body):
        known, generate, adapters = ROUTES[self.kind]
        if route == known:
            return 200, {"version": "0.32.0"}
        if route == "/v1/models":
            names = [(self.model, None), *((name, self.model) for name in self.places)]
            each = [{"id": n, "parent": p, "max_model_len": self.context} for n, p in names]
            return 200, {"object": "list", "data": each}
        if route == f"{adapters}/load_lora_adapter":
            return self._load(body)
        if route == f"{adapters}/unload_lora_adapter":
            found = self.places.pop(body["lora_name"], None)
            return (404, {"error": "cannot be found"}) if found is None else (200, "Success")
        if route == generate:
            return (self._completion if self.kind == "vllm" else self._generation)(body)
        return 404, {"detail": "Not Found"}

    def _load(self, body):
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.places and not body.get("load_inplace"):
            why = f"The lora adapter '{name}' has already been loaded."
            return 400, {"error": {"message": why}}
        if not path.is_dir():
            return 404, {"error": {"message": f"No adapter found for {path}"}}
        try:
            adapter = self._read(path)
        except ValueError as error:
            return 500, {"error": {"message": f"Call to add_lora method failed: {error}"}}
        with self.lock:
            free = next(n for n in range(ROOM) if n not in self.places.values())
            place = self.places.get(name, free)
            scale = adapter.scale / (small.ALPHA / small.RANK)
            for target, pair in self.stack.items():
                for layer in range(pair["a"].shape[1]):
                    a, b = adapter.matrices.get((target, layer), (0.0, 0.0))
                    pair["a"][place, layer], pair["b"][place, layer] = a, b * scale
            schedule = self.engine._schedule
            forget = schedule.forget
            if name in self.places:  # in place: the prefix cache stays
                schedule.forget = lambda: None
            try:
                self._reload()
            finally:
                schedule.forget = forget
            self.places[name] = place
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _read(self, path):
        """Reads the spelling that it knows: vLLM refuses the other one, SGLang leaves it out."""
        tensors, own = load_file(path / peft.WEIGHTS), path.parent / f"read-{path.name}"
        each = {n for n in tensors if re.search(r"\.experts\.\d+\.", n)}
        stacked = {n for n in tensors if re.search(r"\.experts\.(base|lora)", n)}
        other = (stacked | each) - {True: each, False: stacked, None: set()}[self.each_expert]
        if other and self.kind == "vllm":
            raise ValueError(f"expected other target modules, received {sorted(other)[0]}")
        found = {n: x for n, x in tensors.items() if n not in stacked | each}
        if self.each_expert:
            found |= joined({n: tensors[n] for n in each})
        else:
            found |= {n: tensors[n] for n in stacked}
        own.mkdir()
        save_file(found, own / peft.WEIGHTS)
        settings = json.loads((path / peft.CONFIG).read_text()) | {"target_parameters": None}
        (own / peft.CONFIG).write_text(json.dumps(settings))
        try:
            return peft.read(own)
        finally:
            shutil.rmtree(own)

    def _sample(self, prompt, owner, seed, longest, ends, s):
        sampling = Sampling(longest, s["temperature"], s["top_p"], max(s["top_k"], 0), s["min_p"])
        key = (seed % 2**31, seed // 2**31 % 2**31, 0, 0, 0, 0)
        request = Request(np.asarray(prompt, np.int32), owner, sampling, key)
        found: Future = self.batcher.submit(request)
        done = found.result()
        at = [i for i, token in enumerate(done.ids.tolist()) if token in ends]
        ids, logprobs = (x[: at[0] + 1 if at else None] for x in (done.ids, done.logprobs))
        if self.kind == "vllm" and (self.logprobs == "raw" or s["top_k"] > 0):
            one = [request.prompt], [ids], [owner], [1.0]
            stack = jax.tree.map(jnp.asarray, self.stack)
            [scored] = small.full_forward(stack, *one, rows=1, width=self.context)
            logprobs = scored[np.arange(len(ids)), ids]
            if self.logprobs == "processed":  # of what the filter leaves
                kept = np.sort(scored, axis=-1)[:, -s["top_k"] :]
                logprobs = logprobs - np.logaddexp.reduce(kept, axis=-1)
        noise = self.noise.normal(size=len(ids)) * self.rounding * -np.expm1(logprobs)
        return ids.tolist(), (logprobs + noise).tolist(), "stop" if at else "length"

    def _owner(self, name):
        return -1 if name in (None, self.model) else self.places[name]

    def _completion(self, body):
        if (name := body["model"]) not in {self.model, *self.places}:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        how = body["seed"], body["max_tokens"], body["stop_token_ids"], body
        ids, logprobs, why = self._sample(body["prompt"], self._owner(name), *how)
        told = {"token_logprobs": logprobs, "tokens": ["?"] * len(ids)}
        choice = {"index": 0, "text": "?", "logprobs": told, "finish_reason": why, "token_ids": ids}
        return 200, {"object": "text_completion", "model": name, "choices": [choice]}

    def _generation(self, body):
        name, s = body.get("lora_path"), body["sampling_params"]
        if name is not None and name not in self.places:
            why = f"The following requested LoRA adapters are not loaded: {name}"
            return 400, {"error": {"message": why}}
        ends = [] if s["ignore_eos"] else s["stop_token_ids"]
        how = s["sampling_seed"], s["max_new_tokens"], ends, s
        ids, logprobs, why = self._sample(body["input_ids"], self._owner(name), *how)
        tokens = [[x, i, None] for x, i in zip(logprobs, ids, strict=True)]
        meta = {"finish_reason": {"type": why}, "output_token_logprobs": tokens}
        return 200, {"text": "?", "output_ids": ids, "meta_info": meta}
