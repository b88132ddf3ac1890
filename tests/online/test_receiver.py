"""Who is turned away, in which words, and that whoever may speak is served meanwhile."""

import io
import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from online.online_certificates import Authority
from online.online_peers import hostile
from online.online_runs import ended, free_port, sent, serve
from opcheck.layer_dumps import build

from vllm_accprobe.online import arrivals
from vllm_accprobe.online.arrivals import FrameError, Have, Hello, Refusal


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("small") / "dump")


def test_certificates_decide_on_both_sides(tmp_path: Path, small: Path) -> None:
    """Without, expired, foreign, for another host: one line each, exit code 2; the right one is served after them."""
    ours, foreign, port = Authority(), Authority("a stranger"), free_port()
    receive = serve(tmp_path / "out", port, "--tls", str(ours.folder(tmp_path / "server", "server")))
    clients = {
        "plain": None,
        "expired": ours.folder(tmp_path / "expired", "client", expired=True),
        "foreign": foreign.folder(tmp_path / "foreign", "client", trusts=ours),
        "distrust": foreign.folder(tmp_path / "distrust", "client"),
    }
    heard = {
        "plain": "rank 0: the receiver refuses: it wants TLS: name the folder of certificates with --tls",
        "expired": "refuses this side: its own certificate has expired",
        "foreign": "refuses this side: its own certificate is not signed by this ca.crt",
        "distrust": f"127.0.0.1:{port}: its certificate refused: ",  # OpenSSL's words go on
    }
    with ended(receive):
        for name, folder in clients.items():
            more = ["--tls", str(folder)] if folder else []
            code, lines = sent(str(small), "--port", str(port), "--patience", "5", *more)
            assert (code, len(lines)) == (2, 1), (name, lines)
            assert heard[name] in lines[0], name
        code, lines = sent(str(small), "--port", str(port), "--tls", str(ours.folder(tmp_path / "client", "client")))
        assert code == 0, lines
        assert receive.code() == 0, receive.said
    refused = [line for line in receive.lines if line.startswith("refused 127.0.0.1: ")]
    assert any("certificate has expired" in line for line in refused)
    assert any("certificate refused: " in line and "expired" not in line for line in refused)


def test_a_certificate_for_another_host_and_no_certificate(tmp_path: Path, small: Path) -> None:
    ours, port = Authority(), free_port()
    server = ours.folder(tmp_path / "server", "server", names=("gpu-machine",))
    client = ours.folder(tmp_path / "client", "client")
    receive = serve(tmp_path / "out", port, "--tls", str(server))
    with ended(receive):
        code, (line,) = sent(str(small), "--port", str(port), "--tls", str(client))
        assert code == 2
        assert "certificate refused: IP address mismatch, certificate is not valid for '127.0.0.1'" in line
        bare = ssl.create_default_context(cafile=str(client / "ca.crt"))
        bare.check_hostname = False
        with socket.create_connection(("127.0.0.1", port), 5) as plain, bare.wrap_socket(plain) as wire:
            wire.settimeout(5)
            with pytest.raises(ssl.SSLError):  # TLS 1.3 tells a client when it reads
                wire.recv(1)
        receive.until("refused 127.0.0.1: it showed no certificate")


@pytest.mark.parametrize("secured", [False, True])
def test_a_hostile_peer_takes_no_memory_and_nobodys_turn(tmp_path: Path, small: Path, secured: bool) -> None:
    """With ``secured`` it has a certificate of ours: then only its words are wrong."""
    ours, port, stop, context, more = Authority(), free_port(), threading.Event(), None, [[], []]
    if secured:
        more = [["--tls", str(ours.folder(tmp_path / side, side))] for side in ("server", "client")]
        context = ssl.create_default_context(cafile=str(tmp_path / "client/ca.crt"))
        context.check_hostname = False
        context.load_cert_chain(tmp_path / "client/client.crt", tmp_path / "client/client.key")
    receive = serve(tmp_path / "out", port, *more[0], anew=True)  # its memory is its own
    peers = [threading.Thread(target=hostile, args=(port, stop, context), daemon=True) for _ in range(3)]
    with ended(receive):
        for peer in peers:
            peer.start()
        time.sleep(0.5)
        before = receive.rss_kb()
        time.sleep(1)
        after = receive.rss_kb()
        code, lines = sent(str(small), "--port", str(port), *more[1])
        assert code == 0, lines
        stop.set()
        assert receive.code() == 0, receive.said
    assert after - before < 30_000
    refused = [line for line in receive.lines if line.startswith("refused")]
    assert any("1,152,921,504,606,846,976 bytes" in line for line in refused)
    assert len(refused) < 40  # each reason once, and once more with its count


