"""The online check at length: 20,000 calls over TLS, a line that is cut, a receiver that is killed, a hostile peer.

    python scripts/online_cases.py [--calls 20000] [--cuts 20] [--kills 2] [--hostile-s 60] [--work DIR]

A made dump (one decoder layer, a fault in its norm) is checked offline, then sent over TLS with certificates made on
the spot, while peers without a certificate and with one send lengths of 2**60, half lines and garbage, and another
greets with forged certificates; the line is cut and the receiver killed at even parts of the way. Printed: whether the
csv files are equal, calls a second of both, the receiver's memory through the hostile minute. Figures stand in
docs/online.md. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/opcheck")]

from online.online_certificates import Authority  # noqa: E402
from online.online_peers import answered, forged, hostile  # noqa: E402
from online.online_runs import ENV, Cut, Run, free_port, many, serve  # noqa: E402

FILES = ("opcheck.csv", "result.csv", "profile.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--hostile-s", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2.5e5, help="bytes a second of the line that is cut")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work = options.work or Path(made)
        work.mkdir(parents=True, exist_ok=True)
        sys.exit(run(work, options))


def run(work: Path, options: argparse.Namespace) -> int:
    dump = many(work / "dump", options.calls)
    begun = time.monotonic()
    command = [sys.executable, "-m", "vllm_accprobe.cli", "opcheck", str(dump), "--out", str(work / "offline")]
    subprocess.run(command, env=ENV, stdout=subprocess.DEVNULL, check=False)
    offline = time.monotonic() - begun
    print(f"offline: {options.calls / offline:.0f} calls a second ({offline:.0f} s)", flush=True)
    good = plain(work, dump, options)
    good &= rough(work, dump, options)
    return 0 if good else 1


def plain(work: Path, dump: Path, options: argparse.Namespace) -> bool:
    """A line that holds."""
    out, port, authority = work / "straight", free_port(), Authority()
    tls = [str(authority.folder(work / side, side)) for side in ("server", "client")]
    begun = time.monotonic()
    receive = serve(out, port, "--tls", tls[0])
    send = Run("send", str(dump), "--port", str(port), "--tls", tls[1])
    ends = send.code(3600), receive.code(3600)
    took = time.monotonic() - begun
    print(f"online over TLS: {options.calls / took:.0f} calls a second ({took:.0f} s); {send.lines[-1]}", flush=True)
    return told(out, work / "offline", ends, receive)


def rough(work: Path, dump: Path, options: argparse.Namespace) -> bool:
    """A line that is cut, a receiver that is killed, peers that are hostile."""
    out, port, authority, stop = work / "rough", free_port(), Authority(), threading.Event()
    tls = [authority.folder(work / f"{side}-2", side) for side in ("server", "client")]
    context = client_context(tls[1])
    false, tries = forgeries(work, authority), Counter[str]()
    total, journal = (dump / "rank0000/journal.jsonl").stat().st_size, out / "received/rank0000/journal.jsonl"
    peers = [threading.Thread(target=hostile, args=(port, stop, c), daemon=True) for c in (None, context, None)]
    peers.append(threading.Thread(target=forged, args=(port, stop, false, tries), daemon=True))
    line = Cut(port, options.rate)
    receive = serve(out, port, "--tls", str(tls[0]))
    send = Run("send", str(dump), "--port", str(line.port), "--tls", str(tls[1]), "--patience", "600")
    events = options.cuts + options.kills
    kills = {(k + 1) * events // (options.kills + 1) for k in range(options.kills)}
    done, sizes, begun = [0, 0], list[int](), time.monotonic()
    known = answered(port, context)  # a certificate of the authority's own gets an answer
    for peer in peers:
        peer.start()
    for k in range(events):
        goal = (k + 1) * total / (events + 1)
        while (journal.stat().st_size if journal.exists() else 0) < goal and send.process.poll() is None:
            time.sleep(0.05)
            sizes.append(receive.rss_kb())
        if send.process.poll() is not None:
            break
        if k in kills:
            receive.kill()
            receive = serve(out, port, "--tls", str(tls[0]))
            sizes.clear()
        else:
            line.cut()
        done[k in kills] += 1
    while time.monotonic() - begun < options.hostile_s and send.process.poll() is None:
        sizes.append(receive.rss_kb())
        time.sleep(0.05)
    hostile_s = time.monotonic() - begun
    stop.set()
    ends = send.code(3600), receive.code(3600)
    sizes = sizes[len(sizes) // 4 :] or [0]
    print(f"the line was cut {done[0]} times, the receiver killed {done[1]} times; {send.lines[-1]}")
    print(f"hostile for {hostile_s:.0f} s, in which all was sent: the last receiver's memory {min(sizes) / 1e3:.0f} "
          f"to {max(sizes) / 1e3:.0f} MB, its first quarter left out")  # fmt: skip
    inside = sum(n for name, n in tries.items() if name.endswith("got in"))
    print(f"forged certificates: {', '.join(f'{n} {name}' for name, n in sorted(tries.items()))}; {inside} got in")
    for said in [x for x in receive.lines if "times" in x and x.startswith("refused")]:
        print(f"  {said}")
    nobody = known and inside == 0 and len(tries) == len(false)
    return told(out, work / "offline", ends, receive) and done == [options.cuts, options.kills] and nobody


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "client.crt", folder / "client.key")
    return context


def forgeries(work: Path, ours: Authority) -> dict[str, ssl.SSLContext]:
    """Clients that trust the receiver, and whom it may not trust."""
    other = Authority("an authority")  # by the same name
    folders = {
        "expired": ours.folder(work / "expired", "client", expired=True),
        "signed by another authority of the same name": other.folder(work / "foreign", "client", trusts=ours),
    }
    contexts = {name: client_context(folder) for name, folder in folders.items()}
    contexts["none"] = ssl.create_default_context(cafile=str(folders["expired"] / "ca.crt"))
    stolen = ours.folder(work / "server-3", "server")
    contexts["of a server"] = ssl.create_default_context(cafile=str(stolen / "ca.crt"))
    contexts["of a server"].load_cert_chain(stolen / "server.crt", stolen / "server.key")
    return contexts


def told(out: Path, offline: Path, ends: tuple[int, int], receive: Run) -> bool:
    same = [name for name in FILES if (out / name).read_bytes() == (offline / name).read_bytes()]
    checked = next((x for x in receive.lines if "were checked as they came" in x), "")
    print(f"exit codes {ends}; equal to offline: {', '.join(same) or 'nothing'}; {checked}", flush=True)
    return len(same) == len(FILES) and ends == (0, 1)


if __name__ == "__main__":
    main()
