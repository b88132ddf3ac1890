"""TLS, and servers that take a connection and say nothing: one line each."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from odd_server import completion, odd

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import client


def certificate(folder: Path, name: str = "localhost", days: int = 1) -> tuple[Path, Path]:
    """(certificate, key), signed by itself, made on the spot."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


@contextmanager
def with_tls(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a good server that speaks TLS with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    bind = ThreadingHTTPServer.server_bind

    def bound(self: Any) -> None:
        bind(self)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadingHTTPServer, "server_bind", bound)
        with odd(lambda path, body: (200, completion(body))) as (url, _):
            patch.undo()
            yield url.replace("http://", "https://")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    Path("p.txt").write_text("a secret prompt\nanother\n")
    return tmp_path


def send(url: str, *words: str) -> int:
    return main(["send", "p.txt", "--url", url, "--out", "out", "--timeout", "5", "--arrive", "one", *words])


def test_https_with_an_authority_of_ones_own(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pair = certificate(here / "a")
    with with_tls(pair, monkeypatch) as url:
        assert send(url) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"accprobe: {url}: its certificate is not trusted (self")
        assert "SSL_CERT_FILE" in said
        assert len(said.splitlines()) == 1
        monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
        assert send(url) == 0
        assert "2 of 2 answered in 1 pass" in capsys.readouterr().out
        assert send(url.replace("127.0.0.1", "localhost")) == 0


@pytest.mark.parametrize(("days", "says"), [(-1, "expired"), (1, "mismatch")])
def test_a_bad_certificate_is_one_line(
    days: int, says: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pair = certificate(here / "a", name="elsewhere.example", days=days)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    with with_tls(pair, monkeypatch) as url:
        assert send(url if says == "expired" else url.replace("127.0.0.1", "localhost")) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert says in err.lower()
    assert "secret" not in err


def test_http_where_tls_is_and_the_other_way_round(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with odd(lambda path, body: (200, completion(body))) as (url, _):
        assert send(url.replace("http://", "https://")) == 2
    assert "no TLS is spoken there: write http://" in capsys.readouterr().err
    with with_tls(certificate(here / "a"), monkeypatch) as url:
        assert send(url.replace("https://", "http://")) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "internal error" not in err


@pytest.mark.parametrize("takes", [True, False])
def test_a_server_that_says_nothing_is_one_line(
    takes: bool, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One that takes connections and reads, and one whose queue of connections nobody empties. It is not waited for as
    long as for an answer."""
    monkeypatch.setattr(client, "INTRODUCTION_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as hung:
        kept: list[socket.socket] = []
        if takes:
            threading.Thread(target=lambda: kept.append(hung.accept()[0]), daemon=True).start()
        began = time.monotonic()
        assert main(["send", "p.txt", "--url", f"http://127.0.0.1:{hung.getsockname()[1]}", "--out", "out"]) == 2
        assert time.monotonic() - began < 10
        for one in kept:
            one.close()
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "did not answer within 0.5 s" in err[0]
    assert not Path("out/send.json").exists()
