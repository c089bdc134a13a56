"""TLS on both ports: who is let in, and certificates that change while the server runs.

Clients are gRPC's, Python's `http.client` and `openssl s_client`.
"""

import asyncio
import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.aio import asynchronous
from tests.support.certificates import Certificates, make_certificates
from tests.support.servers import CONFIG, echo_server, frontends
from trtc.protos.errors import RequestError, UnavailableError
from trtc.runtime.client import AsyncClient, ClientTls
from trtc.runtime.frontends.http.listener import MAX_SOCKETS
from trtc.runtime.server.app import ServerConfig
from trtc.runtime.wire.tls import ServerTls


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def over(tls: ServerTls) -> ServerConfig:
    return replace(CONFIG, frontends=frontends(tls=tls))


async def generate(address: str, tls: ClientTls | None) -> int:
    async with AsyncClient(address, tls=tls, timeout=10) as client:
        return len((await client.generate([1], max_tokens=2, ignore_eos=True).result()).token_ids)


def get(port: int, tls: ClientTls, path: str = "/healthz") -> int:
    """The status of a GET over HTTPS."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def fingerprint(port: int) -> bytes:
    """Of the certificate that the server shows a client that names no server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain) as client,
    ):
        shown = client.getpeercert(binary_form=True)
        assert shown is not None
        return shown


@asynchronous
async def test_https_answers_who_trusts_it_and_no_plain_client(certificates: Certificates) -> None:
    async with echo_server(config=over(certificates.server(mutual=False))) as server:
        port = server.http_port
        assert await asyncio.to_thread(get, port, certificates.trusting) == 200
        assert await asyncio.to_thread(get, port, certificates.trusting, "/metrics") == 200
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(plain), pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(plain.request, "GET", "/healthz")
            await asyncio.to_thread(plain.getresponse)


@asynchronous
async def test_old_versions_of_tls_are_refused(certificates: Certificates) -> None:
    def connect(port: int, version: str) -> int:
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", version]
        command += ["-alpn", "h2,http/1.1", "-cipher", "DEFAULT@SECLEVEL=0"]
        done = subprocess.run(command, input=b"", capture_output=True, check=False, timeout=20)
        return done.returncode

    async with echo_server(config=over(certificates.server(mutual=False))) as server:
        for port in (server.http_port, int(server.address.rpartition(":")[2])):
            assert await asyncio.to_thread(connect, port, "-tls1_2") == 0
            assert await asyncio.to_thread(connect, port, "-tls1_3") == 0
            assert await asyncio.to_thread(connect, port, "-tls1_1") != 0


@pytest.mark.parametrize("mutual", [False, True])
@asynchronous
async def test_certificates_that_are_replaced_are_shown_to_the_next_client(
    mutual: bool, tmp_path: Path
) -> None:
    """A new authority signs server and clients: the old clients are then strangers."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    live = Certificates(tmp_path / "live")
    shutil.copytree(old.folder, live.folder)

    async with echo_server(config=over(live.server(mutual=mutual))) as server:
        ports = (server.http_port, int(server.address.rpartition(":")[2]))
        assert await generate(server.address, old.client()) == 2
        assert await asyncio.to_thread(get, server.http_port, old.client()) == 200
        async with AsyncClient(server.address, tls=old.client(), timeout=10) as connected:
            await connected.info()
            before = [await asyncio.to_thread(fingerprint, port) for port in ports]
            assert before[0] == before[1]
            for name in ("server.pem", "server.key", "ca.pem"):
                shutil.copy(new.folder / name, live.folder / name)
            after = [await asyncio.to_thread(fingerprint, port) for port in ports]
            assert after[0] == after[1] != before[0]
            await connected.info()  # goes on with its connection
        assert await generate(server.address, new.client()) == 2
        assert await asyncio.to_thread(get, server.http_port, new.client()) == 200
        with pytest.raises(UnavailableError):
            await generate(server.address, old.client())
        with pytest.raises(OSError):
            await asyncio.to_thread(get, server.http_port, old.client())


@asynchronous
async def test_a_rotation_that_is_half_done_keeps_the_old_certificate(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    live = Certificates(tmp_path / "live")
    shutil.copytree(old.folder, live.folder)
    async with echo_server(config=over(live.server(mutual=False))) as server:
        shutil.copy(new.folder / "server.pem", live.folder)
        assert await generate(server.address, old.trusting) == 2
        assert await asyncio.to_thread(get, server.http_port, old.trusting) == 200
        (live.folder / "server.pem").unlink()
        assert await generate(server.address, old.trusting) == 2


@asynchronous
async def test_clients_that_begin_no_handshake_are_bounded_in_time_and_number(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtc.runtime.frontends.http.server.HANDSHAKE_S", 1.0)

    def held(port: int) -> int:
        return sum(
            one.laddr.port == port and one.status == "ESTABLISHED"
            for one in psutil.Process().net_connections("tcp")
        )

    async with echo_server(config=over(certificates.server(mutual=False))) as server:
        port = server.http_port
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_SOCKETS + 100):
                # The server accepts in this loop too.
                client = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 10)
                stack.enter_context(client)
            assert await asyncio.to_thread(get, port, certificates.trusting) == 200
            assert held(port) <= MAX_SOCKETS
            first = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 10)
            stack.enter_context(first)
            assert await asyncio.to_thread(first.recv, 1) == b""


@pytest.mark.parametrize(
    ("broken", "field", "said"),
    [
        ("server.pem", "--tls-cert", "no certificate with its key"),
        ("server.key", "--tls-cert", "no certificate with its key"),
        ("ca.pem", "--tls-client-ca", "has no certificates"),
    ],
)
@asynchronous
async def test_files_that_are_not_pem_are_named(
    broken: str, field: str, said: str, certificates: Certificates, tmp_path: Path
) -> None:
    bad = Certificates(tmp_path / "bad")
    shutil.copytree(certificates.folder, bad.folder)
    (bad.folder / broken).write_text("no PEM")
    for make in (ServerTls.credentials, ServerTls.context):
        with pytest.raises(RequestError, match=said) as caught:
            make(bad.server(mutual=True))
        assert caught.value.field == field


def test_an_encrypted_key_is_refused_without_asking(
    certificates: Certificates, tmp_path: Path
) -> None:
    command = ["openssl", "ec", "-in", "server.key", "-aes256", "-passout", "pass:x"]
    command += ["-out", str(tmp_path / "locked.key")]
    subprocess.run(command, cwd=certificates.folder, check=True, capture_output=True)
    tls = ServerTls(certificates.folder / "server.pem", tmp_path / "locked.key")
    with pytest.raises(RequestError, match="without a password"):
        tls.context()
