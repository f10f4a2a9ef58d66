"""The server: what survives it, what calls it refuses, and whose weights are whose."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

pytest.importorskip("tinker")
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from marft_jax import cli
from marft_jax.engine.engine import Engine
from marft_jax.extras.gateway.tinker import command
from marft_jax.extras.gateway.tinker import models as models_module
from marft_jax.extras.gateway.tinker import samples as samples_module
from marft_jax.extras.gateway.tinker import sessions as sessions_module
from marft_jax.extras.gateway.tinker import store as store_module
from marft_jax.extras.gateway.tinker.client import serving
from marft_jax.extras.gateway.tinker.routes import LIMITS, make_app
from marft_jax.extras.gateway.tinker.service import open_service
from marft_jax.formats import jsonlines

zstandard = pytest.importorskip("zstandard")
TEXT = list(b"4+7+8=?9182736450")
KEYS = ["tml-one", "tml-two"]
JSON = {"content-type": "application/json"}
PROTO = {"content-type": "application/x-protobuf"}
LORA = {"rank": 4, "seed": 1, "train_mlp": False, "train_unembed": False}
ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


class Caller:
    """Calls of one key."""

    def __init__(self, url, key=KEYS[0]):
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": key}, timeout=120)

    def post(self, route, body=None, headers=None, status=200, **fields):
        content = json.dumps(fields) if body is None else body
        reply = self.http.post(route, content=content, headers=headers or JSON)
        assert reply.status_code == status, (route, reply.status_code, reply.text)
        return reply.json() if reply.content else None

    def get(self, path, status=200):
        reply = self.http.get(path)
        assert reply.status_code == status, (path, reply.text)
        return reply.json()

    def fetch(self, promise, status=200):
        """The result of a promise."""
        body = {"request_id": promise["request_id"]}
        while (reply := self.http.post("retrieve_future", json=body)).status_code == 408:
            pass
        assert reply.status_code == status, reply.text
        is_proto = reply.headers["content-type"] == PROTO["content-type"]
        return reply.content if is_proto else reply.json()

    def session(self):
        made = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")
        return made["session_id"]

    def model(self, session, number=0):
        given = dict(session_id=session, model_seq_id=number, base_model="tiny", lora_config=LORA)
        return self.fetch(self.post("create_model", **given))["model_id"]

    def backward(self, model, number, ids=TEXT, status=200, **more):
        return self.post("forward_backward", body(model, number, ids, **more), PROTO, status)

    def step(self, model, number, **adam):
        return self.post("optim_step", model_id=model, seq_id=number, adam_params={**ADAM, **adam})

    def loss(self, promise):
        return deserialize_forward_backward_output(self.fetch(promise)).metrics["loss:sum"]


def body(model, number, ids=TEXT, loss="cross_entropy", forward_only=False, config=None, **inputs):
    inputs = {"target_tokens": np.asarray(ids[1:]), **inputs}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    given = types.ForwardBackwardInput(data=[datum], loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(given, model, number)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def sample_of(sampler, **params):
    """Fields of a call that samples."""
    prompt = {"chunks": [{"tokens": TEXT[:7], "type": "encoded_text"}]}
    return {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params}


def sampler_of(one, session, **weights):
    """Makes a sampler; returns the fields of a call that samples with it."""
    asked = dict(session_id=session, sampling_session_seq_id=0, **weights)
    sampler = one.post("create_sampling_session", **asked)["sampling_session_id"]
    return sample_of(sampler, max_tokens=2)


@contextlib.contextmanager
def served(folder, keys=KEYS, settings=None, **options):
    config = cli.configure({"model.base": "tiny", "model.context": 64, **(settings or {})})
    options = {"rank": 8, "samplers": 2, "names": ["org/Name"], **options}
    with open_service(config, folder, **options) as service:
        with serving(make_app(service, keys, LIMITS._replace(body=200_000))) as url:
            yield url


@pytest.fixture(scope="module")
def url(tmp_path_factory, one_device):
    with served(tmp_path_factory.mktemp("tinker"), models=60) as url:
        yield url


@pytest.fixture(scope="module")
def one(url):
    return Caller(url)


@pytest.fixture(scope="module")
def model(one):
    return one.model(one.session())


@pytest.mark.slow
def test_all_that_was_promised_survives_a_server_that_is_started_again(tmp_path, one_device):
    with served(tmp_path) as url:
        one = Caller(url)
        model = one.model(session := one.session())
        first = one.backward(model, 1)
        one.fetch(one.step(model, 2))
        second = one.backward(model, 3)
        before = one.loss(first), one.loss(second)
        fields = dict(model_id=model, seq_id=4, sampling_session_seq_id=0)
        saved = one.post("save_weights_for_sampler", **fields)
        sampler = one.fetch(saved)["sampling_session_id"]
        asked = sample_of(sampler, max_tokens=4, temperature=0) | {"seq_id": 0}
        lost = one.post("asample", **asked)
        tokens = one.fetch(lost)
        later = one.backward(model, 6)  # waits for number 5
    with served(tmp_path) as url:
        one = Caller(url)
        assert (one.loss(first), one.loss(second)) == before
        assert one.backward(model, 1) == first and one.backward(model, 3) == second
        one.backward(model, 3, ids=TEXT[1:], status=409)
        one.fetch(lost, status=410)
        assert one.fetch(one.post("asample", **asked)) == tokens
        assert one.get(f"sessions/{session}")["training_run_ids"] == [model]
        assert one.get(f"samplers/{sampler}")["base_model"] == "tiny"
        one.fetch(one.step(model, 5))  # of the gradient of call 3, which is computed again
        resumed = one.loss(later)
    with served(tmp_path / "other") as url:
        one = Caller(url)
        model = one.model(one.session())
        for number in (1, 3):
            one.backward(model, number)
            one.fetch(one.step(model, number + 1)) if number == 1 else one.step(model, 4)
        assert one.loss(one.backward(model, 5)) == resumed


@pytest.fixture
def full(monkeypatch):
    """Parts of the names of files, and of statements, for which the disk has no room."""
    parts, draft_of, run = list[str](), jsonlines.draft_of, store_module.Store._run

    def check(text):
        if any(part in str(text) for part in parts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def draft(path):
        check(path)
        return draft_of(path)

    def statements(store, *given):
        check([text for text, *_ in given])
        return run(store, *given)

    monkeypatch.setattr(jsonlines, "draft_of", draft)
    monkeypatch.setattr(store_module.Store, "_run", statements)
    return parts


FULL = "the disk of the server: No space left on device"


@pytest.mark.slow
def test_a_call_fails_with_the_disk_and_neither_it_nor_a_restart_takes_its_step(
    tmp_path, one_device, full
):
    with served(tmp_path) as url:
        one = Caller(url)
        model, other = (one.model(one.session(), n) for n in range(2))
        for number in (1, 3):
            losses = [one.loss(one.backward(other, number)), one.fetch(one.step(other, number + 1))]
        one.backward(model, 1)
        one.fetch(one.step(model, 2))
        full[:] = ["state-"]
        one.backward(model, 3)
        lost = one.step(model, 4)
        assert FULL in one.fetch(lost)["error"]
        full.clear()
        only = one.loss(one.backward(model, 5, forward_only=True))
        assert only == pytest.approx(losses[0], rel=1e-5)  # the step was not taken
        full[:] = ["SET answer"]
        assert FULL in one.fetch(one.backward(model, 6))["error"]
        full.clear()
        told = one.fetch(one.step(model, 7))["error"]
        assert "expected a forward_backward" in told  # the gradient of a failed call is dropped
    full[:] = ["SET answer"]
    with served(tmp_path) as url:  # a disk that is full at the start
        assert FULL in Caller(url).fetch(lost)["error"]
    full.clear()
    with served(tmp_path) as url:
        one = Caller(url)
        assert "failed at this call" in one.fetch(lost)["error"]
        assert one.loss(one.backward(model, 8)) == losses[0]
        one.fetch(one.step(model, 9))
        assert one.loss(one.backward(model, 10)) == one.loss(one.backward(other, 5))


def test_what_the_disk_cannot_keep_is_refused_and_may_be_sent_again(one, full, monkeypatch):
    full.append("INTO sessions")
    told = one.post("create_session", status=503, tags=[], user_metadata=None, sdk_version="0")
    assert FULL in told["error"]["message"]
    full.clear()
    full.append("state-")
    made = dict(session_id=one.session(), model_seq_id=0, base_model="tiny", lora_config=LORA)
    one.post("create_model", status=503, **made)
    full.clear()
    model = one.fetch(one.post("create_model", **made))["model_id"]
    full.append("INTO calls")
    assert FULL in one.backward(model, 1, status=503)["error"]["message"]
    full.clear()
    assert one.loss(one.backward(model, 1)) > 0
    full.append("/weights/")
    fields = {"model_id": model, "path": "a"}
    failed = one.fetch(one.post("save_weights_for_sampler", seq_id=2, **fields))
    assert FULL in failed["error"] and failed["category"] == "server"
    full.clear()
    path = one.fetch(one.post("save_weights_for_sampler", seq_id=3, **fields))["path"]
    checkpoint = f"training_runs/{model}/checkpoints/sampler_weights/a"

    def read_only(folder):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "remove", read_only)
        stepped = one.fetch(one.step(model, 4))
        assert "error" not in stepped  # older states stay, and the step counts
        assert one.http.delete(checkpoint).status_code == 503
    assert one.post("weights_info", tinker_path=path)["lora_rank"] == 4
    one.http.delete(checkpoint).raise_for_status()
    one.post("weights_info", status=404, tinker_path=path)


def test_a_folder_that_cannot_be_made_is_one_line_at_the_start(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    more = ["--run.dir", str(tmp_path / "file" / "run"), "--port", "0"]
    with pytest.raises(SystemExit):
        command.main(["--api", "tinker", "--model.base", "tiny", *more])
    assert "Not a directory" in capsys.readouterr().err


def test_a_model_is_made_once_and_deleting_weights_of_one_leaves_the_others(one):
    session = one.session()
    first, second = one.model(session, 0), one.model(session, 1)
    assert one.model(session, 0) == first
    given = dict(session_id=session, model_seq_id=0, base_model="tiny")
    given["lora_config"] = LORA | {"rank": 8}
    assert "other settings" in one.post("create_model", status=409, **given)["error"]["message"]
    for model in (first, second):
        one.fetch(one.post("save_weights", model_id=model, seq_id=1, path="a"))
    one.http.delete(f"training_runs/{first}/checkpoints/weights/a").raise_for_status()
    assert one.get(f"training_runs/{first}/checkpoints")["checkpoints"] == []
    assert len(one.get(f"training_runs/{second}/checkpoints")["checkpoints"]) == 1


def test_a_session_that_ends_keeps_its_training_state(one):
    model = one.model(session := one.session())
    one.post(f"sessions/{session}/finish", status=204, reason={"type": "success"})
    one.post("session_heartbeat", status=410, session_id=session)
    assert one.loss(one.backward(model, 1)) > 0


@pytest.mark.parametrize("is_full", [False, True])
def test_a_silent_session_ends_when_another_beats_and_its_model_goes_on(
    is_full, one, full, monkeypatch
):
    """Also where the disk cannot note it."""
    model, session = one.model(silent := one.session()), one.session()
    monkeypatch.setattr(sessions_module, "_SILENT_SECONDS", 0)
    full += ["INTO sessions"] * is_full
    one.post("session_heartbeat", session_id=session)
    full.clear()
    one.post("session_heartbeat", status=410, session_id=silent)
    assert one.loss(one.backward(model, 1)) > 0


def test_adapters_that_are_unused_go_to_the_disk_and_come_back(one, monkeypatch):
    monkeypatch.setattr(models_module, "_RESIDENT", 1)
    session, losses = one.session(), []
    both = [one.model(session, n) for n in range(3)]
    for number in (1, 3, 5):
        losses.append([one.loss(one.backward(model, number)) for model in both])
        _ = [one.fetch(one.step(model, number + 1)) for model in both]
    assert all(len({*x}) == 1 for x in losses) and losses[0] > losses[1] > losses[2]


def test_old_weights_without_a_name_are_deleted_and_a_sampler_of_them_says_so(one, monkeypatch):
    monkeypatch.setattr(store_module, "_KEPT_EPHEMERAL", 1)
    model, saved = one.model(one.session()), []
    for number in (1, 2):
        fields = dict(model_id=model, seq_id=number, sampling_session_seq_id=number)
        saved.append(one.fetch(one.post("save_weights_for_sampler", **fields)))
    old, new = (sample_of(s["sampling_session_id"], max_tokens=1) | {"seq_id": 0} for s in saved)
    told = one.post("asample", status=404, **old)["error"]["message"]
    assert "sample from a newer one" in told
    one.fetch(one.post("asample", **new))


def test_weights_that_cannot_be_loaded_fail_their_call_and_the_next_one_loads_them(
    one, monkeypatch
):
    model, session = one.model(one.session()), one.session()
    saved = one.post("save_weights_for_sampler", model_id=model, seq_id=1, path="here")
    asked = sampler_of(one, session, model_path=one.fetch(saved)["path"])

    with monkeypatch.context() as patched:
        patched.delattr(Engine, "replace")
        assert one.fetch(one.post("asample", seq_id=0, **asked))["category"] == "server"
    one.http.delete(f"training_runs/{model}/checkpoints/sampler_weights/here").raise_for_status()
    one.post("asample", seq_id=1, status=404, **asked)
    one.fetch(one.post("save_weights_for_sampler", model_id=model, seq_id=2, path="here"))
    assert isinstance(one.fetch(one.post("asample", seq_id=1, **asked)), bytes)


def test_a_call_that_is_cancelled_frees_its_slot_for_the_next_weights(one):
    calls = []
    for n in range(4):  # more than slots
        model = one.model(one.session())
        saved = one.post("save_weights_for_sampler", model_id=model, seq_id=1, path="here")
        asked = sampler_of(one, one.session(), model_path=one.fetch(saved)["path"])
        asked["sampling_params"] = {"max_tokens": 57, "stop": []}
        calls.append(one.post("asample", seq_id=0, num_samples=64, **asked))
        if n != 3:
            one.post("cancel_future", status=204, request_id=calls[-1]["request_id"])
    assert "Cancelled" in one.fetch(calls[0])["error"]
    assert isinstance(one.fetch(calls[3]), bytes)


def test_too_many_open_calls_are_refused_and_fetched_ones_make_room(
    tmp_path, one_device, monkeypatch
):
    monkeypatch.setattr(samples_module, "_KEPT", 1)
    monkeypatch.setattr(samples_module, "_MOST_OPEN", 3)
    with served(tmp_path) as url:
        one = Caller(url)
        asked = sampler_of(one, one.session(), base_model="org/Name")
        calls = [one.post("asample", seq_id=n, **asked) for n in range(3)]
        told = one.post("asample", seq_id=3, status=429, **asked)
        assert "try again later" in told["error"]["message"]
        results = [one.fetch(call) for call in calls]
        assert one.fetch(calls[2]) == results[2]  # once more
        one.fetch(one.post("asample", seq_id=3, **asked))
        one.fetch(calls[0], status=410)


def test_a_server_that_ends_drops_samples_that_nobody_will_fetch(tmp_path, one_device, monkeypatch):
    steps, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: [steps.append(1), step(self)][1])
    with served(tmp_path, settings={"rollout.slots": 8}) as url:
        one = Caller(url)
        asked = sampler_of(one, one.session(), base_model="org/Name")
        asked["sampling_params"] = {"max_tokens": 57, "stop": []}
        one.post("asample", seq_id=0, num_samples=1024, **asked)
    assert len(steps) < 50  # of 128 at least


def test_a_compressed_body_is_read(one):
    model = one.model(one.session())
    packed = zstandard.ZstdCompressor().compress(body(model, 1))
    kind = PROTO | {"content-encoding": "zstd"}
    assert one.loss(one.post("forward_backward", packed, kind)) > 0


def test_nobody_sees_what_another_key_made(url, one, model):
    other = Caller(url, KEYS[1])
    one.fetch(one.post("save_weights", model_id=model, seq_id=1, path="mine"))
    path = f"tinker://{model}/weights/mine"
    other.backward(model, 2, status=404)
    other.post("get_info", status=404, model_id=model)
    other.post("weights_info", status=404, tinker_path=path)
    load = dict(session_id=other.session(), model_seq_id=0, path=path, optimizer=True)
    other.post("load_weights", status=404, **load)
    sampler = dict(session_id=load["session_id"], sampling_session_seq_id=0, model_path=path)
    other.post("create_sampling_session", status=404, **sampler)
    other.get(f"training_runs/{model}", status=404)
    for listed in ("training_runs", "checkpoints"):
        assert other.get(listed)[listed] == []
    assert other.http.delete(f"training_runs/{model}/checkpoints/weights/mine").status_code == 404
    other.post("retrieve_future", status=404, request_id=f"{model}/1")
    Caller(url, "tml-none").get("sessions", status=401)


def test_saved_weights_are_models_of_an_openai_endpoint(url, one, model):
    session = one.session()
    model = one.model(session)
    one.fetch(one.post("save_weights_for_sampler", model_id=model, seq_id=1, path="chat"))
    path, key = f"tinker://{model}/sampler_weights/chat", {"authorization": f"Bearer {KEYS[0]}"}
    how = {"headers": key, "timeout": 120}
    message = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 3, "n": 2}
    for name, status in ((path, 200), ("org/Name", 200), ("other", 400), (path[:-1], 404)):
        for root in ("/v1", "/oai/api/v1"):
            asked = message | {"model": name}
            said = httpx.post(f"{url}{root}/chat/completions", json=asked, **how)
            assert said.status_code == status, said.text
            assert status > 200 or len(said.json()["choices"]) == 2
    text = {"prompt": "4+7", "max_tokens": 3, "model": path}
    said = httpx.post(f"{url}/v1/completions", json=text, **how).json()
    assert said["usage"]["completion_tokens"] == 3


def refusals(model, session):
    """(path, body or fields, headers, status, what the line says) of broken calls."""
    proto = [
        (b"\xff\xff", PROTO, 422, "protobuf"),
        (b"not zstd", PROTO | {"content-encoding": "zstd"}, 422, "zstd"),
        (b"{}", {"content-type": "text/plain"}, 415, "Content-Type"),
        (b"x" * 300_000, PROTO, 413, "at most"),
        (body(model, 0), PROTO, 400, "numbered from 1"),
    ]
    yield from (("forward_backward", *one) for one in proto)
    huge = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    tensor = huge.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.shape[:] = pb.DTYPE_INT64, [1, 1 << 40]
    tensor.sparse_csr.crow_indices = np.zeros(2, np.int64).tobytes()
    yield "forward_backward", huge.SerializeToString(), PROTO, 422, "as many values"
    image = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    image.data.add().model_input.add().image.format = "png"
    yield "forward_backward", image.SerializeToString(), PROTO, 422, "encoded_text"
    made = dict(session_id=session, model_seq_id=9, base_model="tiny", lora_config={"rank": 4})
    no_weights = dict(session_id=session, sampling_session_seq_id=0)
    given = [
        ("create_model", made | {"base_model": "other"}, 400, "tiny"),
        ("create_model", made | {"lora_config": {"rank": 9}}, 400, "1 to 8"),
        ("create_model", made | {"session_id": "none"}, 404, "no session"),
        ("create_model", made | {"surprise": 1}, 422, "surprise"),
        ("create_model", made | {"optimizer_config": {"type": "dimuon"}}, 400, "adamw"),
        ("optim_step", {"model_id": model, "adam_params": {}}, 422, "seq_id"),
        ("create_custom_loss", {}, 404, "does not offer"),
        ("create_sampling_session", no_weights, 400, "base"),
        ("asample", {"prompt": {"chunks": []}, "sampling_params": {}}, 400, "expected one"),
        ("retrieve_future", {"request_id": "unknown"}, 410, "not known"),
        ("weights_info", {"tinker_path": f"tinker://{model}/weights/../x"}, 400, "tinker://MODEL"),
    ]
    yield from ((path, json.dumps(fields), JSON, *rest) for path, fields, *rest in given)
    yield "create_session", b"[" * 100_000, JSON, 422, "JSON"


def test_broken_calls_are_refused_in_one_line_that_says_what_to_do(one):
    model = one.model(session := one.session())
    for path, content, headers, status, what in refusals(model, session):
        reply = one.http.post(path, content=content, headers=headers)
        assert reply.status_code == status, (path, content[:80], reply.text)
        fields = reply.json()
        told = fields["error"]["message"]
        assert what in told and "\n" not in told, told


FAILING = [
    ({"loss": "stable_reinforce"}, "importance_sampling"),
    ({"loss": "ppo"}, "'advantages', 'clip"),
    ({"advantages": np.zeros(16, np.float32)}, "got 'advantages'"),
    ({"weights": np.zeros(3, np.float32)}, "shape [3]"),
    ({"weights": np.full(16, np.nan, np.float32)}, "finite"),
    ({"ids": [10**6] * 5}, "tokens from 0"),
    ({"ids": [*range(99)]}, "at most 64 tokens"),
    ({"loss": "dro", "config": {"beta": "x"}}, "beta='x'"),
    ({"loss": "dro"}, "expected beta"),
]


def test_calls_that_cannot_be_done_fail_in_one_line_and_the_next_one_goes_on(one):
    model = one.model(one.session())
    for number, (more, what) in enumerate(FAILING, 1):
        failed = one.fetch(one.backward(model, number, **more))
        assert what in failed["error"] and failed["category"] == "user", failed
    assert one.loss(one.backward(model, len(FAILING) + 1)) > 0


def test_steps_and_saves_that_cannot_be_done_fail_in_one_line(one):
    model = one.model(one.session())
    assert "expected a forward_backward" in one.fetch(one.step(model, 1))["error"]
    one.backward(model, 2)
    assert "beta1" in one.fetch(one.step(model, 3, beta1=1.5))["error"]
    saves = [
        ("save_weights", {"path": "../x"}, "letters"),
        ("save_weights_for_sampler", {}, "sampling_session_seq_id"),
        ("save_weights_external", {"path": "x", "age_encryption_recipients": ["a"]}, "encrypt"),
        ("load_weights", {"path": "tinker://x", "optimizer": False}, "first call"),
    ]
    for number, (kind, fields, what) in enumerate(saves, 4):
        failed = one.fetch(one.post(kind, model_id=model, seq_id=number, **fields))
        assert what in failed["error"], failed


SAMPLES = [
    ({"sampling_params": {"max_tokens": 99}}, "the context is 64"),
    ({"sampling_params": {"top_p": 2}}, "top_p"),
    ({"num_samples": 0}, "num_samples"),
    ({"prompt_logprobs_last_n": 9, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "tokens from 0"),
    ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "[6, K]"),
    ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
]


def test_samples_that_cannot_be_drawn_are_refused_in_one_line(one):
    sampler = sampler_of(one, one.session(), base_model="org/Name")
    for more, what in SAMPLES:
        fields = sampler | {"seq_id": 0} | more
        assert what in one.post("asample", status=400, **fields)["error"]["message"], what


@pytest.mark.release
def test_twenty_kills_lose_no_step_and_apply_none_twice(tmp_path):
    """Each step moves by a rate of its own, so the end tells which were taken."""
    rng, process, ends = random.Random(0), None, []

    def start():
        command = [sys.executable, "-m", "marft_jax.serve", "--api", "tinker", "--port", "0"]
        more = ["--model.base", "tiny", "--run.dir", str(tmp_path / "run"), "--rank", "4"]
        process = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)
        line = next(line for line in process.stderr if "serves at" in line)
        return process, Caller(line.split()[-1])

    def run(kills):
        nonlocal process
        process, one = start()
        model = one.model(one.session())
        for number in range(1, 41):
            due = kills and rng.random() < 0.5
            while True:
                try:
                    if due:
                        due, kills = False, kills - 1
                        time.sleep(rng.random() * 0.02)
                        os.kill(process.pid, signal.SIGKILL)
                    rate = {} if number % 2 else {"learning_rate": 1e-3 * number}
                    promise = (one.backward if number % 2 else one.step)(model, number, **rate)
                    if kills and rng.random() < 0.3:
                        kills -= 1
                        time.sleep(rng.random() * 0.1)
                        os.kill(process.pid, signal.SIGKILL)
                    one.fetch(promise)
                    break
                except httpx.HTTPError:
                    process.wait()
                    process, one = start()
        assert kills == 0
        ends.append(one.loss(one.backward(model, 41)))
        process.kill()
        process.wait()

    run(0)
    run(20)
    assert ends[0] == ends[1]
