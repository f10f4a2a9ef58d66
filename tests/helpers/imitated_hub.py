"""The hub's protocol, as far as a repository is made, filled and fetched: no network."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0" * 40


class Hub:
    """A hub on this machine. Whoever has another token is refused.

    Attributes:
        files: of each repository, by their paths.
        cards: texts that the hub was asked to validate.
    """

    def __init__(self, token: str) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.cards: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body, parts = self.rfile.read(length), self.path.split("?")[0].split("/")
                if self.headers.get("Authorization") != f"Bearer {token}":
                    return self.answer({"error": "Invalid token"}, 401)
                match parts[2:]:
                    case ["repos", "create"]:
                        asked = json.loads(body)
                        repo = f"{asked['organization']}/{asked['name']}"
                        assert asked["visibility"] == "private" if "visibility" in asked else True
                        hub.files.setdefault(repo, {})
                        self.answer({"url": f"{hub.url}/{repo}"})
                    case ["validate-yaml"]:
                        hub.cards.append(json.loads(body)["content"])
                        self.answer({"errors": [], "warnings": []})
                    case ["models", _, _, "preupload", _]:
                        files = [
                            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                            for file in json.loads(body)["files"]
                        ]
                        self.answer({"files": files})
                    case ["models", owner, name, "commit", _]:
                        lines = map(json.loads, body.splitlines())
                        values = [line["value"] for line in lines if line["key"] == "file"]
                        new = {v["path"]: base64.b64decode(v["content"]) for v in values}
                        hub.files[f"{owner}/{name}"] |= new
                        url = f"{hub.url}/{owner}/{name}/commit/{COMMIT}"
                        self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
                    case _:
                        self.answer({"error": self.path}, 404)

            def do_GET(self) -> None:
                match self.path.split("?")[0].split("/")[1:]:
                    case ["api", "models", owner, name, "revision", _]:
                        found = hub.files.get(f"{owner}/{name}")
                        if found is None:
                            return self.answer({"error": "Repository not found"}, 404)
                        names = [{"rfilename": path} for path in found]
                        self.answer({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": names})
                    case ["api", "models", owner, name, "tree", *_]:
                        found = hub.files[f"{owner}/{name}"].items()
                        self.answer([
                            {"type": "file", "path": p, "size": len(c), "oid": sha1(c).hexdigest()}
                            for p, c in found
                        ])  # fmt: skip
                    case [owner, name, "resolve", _, *path]:
                        self.send(hub.files[f"{owner}/{name}"]["/".join(path)], 200)
                    case _:
                        self.answer({"error": self.path}, 404)

            do_HEAD = do_GET

            def answer(self, value: Any, code: int = 200) -> None:
                self.send(json.dumps(value).encode(), code)

            def send(self, content: bytes, code: int) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                if code == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def imitated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Makes it the hub of huggingface_hub, with a cache below ``folder`` and the right token."""
    hub = Hub(token="hf_secret")
    files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield hub
    hub.close()
