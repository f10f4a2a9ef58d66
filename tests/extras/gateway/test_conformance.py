"""Calls of all kinds, valid, odd and wrong, answered as by vLLM; and the helpers of the SDK."""

from __future__ import annotations

import os
import socket
import subprocess
import time

import httpx
import pytest
from serving import KEY, served

from marft_jax import cli
from scripts import conformance

pytestmark = pytest.mark.slow
SETTINGS = ["--model.context", "1024", "--team.max_new_tokens", "120"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conformance") / "base"
    conformance.write_base(folder)
    return folder


@pytest.fixture(scope="module")
def client(base, one_device):
    with served(None, cli.parse_run(None, str(base), SETTINGS)) as client:
        yield client


@pytest.fixture(scope="module")
def ours(client):
    return conformance.ask_all(str(client.base_url))


def differences(ours, other):
    assert {*ours} <= {*other} and len(ours) > 380
    found = {name: conformance.differences(name, ours[name], other[name]) for name in ours}
    return {name: lines for name, lines in found.items() if lines}


@pytest.mark.release
def test_answers_are_those_of_vllm_but_for_what_is_meant(ours, repository):
    file = repository / "tests" / "extras" / "gateway" / "vllm_answers.json"
    assert file.stat().st_size < 100_000
    assert differences(ours, conformance.recorded(file)) == {}


@pytest.mark.release
def test_what_is_meant_stands_in_the_readme_and_is_seen(ours, repository):
    readme = (repository / "marft_jax" / "extras" / "gateway" / "README.md").read_text()
    file = repository / "tests" / "extras" / "gateway" / "vllm_answers.json"
    other, meant = conformance.recorded(file), conformance.MEANT.copy()
    for why in meant:
        assert f"| {why} |" in readme
        conformance.MEANT = {one: pairs for one, pairs in meant.items() if one != why}
        assert differences(ours, other), f"{why} nothing differs"
    conformance.MEANT = meant


@pytest.mark.release
def test_answers_are_those_of_a_live_vllm(ours, base):
    """MARFT_VLLM: the folder of its programs, such as /opt/vllm/bin."""
    if "MARFT_VLLM" not in os.environ:
        pytest.skip("needs vLLM for CPUs; MARFT_VLLM: the folder of its programs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    path = f"{os.environ['MARFT_VLLM']}:{os.environ['PATH']}"
    given = {"PATH": path, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = ["vllm", "serve", str(base), "--port", port, *conformance.VLLM]
    with subprocess.Popen(command, env=os.environ | given) as process:
        try:
            deadline, url = time.monotonic() + 600, f"http://127.0.0.1:{port}"
            while True:
                try:
                    httpx.get(f"{url}/health")
                    break
                except httpx.HTTPError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(1)
            assert differences(ours, conformance.ask_all(url)) == {}
        finally:
            process.terminate()


@pytest.fixture
def sdk(client):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY)


def kinds_of(stream):
    return [event.type for event in stream]


def test_the_sdk_streams_text_calls_and_parsed_answers_of_chats(sdk):
    from pydantic import create_model

    fields = dict(model="solver", messages=[{"role": "user", "content": "1+2=?"}], temperature=0)
    text = sdk.chat.completions.create(**fields).choices[0].message.content
    with sdk.chat.completions.stream(**fields, logprobs=True) as stream:
        assert {"content.delta", "content.done", "logprobs.content.done"} <= {*kinds_of(stream)}
        assert stream.get_final_completion().choices[0].message.content == text
    form = create_model("Form", sure=(bool, ...))
    with sdk.chat.completions.stream(**fields, response_format=form) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, form)
    tool = {"type": "function", "function": {**conformance.ADD, "strict": True}}
    with sdk.chat.completions.stream(**fields, tools=[tool], tool_choice="required") as stream:
        assert "tool_calls.function.arguments.done" in kinds_of(stream)
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments["a"] in ("x", "y")


@pytest.mark.release
def test_the_sdk_streams_text_calls_and_parsed_answers_of_responses(sdk):
    from pydantic import create_model

    fields = dict(model="solver", input="1+2=?", temperature=0)
    text = sdk.responses.create(**fields).output_text
    with sdk.responses.stream(**fields) as stream:
        assert {"response.output_text.delta", "response.completed"} <= {*kinds_of(stream)}
        assert stream.get_final_response().output_text == text
    form = create_model("Form", sure=(bool, ...))
    with sdk.responses.stream(**fields, text_format=form) as stream:
        assert isinstance(stream.get_final_response().output_parsed, form)
    tool = {"type": "function", **conformance.ADD, "strict": True}
    with sdk.responses.stream(**fields, tools=[tool], tool_choice="required") as stream:
        assert "response.function_call_arguments.done" in kinds_of(stream)
        [call] = stream.get_final_response().output
    assert call.parsed_arguments["a"] in ("x", "y")
    body = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    asked = {"role": "user", "content": "1+2=?"}
    again = sdk.responses.create(**{**fields, "input": [asked, call, body]}, tools=[tool])
    assert again.output_text and again.usage.input_tokens > 100
