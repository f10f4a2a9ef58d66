"""Tools of MCP servers, which may hang, die, or write anything."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import small
from families_of_calls import tokenizer_of

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.extras.mcp import source
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, dump_team
from marft_jax.tools import EpisodeTools, ToolCall, for_model, load_toolboxes
from marft_jax.types import AnsweredCall

pytest.importorskip("mcp.server.mcpserver")
connection = pytest.importorskip("marft_jax.extras.mcp.connection")

SERVER = Path(__file__).parents[2] / "helpers" / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER)]


def box_of(**options):
    [box] = load_toolboxes({"solver": [{"mcp": options}]}, "team")
    return box


@pytest.fixture(scope="module", autouse=True)
def patience():
    """A server may take minutes to start on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "START_SECONDS", 600)
        patch.setattr(source, "_LIST_SECONDS", 600)
        yield


@pytest.fixture(scope="module")
def box():
    return box_of(command=COMMAND, variables=["MARFT_SHOWN"], characters=500, seconds=120)


@pytest.fixture
def tools():
    with contextlib.closing(EpisodeTools(DaemonThreads())) as opened:
        yield opened


def answers(tools, box, *calls):
    return tools.answer(box, [ToolCall(name, json.dumps(given)) for name, given in calls])


def test_tools_are_listed_with_their_schemas_and_odd_names_are_left_out(box):
    assert [tool.name for tool in box.tools] == ["count", "total", "variables", "act"]
    count, total, *_ = box.tools
    assert count.description == "Adds to a total."
    assert count.schema["properties"]["n"]["type"] == "integer"
    assert "$defs" in total.schema  # a schema that refers to itself


@pytest.mark.slow
def test_an_episode_has_a_server_of_its_own_and_a_branch_brings_one_to_the_same_state(box, tools):
    counted = answers(tools, box, ("count", {"n": 1}), ("count", {"n": 2}))
    assert [call.answer for call in counted] == ["1", "3"]
    with contextlib.closing(EpisodeTools(DaemonThreads())) as other:
        other.repeat(box, [AnsweredCall("count", '{"n": 5}', "5", "ok")])
        [call] = answers(other, box, ("count", {"n": 4}))
    assert (call.answer, call.verdict) == ("9", "ok")


@pytest.mark.slow
def test_calls_are_answered_and_a_server_that_dies_is_started_again(box, tools, monkeypatch):
    monkeypatch.setenv("MARFT_SHOWN", "1")
    monkeypatch.setenv("MARFT_TOKEN", "secret")
    node = {"value": 1, "children": [{"value": 2}, {"value": 3, "children": [{"value": 4}]}]}
    for name, given, verdict, answer in (
        ("total", {"node": node}, "ok", "10"),
        ("total", {"node": {"children": []}}, "wrong", "error: "),
        ("act", {"what": "fail"}, "wrong", "error: "),
        ("act", {"what": "junk"}, "ok", "junk"),
        ("count", {"n": 7}, "ok", "7"),
        ("act", {"what": "die"}, "failed", "error: ConnectionError: "),
        ("count", {"n": 1}, "ok", "1"),
    ):
        [call] = answers(tools, box, (name, given))
        assert (call.verdict, call.answer.startswith(answer)) == (verdict, True), (name, call)
        assert "\n" not in call.answer and len(call.answer) < 600
    [call] = answers(tools, box, ("variables", {}))
    found = call.answer.split()
    assert "MARFT_SHOWN" in found and "PATH" in found and "MARFT_TOKEN" not in found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["hang", "flood"])
def test_a_server_that_no_longer_answers_costs_a_call_and_is_started_again(what, tools, caplog):
    box = box_of(command=COMMAND, seconds=0.5, only=["act"])
    [call] = answers(tools, box, ("act", {"what": what}))
    assert (call.verdict, call.answer[:7]) == ("failed", "error: ")
    deadline = time.monotonic() + 300
    while answers(tools, box, ("act", {"what": "well"}))[0].answer != "well":
        assert time.monotonic() < deadline
    assert not [record for record in caplog.records if record.name.startswith("mcp")]


SILENT = ("failed", "error: TimeoutError: ")
HOSTILE = {
    "thousands of tools": ("ok", "o"), "a huge schema": ("ok", "o"), "NaN in a schema": ("ok", "o"),
    "NaN in a result": ("ok", "o"), "bytes that are no UTF-8": ("ok", "o \ufffd\ufffd"),
    "changes its list": ("ok", "o"), "ends after each call": ("ok", "o"), "another id": SILENT,
    "wrong JSON-RPC": SILENT, "an error without a code": SILENT, "deep nesting": SILENT,
    "a result of another kind": ("failed", "error: ValidationError: "), "slow drip": SILENT,
    "endless lines": SILENT,
}  # fmt: skip