def test_a_rank_that_lies(tmp_path: Path) -> None:
    """One that may speak, and then leaves a gap, goes beyond its room, or ends elsewhere: refused in words, and what
    came before stays."""
    port = free_port()
    receive = serve(tmp_path / "out", port, "--max-gb", "0.001", "--ranks", "0")
    hello = arrivals.words(arrivals.HELLO, Hello(0))
    line = arrivals.placed(arrivals.JOURNAL_FRAME, 0, 0, b'{"event":"start","schema":1}\n')
    lies = {
        "segment 3 goes on at byte 1,152,921,504,606,846,976, where 0 are here":
            arrivals.placed(arrivals.DATA, 3, 1 << 60, b"x"),
        "segment 1,048,576 is beyond": arrivals.placed(arrivals.DATA, 1 << 20, 0, b"x"),
        "the end is not where the journal ends": arrivals.words(arrivals.END, Have(77)),
        "budget of 0.001 GB for a rank is spent": [*arrivals.placed(arrivals.DATA, 0, 0, b"x" * 999_000),
                                                  *arrivals.placed(arrivals.DATA, 0, 999_000, b"x" * 99_000)],
        "a piece that no sender sends": arrivals.words(arrivals.HELLO, Hello(0)),
    }  # fmt: skip
    with ended(receive):
        for said, parts in lies.items():
            with socket.create_connection(("127.0.0.1", port), 5) as s:
                s.sendall(b"".join([*hello, *line, arrivals.head(arrivals.SYNC, 0), *parts]))
                s.settimeout(10)
                heard = b""
                with suppress(OSError):
                    while block := s.recv(1 << 16):
                        heard += block
            assert said.encode() in heard.replace(b"1048576", b"1,048,576"), said
    assert (tmp_path / "out/received/rank0000/journal.jsonl").read_bytes() == bytes(line[1])


def test_what_a_line_brought_before_it_broke_stays(tmp_path: Path) -> None:
    """Also without a SYNC: else a line that often breaks would carry the same bytes for ever."""
    port = free_port()
    line = arrivals.placed(arrivals.JOURNAL_FRAME, 0, 0, b'{"event":"start","schema":1}\n')
    receive = serve(tmp_path / "out", port, "--ranks", "0")
    with ended(receive):
        with socket.create_connection(("127.0.0.1", port), 5) as s:
            hello = arrivals.words(arrivals.HELLO, Hello(0))
            s.sendall(b"".join([*hello, *line, arrivals.head(arrivals.DATA, 99)]))
            s.shutdown(socket.SHUT_WR)
            while s.recv(1 << 16):  # closed with answers unread, the line would be reset, and lose what was on its way
                pass
        receive.until("the line broke")
        assert (tmp_path / "out/received/rank0000/journal.jsonl").read_bytes() == bytes(line[1])


# --- the pieces and their limits ---


_KINDS = st.sampled_from([arrivals.DATA, arrivals.JOURNAL_FRAME])


@given(st.lists(st.tuples(_KINDS, st.binary(max_size=200)), max_size=5))
def test_pieces_come_out_as_they_went_in(given_: list[tuple[int, bytes]]) -> None:
    made = b"".join(b"".join(arrivals.placed(kind, 7, 1 << 40, body)) for kind, body in given_)
    found = list(arrivals.pieces(io.BytesIO(made).read, len(made)))
    assert [(kind, *arrivals.place_of(body)) for kind, body in found] == [(k, 7, 1 << 40, b) for k, b in given_]


@given(st.binary(min_size=arrivals.HEAD.size, max_size=arrivals.HEAD.size))
def test_no_head_is_believed(head: bytes) -> None:
    try:
        kind, length = arrivals.length_of(head)
    except FrameError:
        return
    assert kind in range(1, 11)
    assert length <= arrivals.CHUNK + arrivals.PLACE.size


def test_lengths_are_refused_before_they_are_read() -> None:
    read = []

    def gives(n: int) -> bytes:
        read.append(n)
        return arrivals.head(arrivals.DATA, 1 << 60)

    with pytest.raises(FrameError, match="announces 1,152,921,504,606,846,976 bytes where 1,048,592 are allowed"):
        list(arrivals.pieces(gives, 1 << 61))
    assert read == [arrivals.HEAD.size]
    whole = b"".join(arrivals.placed(arrivals.DATA, 0, 0, b"abc"))
    for cut in (len(whole) - 1, 5):
        with pytest.raises(FrameError, match="ends within a piece"):
            list(arrivals.pieces(io.BytesIO(whole).read, cut))


@pytest.mark.parametrize(("kind", "body", "said"), [
    *((Have, body, "") for body in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"1", b'{"later": 1}')),
    *((Hello, b'{"protocol": 1, "rank": %s}' % n, "rank is ") for n in (b"-1", b"65537", b"1.0", b"true", b'"1"')),
    (Hello, b'{"protocol": 1}', "it has no rank"), (Hello, b'{"protocol": 2, "rank": 0}', "protocol is 2, not 1"),
    (Hello, b'{"protocol": 1, "rank": 0, "totals": [1, -2]}', r"totals\[1\] is -2"),
    (Have, b'{"journal": 1152921504606846976}', "journal is 1152921504606846976"),
    (Have, b'{"journal": 0, "digest": 5}', "digest is 5"), (Have, b'{"segments": [[1]]}', r"segments\[0\] is \[1\]"),
    (Have, b'{"segments": [[1, -1]]}', r"segments\[0\]\[1\] is -1"),
    (Refusal, b'{"why": "x", "again": 1}', "again is 1"),
])  # fmt: skip
def test_words_are_those_of_the_protocol(kind: type, body: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=rf"its words are not this protocol's \(.*{said}"):
        arrivals.said_in(kind, body)
