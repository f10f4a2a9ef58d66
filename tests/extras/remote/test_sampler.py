"""Servers are found to be what they are, are asked alike, and may go and come."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import proxied
import pytest
import small
from stand_in import StandIn
from test_arrival import open_http, play, requests, small_base, version

from marft_jax import cli
from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.remote import proof, server
from marft_jax.extras.remote.dialects import Ask
from marft_jax.learning.checking import check_team
from marft_jax.sampling import version_of
from marft_jax.types import MAIN, Sampling


@pytest.fixture(scope="module")
def standing():
    """One server of each kind, by (kind, logprobs)."""
    found = {}
    for how in (("vllm", "processed"), ("vllm", "raw"), ("sglang", "policy")):
        found[how] = StandIn(*how).__enter__()
    yield found
    for one in found.values():
        one.__exit__(None, None, None)


@pytest.fixture
def vllm(standing):
    return standing["vllm", "processed"]


@pytest.mark.parametrize(
    ("how", "temperature", "filters"),
    [(("vllm", "processed"), True, False), (("vllm", "raw"), False, True),
     (("sglang", "policy"), True, True)],
)  # fmt: skip
def test_what_log_probs_are_of_is_measured_and_what_does_not_fit_is_refused(
    how, temperature, filters, standing, tmp_path
):
    base = small_base()
    sampler = open_http(tmp_path, standing[how].url)
    able, [one, *_] = sampler.capabilities, requests(1)
    assert sampler.servers[0].dialect.name.lower() == how[0] and able.contexts == {MAIN: 256}
    assert not able.repeats and not able.masks_choices and not able.streams
    hot, few = (one._replace(sampling=s) for s in (Sampling(8, 0.7), Sampling(8, top_k=3)))
    assert (able.refusal(hot) == "", able.refusal(few) == "") == (temperature, filters)
    assert able.refusal(one._replace(form="{}")) and able.refusal(one) == ""
    greedy = one._replace(sampling=Sampling(8, 0.0))
    of_base = one._replace(owner=-1)
    asked = [greedy, of_base, *requests(6), *([hot] if temperature else []), *([few] * filters)]
    assert {own.version for own in play(sampler, base, 1, asked)} == {sampler._given.version}
    sampler.release()


def test_a_server_that_is_none_is_refused_in_one_line(vllm, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="--rollout.urls: expected addresses of servers, got none"):
        open_http(tmp_path)
    with pytest.raises(BadInput, match="got ConnectError.*start it, or leave it out"):
        open_http(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(BadInput, match="got UnsupportedProtocol"):
        open_http(tmp_path, "nonsense")
    with proxied.Proxy(vllm.url, tmp_path) as proxy:
        proxy.fault = lambda proxy, route, body: (404, "no")
        with pytest.raises(BadInput, match="expected a server of SGLang or vLLM"):
            open_http(tmp_path, proxy.url)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="expected a folder that can be written"):
        open_http(tmp_path, vllm.url, sampler_folder=str(tmp_path / "file"))


def test_a_server_of_another_base_is_refused(vllm, tmp_path):
    base = small_base()
    score = base.tools.score
    other = base.tools._replace(score=lambda *how: [x - 0.2 for x in score(*how)])
    with pytest.raises(BadInput, match="expected a server of tiny, got log-probs that are 0.2"):
        open_http(tmp_path, vllm.url, base=base._replace(tools=other))


def too_large(proxy, route, body):
    refusal = 500, {"error": "LoRA rank 64 is greater than max_lora_rank 16"}
    return refusal if "load_lora" in route else proxy.ask(route, body)


def heard(route_part, field, into):
    """A fault that is none: it notes a field of requests, or all of them."""

    def fault(proxy, route, body):
        if route_part in route:
            into.append(body[field] if field else body)
        return proxy.ask(route, body)

    return fault


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (proxied.changed_files(proxied.without("")), "it loaded does nothing"),
        (proxied.changed_files(proxied.without("v_proj")), "it loaded does not all it should"),
        (proxied.changed_files(proxied.half_rank), "it loaded does"),
        (too_large, "it does not load an adapter: status 500: .*LoRA rank 64 is greater"),
        (proxied.changed_request(lambda body: {}), ""),
    ],
)
def test_an_adapter_that_the_server_cannot_have_is_refused_at_the_start(
    fault, said, vllm, tmp_path
):
    with proxied.Proxy(vllm.url, tmp_path) as proxy:
        proxy.fault = fault
        if not said:
            return open_http(tmp_path / "run", proxy.url).release()
        with pytest.raises(BadInput, match=said):
            open_http(tmp_path / "run", proxy.url)
    assert [*(tmp_path / "run" / "adapters").iterdir()] == []


def test_rounding_raises_no_alarm_and_hides_no_fault(tmp_path):
    """A server in bfloat16: σ = 2e-2, as measured on a real vLLM."""
    with StandIn(rounding=0.02) as rough, proxied.Proxy(rough.url, tmp_path) as proxy:
        sampler, base = open_http(tmp_path / "run", proxy.url), small_base()
        assert 0.01 < sampler.servers[0].precision < 0.04
        for k in range(6):
            play(sampler, base, k, requests(16))
            assert sampler.stats()["sampler/unproven"] == 0
        gap = sampler.stats()["sampler/gap/planner"]
        assert 1e-3 < gap < 0.04
        for choose in (proxied.base, proxied.before, proxied.other):
            proxy.fault = proxied.asked_of(lambda proxy, body: body["model"])
            play(sampler, base, 1, requests(16))
            proxy.fault = proxied.asked_of(choose)
            with pytest.raises(RunFailed, match="adapters did not arrive"):
                play(sampler, base, 2, requests(16))
            rough.places.clear()


def test_versions_that_cannot_be_told_apart_are_counted():
    rng = np.random.default_rng(0)
    now = [rng.normal(size=8).astype(np.float32) - 3 for _ in range(4)]
    sent = [x + rng.normal(size=8) * 1e-3 for x in now]
    near, far = [x + 1e-3 for x in now], [x + 1 for x in now]
    found = proof.judge(sent, now, {"near": near, "far": far, "same": now}, 1e-3)
    assert (found.unproven, found.nearer) == (1, "") and found.misfit < 1
    wrong = proof.judge(far, now, {"near": near, "far": far}, 1e-3)
    assert wrong.nearer == "far" and wrong.misfit > 10
    half = [0.5 * (x + y) for x, y in zip(now, far, strict=True)]  # fits none
    assert proof.judge(half, now, {}, 1e-3).misfit > 10
    assert not proof.misfit([np.full(8, np.nan)], now[:1], 1e-3) <= 1


def test_a_confident_token_is_compared_in_its_own_noise():
    """A token of probability 1 - 1e-4 differs by 1e-4 σ; twice its improbability is far off."""
    now = [np.full(64, -1e-3, np.float32)]
    sent = [now[0] * (1 + 1e-2 * np.random.default_rng(0).normal(size=64))]
    found = proof.judge(sent, now, {"before": [now[0] * 2]}, 2e-2)
    assert found.unproven == 0 and found.nearer == "" and found.misfit < 1
    assert proof.judge([now[0] * 2], now, {"before": [now[0] * 2]}, 2e-2).nearer == "before"


def test_a_folder_is_there_while_its_version_plays_and_its_name_never_comes_again(vllm, tmp_path):
    sampler, base, seen = open_http(tmp_path, vllm.url), small_base(), []
    for k in (1, 1, 2):
        adapters = {MAIN: version(base, k)}
        sampler.load(adapters, version_of(adapters))
        names = {folder.name for folder in (tmp_path / "adapters").iterdir()}
        assert names == {*vllm.places} and len(names) == 2
        owned = {f"{agent}-{version_of(adapters)}" for agent in ("planner", "solver")}
        assert {name.rsplit("-", 1)[0] for name in names} == owned
        seen += names
    assert len({*seen}) == 6
    sampler.release()
    assert not [*(tmp_path / "adapters").iterdir()] and not vllm.places


@pytest.mark.parametrize("shared", [False, True], ids=["in the run", "shared"])
def test_what_a_killed_process_left_is_unloaded_and_deleted_when_its_run_goes_on(
    shared, vllm, tmp_path
):
    own, base = {}, small_base()
    for run in ("mine", "other"):
        how = {"sampler_folder": str(tmp_path)} if shared else {}
        sampler, adapters = open_http(tmp_path / run, vllm.url, **how), {MAIN: version(base, 1)}
        before = {*vllm.places}
        sampler.load(adapters, version_of(adapters))
        own[run] = {*vllm.places} - before
    assert all(len(names) == 2 for names in own.values())
    here = tmp_path if shared else tmp_path / "mine" / "adapters"
    assert own["mine"] <= {folder.name for folder in here.iterdir()}
    open_http(tmp_path / "mine", vllm.url, **how).release()  # the one before never released
    assert not own["mine"] & {folder.name for folder in here.iterdir()}
    assert {*vllm.places} == own["other"]
    sampler.release()


def test_servers_may_see_the_folder_elsewhere(vllm, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.symlink_to(here)
    with proxied.Proxy(vllm.url, tmp_path) as proxy:
        sampler = open_http(None, proxy.url, sampler_folder=f"{here}={there}")
        paths = []
        proxy.fault = heard("/load_lora", "lora_path", paths)
        play(sampler, small_base(), 1, requests(2))
        sampler.release()
    assert paths and all(str(proxy.folder) in path for path in paths)  # the proxy copied them


def test_a_server_that_was_started_anew_gets_the_adapters_again_and_once(vllm, tmp_path):
    loads = []
    with proxied.Proxy(vllm.url, tmp_path / "kept") as proxy:
        sampler, base = open_http(tmp_path, proxy.url), small_base()
        adapters = {MAIN: version(base, 1)}
        sampler.load(adapters, version_of(adapters))
        proxy.given.clear()  # it copies a folder once
        shutil.rmtree(proxy.folder)
        proxy.fault = heard("/load_lora", "lora_name", loads)
        vllm.restart()
        found = small.answers(sampler, requests(24))
        assert {own.reason for own in found} <= {"length", "end"}
        assert len(loads) == len({*loads}) == 2 and not sampler.servers[0].down
        sampler.verify_adapters()
        sampler.release()


def test_one_of_two_servers_dies_and_the_other_goes_on(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("marft_jax.extras.remote.sampler._WAITS", (0.01, 0.01, 0.01, 0.01))
    base, asked = small_base(), requests(16)
    with proxied.Proxy(vllm.url, tmp_path) as second:
        sampler = open_http(tmp_path / "run", vllm.url, second.url)
        second.fault = lambda proxy, route, body: (
            (200, "Success") if "lora" in route else proxy.ask(route, body)
        )  # both are one server, which loads an adapter once
        play(sampler, base, 1, asked)
        assert second.asked > 0
    before = second.asked
    found = play(sampler, base, 2, asked)
    assert {own.reason for own in found} <= {"length", "end"} and second.asked == before
    assert sampler.servers[1].down and not sampler.servers[0].down
    sampler.release()


def test_one_of_two_servers_that_is_old_is_named(vllm, tmp_path):
    base, asked = small_base(), requests(16)
    with StandIn() as other, proxied.Proxy(other.url, tmp_path) as second:
        sampler = open_http(tmp_path / "run", vllm.url, second.url)
        second.fault = proxied.asked_of(lambda proxy, body: body["model"])
        play(sampler, base, 1, asked)
        second.fault = proxied.asked_of(proxied.before)
        with pytest.raises(RunFailed) as error:
            play(sampler, base, 2, asked)
        sampler.release()
    assert second.url in str(error.value) and vllm.url not in str(error.value)
    assert "nearest to those of the version before" in str(error.value)


def test_all_servers_gone_ends_the_run_with_the_reason(tmp_path):
    base = small_base()
    with StandIn() as one:
        sampler = open_http(tmp_path, one.url)
    adapters = {MAIN: version(base, 1)}
    with pytest.raises(RunFailed, match="no server has loaded this step's adapters: http"):
        sampler.load(adapters, version_of(adapters))


def test_requests_carry_every_setting_and_equal_keys_the_same_seed(vllm, tmp_path):
    base, bodies = small_base(), []
    with proxied.Proxy(vllm.url, tmp_path) as proxy:
        sampler = open_http(tmp_path / "run", proxy.url)
        proxy.fault = heard("completions", "", bodies)
        how = {"stop": ("z", " y"), "temperature": 0.5}
        play(sampler, base, 1, [*requests(2, **how), *requests(1, **how)])
        sampler.release()
    first, second, again = sorted(bodies, key=lambda body: body["model"])[::-1][-3:]
    assert len({body["seed"] for body in bodies}) == 2
    [body, *_] = bodies
    assert body["stop"] == ["z"]  # ours finds the other one
    wanted = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 16}
    wanted |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    wanted |= {"stop_token_ids": [*base.eos_ids], "ignore_eos": True, "logprobs": 0}
    assert {name: body[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "most", "stop", "found"),
    [("ab.c", 4, (".",), ("ab.", "stop")), ("abc<e>", 9, (), ("abc<e>", "end")),
     (" .c", 3, ("c",), (" .c", "stop")), ("abcd", 4, (), ("abcd", "length")),
     ("ab<e>d", 9, (), None), ("abc", 4, (), None)],
)  # fmt: skip
def test_an_action_ends_where_ours_would(text, most, stop, found):
    base = small_base()
    [end] = base.eos_ids
    ids = [end if c == "<" else ord(c) for c in text.replace("<e>", "<")]
    ask = Ask("m", True, [1], Sampling(most, stop=stop), 0, base.eos_ids)
    if found is None:
        with pytest.raises(server.NoAnswer, match="or ids up to an end"):
            server.completion_of(ids, [-1.0] * len(ids), ask, base)
        return
    done = server.completion_of(ids, [-1.0] * len(ids), ask, base)
    assert (done.reason, len(done.ids)) == (found[1], len(found[0].replace("<e>", "<")))


def test_a_stop_ends_the_wait_for_a_server_at_once(vllm, tmp_path):
    with proxied.Proxy(vllm.url, tmp_path) as proxy:
        sampler = open_http(tmp_path / "run", proxy.url)
        adapters = {MAIN: version(small_base(), 1)}
        sampler.load(adapters, version_of(adapters))
        answers = threading.Event()
        proxy.fault = proxied.instead(lambda: answers.wait(60) and (200, {}))
        tickets = [sampler.submit(one) for one in requests(3)]
        assert sampler.step() == [] and sampler.busy
        for ticket in tickets:
            sampler.cancel(ticket)
        assert not sampler.busy and sampler.step() == []
        assert not answers.is_set()
        proxy.fault = None
        answers.set()
        sampler.release()


def test_devices_that_play_are_refused_beside_servers():
    with pytest.raises(BadInput, match="--mesh.rollout: devices that play are"):
        check_team(cli.parse(["--rollout.sampler", "http", "--mesh.rollout", "1"]))