def hostile(mode, **options):
    """The tools of a server that breaks the rules in one way."""
    server = SERVER.with_name("hostile_mcp.py")
    return box_of(command=[sys.executable, "-S", "-E", str(server), mode], **options)


@pytest.mark.parametrize("mode", HOSTILE)
def test_a_hostile_server_costs_a_call_at_most_and_is_ended_with_its_episode(
    mode, monkeypatch, caplog
):
    verdict, answer = HOSTILE[mode]
    monkeypatch.setattr(connection, "_PROBE_SECONDS", 0.2)
    box = hostile(mode, seconds=0.2 if "TimeoutError" in answer else 300)
    assert len(box.tools) <= 1000 and len(str(box.tools[0].schema)) < 1000
    with contextlib.closing(EpisodeTools(DaemonThreads())) as opened:
        [call] = answers(opened, box, (box.tools[0].name, {"n": 1}))
    assert (call.verdict, call.answer[: len(answer)]) == (verdict, answer), call
    assert "\n" not in call.answer
    assert not [r for r in caplog.records if r.name.partition(".")[0] in ("mcp", "client")]
    deadline = time.monotonic() + 60
    while connection._HELD:
        assert time.monotonic() < deadline, "a server is left"
        time.sleep(0.01)


TEXT = {"type": "text", "text": "o"}
CITY = {"city": "Oslo", "degrees": 7}
BLOB = {"uri": "a:b", "blob": "AA"}
IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
LINK = {"type": "resource_link", "uri": "file:///plan.md", "name": "plan"}
NOTES = {"uri": "file:///a.md", "text": "# Notes\nbuy pears"}
PARTS = {
    "(image)": IMAGE,
    "o": TEXT | {"annotations": {"priority": "odd"}},
    "# Notes\nbuy pears": {"type": "resource", "resource": NOTES},
    "(resource_link file:///plan.md)": LINK,
    "(resource)": {"type": "resource", "resource": BLOB},
    "(video a:b)": {"type": "video", "uri": "a:b"},
    "*o*": {"type": "markdown", "text": "*o*"},
    "(map)": {"type": "map"},
}
"""Parts of a result, and how the agent reads each."""


@pytest.mark.parametrize(
    ("result", "verdict", "answer"),
    [
        ({"content": [TEXT | {"text": ""}], "structuredContent": CITY}, "ok", json.dumps(CITY)),
        ({"content": [], "structuredContent": CITY, "isError": True}, "wrong", "error: {"),
        ({"content": [TEXT], "structuredContent": CITY}, "ok", "o"),
        ({"content": []}, "ok", ""),
        ({"content": [*PARTS.values()]}, "ok", "\n".join(PARTS)),
        ({"content": [{"type": "map"}], "isError": True}, "wrong", "error: (map)"),
    ],
)  # fmt: skip
def test_whatever_kinds_of_parts_a_result_has_the_agent_reads_what_they_are(
    result, verdict, answer, tools
):
    [call] = answers(tools, hostile(json.dumps(result)), ("act", {"n": 1}))
    assert call.verdict == verdict
    assert call.answer == answer or verdict == "wrong" and call.answer.startswith(answer)


@pytest.mark.parametrize(
    ("mode", "names"), [("an empty first page", ["act"]), ("one tool on each page", ["t0", "t2"])]
)
def test_only_a_missing_cursor_ends_a_list_of_tools(mode, names):
    assert [tool.name for tool in hostile(mode).tools] == names


def test_a_schema_without_a_type_is_that_of_an_object(tools):
    box = hostile("schemas without a type")
    assert [tool.name for tool in box.tools] == ["t0", "t1", "t2", "t3"]
    assert all(tool.schema["type"] == "object" for tool in box.tools)
    assert {*box.tools[1].schema["properties"]} == {"a", "b", "c"}
    for tokenizer in (ByteTokenizer(), *map(tokenizer_of, ("hermes", "qwen3.5", "glm"))):
        talk = [{"role": "user", "content": "a"}]
        shown = tokenizer.chat(*for_model(talk, box.definitions, tokenizer))
        assert "t1" in tokenizer.decode(shown)
    [call] = answers(tools, box, ("t1", {"a": 1}))
    assert (call.verdict, call.answer) == ("ok", "o")


@pytest.mark.parametrize("only", [[], ["t7", "t8"]])
def test_many_tools_are_said_with_the_length_that_they_give_a_prompt(only, caplog):
    server = str(SERVER.with_name("hostile_mcp.py"))
    script = [sys.executable, "-S", "-E", server, "two hundred tools"]
    tools = ({"mcp": {"command": script, "only": only}},)
    small.team_of(Blueprint((Profile("solver", answers=True, tools=tools),)), context=2000)
    said = [r.getMessage() for r in caplog.records if "tokens longer" in r.getMessage()]
    assert len(said) == (not only)
    for line in said:
        assert re.search(r"agent solver: its 200 tools make each prompt \d{4,5} tokens", line)
        assert "only: [NAME, ...]" in line


