"""A dump sent: all of its ranks, each by its own sender, from a process that serves nobody.

Not here: one rank (line.py, shared.py).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import JOURNAL
from vllm_accprobe.online.arrivals import RANK_FOLDER, TailError
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.line import NotSent, RankSender, TlsError
from vllm_accprobe.online.shared import FolderSender

_POLL_S = 0.2


def send_dump(
    dump: Path, endpoint: Endpoint, ranks: Sequence[int] | None, *, follow: bool, patience: float,
    say: Callable[[str], object],
) -> str:  # fmt: skip
    """Sends ``ranks``, all if None; what was sent, in a line. Raises DumpError where a rank could not be sent."""
    totals = {} if follow else _totals(dump)
    stop = threading.Event()
    senders: dict[int, RankSender | FolderSender] = {}
    threads: list[threading.Thread] = []
    errors: list[DumpError] = []
    begun = time.monotonic()

    def start(rank: int) -> None:
        more = {"totals": totals.get(rank), "follow": follow, "patience": patience, "say": say, "stop": stop}
        try:
            sender = (
                FolderSender(dump, rank, endpoint.shared, **more) if endpoint.shared is not None  # type: ignore[arg-type]
                else RankSender(dump, rank, endpoint, **more)  # type: ignore[arg-type]
            )  # fmt: skip
        except (TailError, TlsError) as why:
            raise DumpError(str(why)) from None
        senders[rank] = sender

        def run() -> None:
            try:
                sender.run()
            except DumpError as error:
                errors.append(error)
            except Exception as error:
                errors.append(NotSent(f"rank {rank}: {type(error).__name__}: {error}"))

        threads.append(threading.Thread(target=run, name=f"accprobe-rank-{rank}", daemon=True))
        threads[-1].start()

    try:
        waited = time.monotonic()
        while not errors:
            for rank in _ranks(dump):
                if rank not in senders and (ranks is None or rank in ranks):
                    start(rank)
            if senders and not any(t.is_alive() for t in threads):
                break
            if not senders:
                if not follow:
                    raise DumpError(f"{dump} is no dump of accprobe with such ranks: nothing can be sent; another "
                                    "tool's dump is checked with `accprobe opcheck`")  # fmt: skip
                if time.monotonic() - waited > patience:
                    raise DumpError(f"{dump}: no rank has begun to write for {patience:.0f} s")
            time.sleep(_POLL_S if follow or not senders else 0.02)
    finally:
        stop.set()
    for thread in threads:
        thread.join(5.0)
    if errors:
        raise errors[0]
    missing = sorted(set(ranks or ()) - set(senders))
    if missing:
        say(f"note: rank {missing[0]} and {len(missing) - 1} more are not in {dump}" if len(missing) > 1 else
            f"note: rank {missing[0]} is not in {dump}")  # fmt: skip
    lines = sum(s.tail.lines for s in senders.values())
    sent = sum(s.bytes for s in senders.values())
    return (f"sent: {len(senders)} rank{'s' * (len(senders) != 1)}, {lines:,} lines, {sent / 1e6:,.1f} MB in "
            f"{time.monotonic() - begun:.1f} s")  # fmt: skip


def _ranks(dump: Path) -> list[int]:
    """Those that have a journal with a line in it."""
    found = [(int(m[1]), p / JOURNAL) for p in dump.glob("rank*") if (m := RANK_FOLDER.fullmatch(p.name))]
    return sorted(rank for rank, journal in found if journal.is_file() and journal.stat().st_size)


def _totals(dump: Path) -> dict[int, tuple[int, int]]:
    """By rank: outputs and taps, counted as opcheck's budget counts them (calls/records.py)."""
    outputs: dict[int, int] = defaultdict(int)
    taps: dict[int, set[tuple[str, str]]] = defaultdict(set)
    found = open_dump(dump)
    for r in found.records:
        if r.step is not None and r.role.startswith(("output", "inplace")):
            outputs[r.rank] += 1
            taps[r.rank].add((r.tap, r.role))
    return {rank: (outputs[rank], len(taps[rank])) for rank in found.ranks}
