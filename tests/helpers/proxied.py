"""A proxy before a server, with ways in which adapters do not arrive, and answers are none.

A fault is a function of (proxy, route, body) that answers instead of the server; ``proxy.ask`` asks
the server itself. It begins when it is put into ``proxy.fault``.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import time
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file
from stand_in import JsonServer

SAMPLES = ("/v1/completions",)


class Proxy(JsonServer):
    """Passes on what it gets, until a fault is planted.

    Attributes:
        folder: for copies of adapters.
        given: folder of each adapter by its name, in the order in which they came.
    """

    def __init__(self, to: str, folder: Path):
        super().__init__()
        self.to, self.folder, self.fault = to, folder, None
        self.given, self.asked, self.state = {}, 0, {}
        self.client = httpx.Client(base_url=to, timeout=120)

    def ask(self, route, body):
        if body is None:
            found = self.client.get(route)
        else:
            found = self.client.post(route, json=body)
        try:
            return found.status_code, found.json()
        except ValueError:
            return found.status_code, found.text

    def answer(self, route, body):
        if route == "/v1/load_lora_adapter":
            kept = self.folder / body["lora_name"]  # ours is deleted when its step is over
            shutil.copytree(body["lora_path"], kept)
            body = body | {"lora_path": str(kept)}
            self.given[body["lora_name"]] = kept
        self.asked += route in SAMPLES
        return (self.fault or Proxy.ask)(self, route, body)

    def versions(self, name):
        """Names of the adapters that an agent was given, the newest last."""
        return [n for n in self.given if n.split("-")[0] == name.split("-")[0]]


def asked_of(choose):
    """Has another model sample: ``choose(proxy, body)`` names it. Nothing is unloaded."""

    def fault(proxy, route, body):
        if route == "/v1/unload_lora_adapter":
            return 200, "Success"
        if route in SAMPLES and body["model"] in proxy.given:
            body = body | {"model": choose(proxy, body)}
        return proxy.ask(route, body)

    return fault


def base(proxy, body):
    [model] = [m for m in proxy.ask("/v1/models", None)[1]["data"] if not m["parent"]]
    return model["id"]


def before(proxy, body):
    return proxy.versions(body["model"])[-2]


def other(proxy, body):
    [name, *_] = [n for n in reversed(proxy.given) if n.split("-")[0] not in body["model"]]
    return name


def share(choose, every):
    """Of each ``every`` requests one goes to another model: a server of several, say."""
    count = itertools.count()  # ``proxy.asked`` is also that of requests beside this one
    return lambda proxy, body: choose(proxy, body) if next(count) % every == 0 else body["model"]


def changed_files(change):
    """Changes the tensors and the settings of each adapter that is loaded."""

    def fault(proxy, route, body):
        if route == "/v1/load_lora_adapter":
            folder = Path(body["lora_path"])
            file, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
            tensors, known = load_file(file), json.loads(settings.read_text())
            tensors = change(tensors, known)
            save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, file)
            settings.write_text(json.dumps(known))
        return proxy.ask(route, body)

    return fault


def without(word):
    def change(tensors, known):
        return {n: x * 0 if word in n and "lora_B" in n else x for n, x in tensors.items()}

    return change


def scaled(tensors, known):
    known["lora_alpha"] /= 2
    return tensors


def layers_swapped(tensors, known):
    swap = {".0.": ".1.", ".1.": ".0."}

    def renamed(name):
        return next((name.replace(f"layers{a}", f"layers{b}") for a, b in swap.items()
                     if f"layers{a}" in name), name)  # fmt: skip

    return {renamed(n): x for n, x in tensors.items()}


def half_rank(tensors, known):
    return {n: np.where(np.arange(x.shape[0])[:, None] < x.shape[0] // 2, x, 0)
            if "lora_A" in n else x for n, x in tensors.items()}  # fmt: skip


def rounded(tensors, known):
    def four_bits(x):
        step = np.abs(x).max() / 7 or 1
        return (np.round(x / step) * step).astype(x.dtype)

    return {n: four_bits(x) for n, x in tensors.items()}


def in_place(proxy, route, body):
    """Reloads each agent's adapter under one name: the prefix cache of the last version stays."""
    if route == "/v1/unload_lora_adapter":
        return 200, "Success"
    if route == "/v1/load_lora_adapter":
        agent = body["lora_name"].split("-")[0]
        fixed = proxy.folder / f"fixed-{agent}"
        shutil.rmtree(fixed, ignore_errors=True)
        shutil.copytree(body["lora_path"], fixed)
        how = {"lora_name": f"fixed-{agent}", "lora_path": str(fixed), "load_inplace": True}
        return proxy.ask(route, how)
    if route in SAMPLES and body["model"] in proxy.given:
        body = body | {"model": f"fixed-{body['model'].split('-')[0]}"}
    return proxy.ask(route, body)


