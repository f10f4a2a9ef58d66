"""Addresses: their proxies, their certificates, and how they are written."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess

import httpx
import pytest

from marft_jax.errors import BadInput
from marft_jax.formats.hosts import listen, transport_to, url_of


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for kind in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{kind}_proxy", raising=False)
        monkeypatch.delenv(f"{kind.upper()}_PROXY", raising=False)


def proxy_of(url: str) -> str | None:
    found = getattr(transport_to(url)._pool, "_proxy_url", None)
    return found and f"{found.scheme.decode()}://{found.host.decode()}:{found.port}"


PROXY = "http://proxy.test:3128"


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_direct"),
    [
        ("http://judge.test/v1", "", False),
        ("http://127.0.0.1:8000", "", True),
        ("http://127.3.2.1:8000", "", True),
        ("http://[::1]:8000", "", True),
        ("http://judge.test", "*", True),
        ("http://judge.test", "judge.test", True),
        ("http://a.judge.test", ".judge.test", True),
        ("http://a.judge.test", "*.judge.test", True),
        ("http://notjudge.test", "judge.test", False),
        ("http://judge.test:8000", "other.test, JUDGE.test:8000", True),
        ("http://10.1.2.3", "10.0.0.0/8,::1/128", True),
        ("http://11.1.2.3", "10.0.0.0/8", False),
        ("http://10.1.2.3", "10.1.2.3", True),
        ("http://[fd00::7]", "fd00::/8", True),
        ("http://[fd00::7]", "[fd00::7]", True),
        ("http://judge.test", "10.0.0.0/8,,fd00::/8", False),
    ],
)
def test_an_address_is_reached_through_the_proxy_or_not(url, no_proxy, is_direct, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_of(url) == (None if is_direct else PROXY)


@pytest.mark.parametrize(
    ("name", "url", "is_used"),
    [("http_proxy", "http://judge.test", True), ("HTTPS_PROXY", "https://judge.test", True),
     ("HTTPS_PROXY", "http://judge.test", False), ("ALL_PROXY", "https://judge.test", True),
     ("HTTP_PROXY", "https://judge.test", False)],
)  # fmt: skip
@pytest.mark.parametrize("value", [PROXY, "proxy.test:3128"])
def test_each_kind_of_address_has_its_variable(name, url, is_used, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert proxy_of(url) == (PROXY if is_used else None)


@pytest.mark.parametrize("value", ["ftp://proxy.test", "http://[::1", "http://a:b:c", "socks9://a"])
@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy"])
def test_a_variable_that_names_no_proxy_is_named(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=name) as wrong:
        transport_to("http://judge.test")
    assert value in str(wrong.value)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_of_certificates_that_is_none_is_named(content, tmp_path, monkeypatch):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(BadInput, match=f"SSL_CERT_FILE {file}"):
        transport_to("https://judge.test")
    transport_to("http://judge.test")


def test_a_private_authority_is_trusted(tmp_path, monkeypatch):
    """As SSL_CERT_FILE says, which names the certificate of its server."""
    key, file = tmp_path / "key.pem", tmp_path / "ca.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    try:
        subprocess.run([*made, "-keyout", key, "-out", file], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async def ask():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file, key)
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(transport=transport_to(url)) as client:
                return (await client.get(url)).text

    with pytest.raises(httpx.ConnectError):
        asyncio.run(ask())
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert asyncio.run(ask()) == "hi"


@pytest.mark.parametrize(
    ("host", "url"), [("fe80::1", "http://[fe80::1]:80/v1"), ("a", "http://a:80/v1")]
)
def test_an_address_is_written_so_that_clients_take_it(host, url):
    assert url_of(host, 80, "/v1") == url
    assert httpx.URL(url).port in (None, 80)


def test_a_reply_in_parts_is_sent_at_once():
    with listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            taken, _ = listener.accept()
            with taken:
                assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