class Locked(BaseHTTPRequestHandler):
    """A server over HTTP that wants a key."""

    status = 401

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        result = {"tools": [{"name": "act", "inputSchema": {"type": "object"}}]}
        if asked["method"] == "initialize":
            version, about = asked["params"]["protocolVersion"], {"name": "a", "version": "1"}
            able = {"capabilities": {"tools": {}}, "serverInfo": about}
            result = {"protocolVersion": version, **able}
        if asked["method"] == "tools/call":
            result = {"content": [{"type": "text", "text": "in"}]}
        known = ("initialize", "tools/list", "tools/call")
        refusal = {"error": {"code": -32601, "message": ""}}
        answer = {"result": result} if asked["method"] in known else refusal
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id")} | answer).encode()
        keys = self.headers["Authorization"], self.headers["X-Team"]
        is_open = keys == ("Bearer sesame", "$a")
        self.send_response((200 if "id" in asked else 202) if is_open else self.status)
        self.send_header("Content-Type", "application/json")
        body = body if is_open and "id" in asked else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def locked():
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


@pytest.mark.parametrize("value", ["Bearer sesame", "Bearer $MARFT_SESAME", "${MARFT_WHOLE}"])
def test_a_server_gets_the_headers_that_it_wants_and_nothing_shows_them(
    value, locked, tools, monkeypatch, caplog
):
    monkeypatch.setenv("MARFT_SESAME", "sesame")
    monkeypatch.setenv("MARFT_WHOLE", "Bearer sesame")
    entry = {"mcp": {"url": locked, "headers": {"Authorization": value, "X-Team": "$$a"}}}
    [box] = load_toolboxes({"solver": [entry]}, "team")
    [call] = answers(tools, box, ("act", {}))
    assert (call.answer, call.verdict) == ("in", "ok")
    team = dump_team(Blueprint((Profile("solver", answers=True, tools=(entry,)),)))
    assert "sesame" not in f"{box} {call} {caplog.text} {team}" or value == "Bearer sesame"


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({}, 401, "cannot be reached: .*401 Unauthorized.*headers"),
        (
            {"Authorization": "Bearer $MARFT_OTHER"},
            403,
            "cannot be reached: .*403 Forbidden.*headers",
        ),
        ({"Authorization": "Bearer $MARFT_MISSING"}, 401, r"headers: .* \$NAME.*MARFT_MISSING"),
        ({"Authorization": 3}, 401, "headers"),
    ],
)
def test_a_server_that_wants_another_key_is_named_and_no_key_is(
    headers, status, message, locked, monkeypatch
):
    monkeypatch.setenv("MARFT_OTHER", "open-barley")
    monkeypatch.setattr(Locked, "status", status)
    with pytest.raises(BadInput, match=message) as refused:
        box_of(url=locked, headers=headers)
    assert "\n" not in str(refused.value) and "barley" not in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("dies in the start", r"cannot be reached: .*Connection closed \(no key\)"),
        ("pages without an end", r"expected tools that it has \(none with a plain name\)"),
        ("a schema that is no object", "cannot be reached: ValidationError: "),
    ],
)
def test_a_hostile_list_of_tools_is_refused_when_the_run_starts(mode, message):
    with pytest.raises(BadInput, match=message) as refused:
        hostile(mode)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_server_over_http_serves_many_episodes_of_a_run_at_once():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*COMMAND, "http", str(port)], **quiet) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
            box = box_of(url=f"http://127.0.0.1:{port}/mcp", only=["count"], per="run")
            assert [tool.name for tool in box.tools] == ["count"]
            episodes, threads = [EpisodeTools(DaemonThreads()) for _ in range(64)], DaemonThreads()
            waits = [threads.submit(answers, one, box, ("count", {"n": 1})) for one in episodes]
            assert sorted(int(one.result()[0].answer) for one in waits) == [*range(1, 65)]
            server.kill()
            server.wait()
            assert answers(episodes[0], box, ("count", {"n": 1}))[0].verdict == "failed"
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "tools: mcp: expected either `command: .*` or `url: ...`"),
        ({"command": ["/no/such/program"]}, "cannot be reached: FileNotFoundError"),
        ({"comand": ["a"]}, "did you mean 'command'"),
        ({"command": COMMAND, "only": ["sum"]}, r"only: expected tools that it has \(count, tot"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_when_the_run_starts(options, message):
    with pytest.raises(BadInput, match=message):
        box_of(**options)
