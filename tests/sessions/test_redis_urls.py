# SPDX-License-Identifier: Apache-2.0
"""The Redis store by unix socket, TCP and TLS, with a password: all from the URL."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sessions.config import SessionsConfig
from sessions.errors import StoreUnavailable
from sessions.redis_store import RedisSessionStore
from tests.contracts.session_store import StoreHarness
from tests.fakes.redis_server import RedisServer
from tests.fakes.session_turns import fresh_session, run_turn

pytestmark = pytest.mark.redis


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        + ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        + ["-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="module")
def urls(directory: Path) -> Iterator[dict[str, str]]:
    certificate, key = make_certificate(directory, "server")
    tcp_port, tls_port = free_port(), free_port()
    server = RedisServer(
        directory,
        *("--bind", "127.0.0.1", "--port", str(tcp_port), "--tls-port", str(tls_port)),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"),
        *("--requirepass", "s3cret", "--appendonly", "yes", "--appendfsync", "always"),
    )
    try:
        server.start()
    except RuntimeError:
        pytest.skip("this redis-server was built without TLS")
    yield {
        "unix": f"unix://:s3cret@{server.socket_path}?db=1",
        "tcp": f"redis://:s3cret@127.0.0.1:{tcp_port}/2",
        "tls": f"rediss://default:s3cret@127.0.0.1:{tls_port}/3?ssl_ca_certs={certificate}",
    }
    server.kill()


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_turn_commits_by_every_kind_of_connection(urls: dict[str, str], kind: str) -> None:
    config = SessionsConfig(store="redis", redis_url=urls[kind])
    harness = StoreHarness(lambda: RedisSessionStore(config))
    session, records = fresh_session()
    session = harness.run(harness.store.create(session, records))
    session, record = harness.run(run_turn(harness.store, session))
    assert harness.run(harness.another().read_log(session)).records[-1] == record
    harness.close()


def test_a_server_whose_certificate_is_not_trusted_is_refused(
    urls: dict[str, str], directory: Path
) -> None:
    stranger, _ = make_certificate(directory, "stranger")
    url = urls["tls"].split("?")[0] + f"?ssl_ca_certs={stranger}"
    store = RedisSessionStore(SessionsConfig(store="redis", redis_url=url))
    with pytest.raises(StoreUnavailable, match="(?i)certificate") as caught:
        asyncio.run(store.open())
    assert "s3cret" not in str(caught.value)