def begun_by(choose):
    """Another version samples the first half of an action: weights that change meanwhile."""

    def fault(proxy, route, body):
        if route == "/v1/unload_lora_adapter":
            return 200, "Success"
        if route not in SAMPLES or body["model"] not in proxy.given or body["max_tokens"] < 2:
            return proxy.ask(route, body)
        half = body["max_tokens"] // 2
        first = proxy.ask(route, body | {"model": choose(proxy, body), "max_tokens": half})
        [start] = first[1]["choices"]
        if start["finish_reason"] == "stop":
            return first
        prompt = body["prompt"] + start["token_ids"]
        more = {"prompt": prompt, "max_tokens": body["max_tokens"] - half}
        status, rest = proxy.ask(route, body | more)
        [end] = rest["choices"]
        end["token_ids"] = start["token_ids"] + end["token_ids"]
        end["logprobs"]["token_logprobs"] = (
            start["logprobs"]["token_logprobs"] + end["logprobs"]["token_logprobs"]
        )
        return status, rest

    return fault


def changed_request(change):
    def fault(proxy, route, body):
        if route in SAMPLES and body["model"] in proxy.given:
            body = body | change(body)
        return proxy.ask(route, body)

    return fault


def changed_answer(change, every=1):
    """Changes the one choice of each answer."""

    def fault(proxy, route, body):
        status, answer = proxy.ask(route, body)
        if route in SAMPLES and body["model"] in proxy.given and proxy.asked % every == 0:
            answer = copy.deepcopy(answer)
            change(answer["choices"][0])
        return status, answer

    return fault


def set_logprobs(change):
    def own(choice):
        choice["logprobs"]["token_logprobs"] = change(choice["logprobs"]["token_logprobs"])

    return own


def set_ids(change):
    return lambda choice: choice.update(token_ids=change(choice["token_ids"]))


def cut(choice):
    choice["token_ids"] = choice["token_ids"][:-1]
    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:-1]


def instead(answer, times=10**9, route=SAMPLES):
    """Answers something else, so many times."""

    def fault(proxy, at, body):
        if at in route and body.get("model") in {*proxy.given, None}:
            proxy.state["answers"] = proxy.state.get("answers", 0) + 1
            if proxy.state["answers"] <= times:
                return answer() if callable(answer) else answer
        return proxy.ask(at, body)

    return fault


def slow():
    time.sleep(3)
    return 200, {}


def hang_up():
    return None


ARRIVE_NOT = {
    "the base answers": asked_of(base),
    "the version before answers": asked_of(before),
    "another agent's adapter answers": asked_of(other),
    "the base answers one request in 8": asked_of(share(base, 8)),
    "the version before answers half of the requests": asked_of(share(before, 2)),
    "the version before begins each action": begun_by(before),
    "tensors load and do nothing": changed_files(without("")),
    "tensors of one matrix do nothing": changed_files(without("v_proj")),
    "tensors of one layer do nothing": changed_files(without("layers.1.")),
    "another alpha": changed_files(scaled),
    "two layers are swapped": changed_files(layers_swapped),
    "half of the rank": changed_files(half_rank),
    "adapters in 4 bits": changed_files(rounded),
    "a prefix cache of the version before": in_place,
    "a prompt without its begin": changed_request(lambda b: {"prompt": b["prompt"][5:]}),
    "another token before the prompt": changed_request(lambda b: {"prompt": [7, *b["prompt"]]}),
    "another temperature": changed_request(lambda b: {"temperature": 1.3}),
    "a filter of the server's own": changed_request(lambda b: {"top_k": 3}),
    "log-probs of the token before": changed_answer(set_logprobs(lambda x: [*x[1:], x[0]])),
    "log-probs with two digits": changed_answer(set_logprobs(lambda x: [round(y, 2) for y in x])),
    "other ids than the sampled": changed_answer(set_ids(lambda x: [(i + 1) % 256 for i in x])),
}  # fmt: skip
"""Each must end the play in which it begins, with a line that names the agent."""

NO_ANSWER = {
    "no log-probs": changed_answer(lambda choice: choice.update(logprobs=None)),
    "no ids": changed_answer(lambda choice: choice.update(token_ids=None)),
    "NaN": changed_answer(set_logprobs(lambda x: [float("nan"), *x[1:]])),
    "log-probs that are no numbers": changed_answer(set_logprobs(lambda x: [None, *x[1:]])),
    "an infinite log-prob": changed_answer(set_logprobs(lambda x: [-float("inf"), *x[1:]])),
    "an unknown id": changed_answer(set_ids(lambda x: [10**6, *x[1:]])),
    "a token too few": changed_answer(cut),
    "a log-prob too few": changed_answer(set_logprobs(lambda x: x[:-1])),
    "tokens beyond the limit": changed_answer(set_ids(lambda x: [*x, *x])),
    "nothing": changed_answer(lambda choice: choice.update(token_ids=[])),
    "a page of HTML": instead((200, "<html>no</html>")),
    "an error in other words": instead((400, {"error": "no"})),
}
"""Each answer costs its episode, which says why."""

PASSES = {
    "429 three times": instead((429, {"error": "too many"}), 3),
    "500 three times": instead((500, {"error": "oops"}), 3),
    "503 as text": instead((503, "loading"), 3),
    "it hangs up twice": instead(hang_up, 2),
    "it is slow once": instead(slow, 1),
}
"""Another try has an answer."""
