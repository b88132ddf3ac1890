#!/usr/bin/env python3
"""Spoils files of other tools in many ways and opens them: only DumpError may come out, soon, in little memory, and of
one file among several not even that.

    python scripts/fuzz_formats.py [--count 10000] [--seed 0] [--only sglang,atb] [--keep DIR]

The seeds are the small dumps beside the tests. Each mutated file is opened as `accprobe compare` would open it and
every tensor of it is read. Batches run in processes of their own, so that a crash of a library is a finding too. What
was found is printed with the number that makes it again, and kept with --keep."""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "tests" / "formats" / "data"
SECONDS, BYTES = 5, 6 << 30
_WORDS = [
    *b"-1 0 1e309 NaN null [] {} 99999999999999999999 1000000,1000000 ../../../etc/passwd true 1.5 [[[[[[[".split(),
    *(b"\x00", b"\xff" * 8, b"$End=1\n", b"=", b'"', b"\n"),
]
_NUMBERS = [0, 1, 127, 128, 255, 1 << 15, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
_PAYLOADS = (".pt", ".pth", ".bin", ".npy")


@dataclass(frozen=True)
class Seed:
    """A small dump. reader: which format reads it; root: what is opened; file: the part that is spoilt; one_of_many:
    others like it stand beside it, so that whatever it has become, the dump can be opened."""

    reader: str
    root: Path
    file: Path
    one_of_many: bool = False


def seeds(where: Path) -> list[Seed]:
    """Unpacks the dumps beside the tests into ``where``, cut down to a few files each."""
    found: list[Seed] = []

    def take(reader: str, archive: str, inside: str, wanted: Callable[[str], bool], limit: int) -> None:
        if not (DATA / f"{archive}.tar.xz").exists():
            return
        root = where / reader
        with tarfile.open(DATA / f"{archive}.tar.xz") as packed:
            members = [m for m in packed if m.isfile() and m.name.startswith(f"{archive}/{inside}") and wanted(m.name)]
            for m in sorted(members, key=lambda m: not m.name.endswith(".json"))[:limit]:
                packed.extract(m, where / "all")
                target = root / Path(m.name).relative_to(archive)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(where / "all" / m.name, target)
        files = [f for f in sorted(root.rglob("*")) if f.is_file()]
        payloads = [f for f in files if f.suffix in _PAYLOADS or f.suffix[1:].isdecimal()]
        found.extend(Seed(reader, root / inside, f, f in payloads and len(payloads) > 1) for f in files)

    take("sglang", "b_sglang_tp", "mine", lambda n: "dump_index=8_" in n or "dump_index=24" in n, 4)
    take("msit", "c_msit_torch", "golden", lambda n: "root.model.norm" in n or n.endswith("model_tree.json"), 8)
    take("atb", "e_atb", "golden", lambda n: "4_Mlp/0_Linear" in n or n.endswith(".json"), 6)
    take("torchair_ge", "f_torchair", "ge_mine", lambda n: "Mm_1" in n or "Fusion" in n or n.endswith(".txt"), 5)
    take("torchair_fx", "f_torchair", "fx_golden", lambda n: "mm_1" in n or "gt" in n, 4)
    for archive in ("a_msprobe_tensor", "a_msprobe_stat"):
        take(archive, archive, "golden", lambda n: n.endswith("dump.json") or "norm" in n, 6)
    for archive in ("d_xray_h5", "d_xray_h5_renamed"):
        take(archive, archive, "golden", lambda n: True, 2)
    with tarfile.open(DATA / "h_hostile.tar.xz") as packed:
        for m in packed:
            if m.isfile() and m.name.startswith("h_hostile/_ok"):
                packed.extract(m, where / "all")
    for f in sorted((where / "all/h_hostile/_ok").iterdir()):
        kind = f.suffix if not f.suffix[1:].isdecimal() else ".ge"
        found.append(Seed(f"file{kind}", f, f))
    found.append(
        Seed("msprobe", where / "all/h_hostile/_ok_msprobe", where / "all/h_hostile/_ok_msprobe/step0/rank0/dump.json")
    )
    legacy = where / "legacy.pth"
    legacy.write_bytes(_legacy())
    found.append(Seed("file.pth", legacy, legacy))
    table = where / "table" / "statistic.csv"
    table.parent.mkdir()
    head = "Device and PID,Execution Count,Op Name,Op Type,Op Id,Input/Output,Tensor Index,Dtype,Format,Shape,"
    row = '0_7,2,L/Linear,LinearOperation,3_1,output,0,float16,nd,"8,4",2,-1,0.25,4,N/A\n'
    table.write_text(head + "Max,Min,Mean,Norm,Tensor Path\n" + row * 3)
    found.append(Seed("atb_statistics", table.parent, table))
    return found


def _legacy() -> bytes:
    """A tensor [2, 3] as torch.save wrote it before there were archives: five pickles, then the storage."""
    import pickle

    magic, protocol = 0x1950A86A20F9469CFC6C, 1001
    system = {"protocol_version": protocol, "little_endian": True,
              "type_sizes": {"short": 2, "int": 4, "long": 4}}  # fmt: skip
    out = b"".join(pickle.dumps(x, protocol=2) for x in (magic, protocol, system))
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06NtQ"
    body = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage
    body += b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89ccollections\nOrderedDict\n)RtR."
    out += b"\x80\x02" + body + pickle.dumps(["0"], protocol=2)
    return out + (6).to_bytes(8, "little") + bytes(24)


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to six changes: bits, bytes, whole numbers, words, pieces moved, cut, doubled or borrowed."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        # Headers stand in front, directories of archives at the end.
        ends = rng.randrange(min(len(out), 300) + 1)
        at = rng.choice((rng.randrange(len(out) + 1), ends, len(out) - ends))
        what = rng.randrange(10)
        if what == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif what == 1:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif what in (2, 3):
            size = rng.choice((1, 2, 4, 8))
            out[at : at + size] = (rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif what == 4:
            word = rng.choice(_WORDS)
            out[at : at + rng.choice((0, len(word)))] = word
        elif what == 5:
            del out[at : at + rng.choice((1, 4, 8, 64, len(out)))]
        elif what == 6:
            piece = out[at : at + rng.choice((1, 8, 64, 512))]
            out[at:at] = piece * rng.choice((1, 2, 50))
        elif what == 7 and other:
            start = rng.randrange(len(other))
            out[at : at + 32] = other[start : start + rng.choice((4, 32, 256))]
        elif what == 8:
            _number_of_text(out, rng)
        else:
            del out[at:]
    return bytes(out)


_VALUES = (
    *(-1, 0, 2**53, 10**30, -0.5, float("nan"), float("inf"), "", "x", "../../../etc/passwd", "a" * 5000, None, True),
    *([], {}, [[]], [-1], [10**18, 10**18], {"type": "torch.Tensor"}, "\ud800", "\x1b[31m"),
)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """One to four places of a JSON file with other values, keys renamed, or parts put elsewhere."""
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(tree, 20_000))
        if not places:
            break
        holder, key = rng.choice(places)
        what = rng.randrange(4)
        if what == 0:
            del holder[key]
        elif what == 1:
            other, there = rng.choice(places)
            holder[key] = copy.deepcopy(other[there])
        elif what == 2 and isinstance(holder, dict):
            holder[rng.choice(("", "x", "Module.a.b.forward.0", "../..", "0"))] = holder.pop(key)
        else:
            holder[key] = rng.choice(_VALUES)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _places(tree: Any, limit: int) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting and limit > 0:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            limit -= 1
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])


def _number_of_text(out: bytearray, rng: random.Random) -> None:
    """Replaces a row of digits, as JSON, CSV and headers of lines have them."""
    starts = [i for i in range(len(out)) if 48 <= out[i] <= 57 and (i == 0 or not 48 <= out[i - 1] <= 57)]
    if starts:
        at = rng.choice(starts)
        stop = at
        while stop < len(out) and 48 <= out[stop] <= 57:
            stop += 1
        out[at:stop] = rng.choice(_WORDS[:11])


def attempt(seed: Seed, data: bytes, golden: Path | None = None) -> str:
    """Opens and reads the dump with ``data`` in place of its file, and compares it with ``golden``; "" where that ended
    as it should, else what came."""
    from vllm_accprobe.comparison.engine import compare
    from vllm_accprobe.comparison.result import CompareError
    from vllm_accprobe.formats import DumpError, open_dump

    seed.file.write_bytes(data)
    signal.alarm(SECONDS)
    dump = None
    try:
        dump = open_dump(seed.root)
        for record in dump.records:
            if record.payload is not None:
                if record.payload.nbytes > 1 << 30:
                    continue  # what a file of that size may hold
                try:
                    dump.read(record)
                except DumpError:
                    pass
        lines = [*dump.problems, *(s.reason for s in dump.skips)]
        long = max(lines, key=len, default="")
        if golden is not None:
            compare(golden, dump)
        return f"a message of {len(long)} characters" if len(long) > 2000 else ""
    except (DumpError, CompareError) as e:
        text = str(e)
        if seed.one_of_many and dump is None:
            return f"one spoilt file refused the dump: {text[:300]}"
        return "" if "\n" not in text and len(text) < 2000 else f"DumpError of {len(text)} characters: {text[:200]!r}"
    except Exception:
        return traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)


class Hang(BaseException):
    pass


def _hang(*_: object) -> None:
    raise Hang


def cases(all_seeds: list[Seed], count: int, start: int) -> Iterator[tuple[int, Seed]]:
    """(number, seed) in turn over the readers, so that each gets its share."""
    readers = sorted({s.reader for s in all_seeds})
    by = {r: [s for s in all_seeds if s.reader == r] for r in readers}
    for n in range(start, start + count):
        own = by[readers[n % len(readers)]]
        yield n, own[(n // len(readers)) % len(own)]


def run(
    all_seeds: list[Seed], count: int, start: int = 0, keep: Path | None = None, compared: bool = False
) -> list[str]:
    """Findings of ``count`` mutated files, numbered from ``start``; the number alone makes a file again. compared: each
    is compared with the file as it was, too."""
    signal.signal(signal.SIGALRM, _hang)
    whole = {s.file: s.file.read_bytes() for s in all_seeds}
    others = list(whole.values())
    golden = {s.root: _copy(s.root) if compared else None for s in all_seeds}
    findings = []
    for n, seed in cases(all_seeds, count, start):
        rng = random.Random(n)
        if seed.file.suffix == ".jsonl" and rng.random() < 0.7:
            data = b"\n".join(mutate_json(line, rng) for line in whole[seed.file].splitlines())
        elif seed.file.suffix == ".json" and rng.random() < 0.7:
            data = mutate_json(whole[seed.file], rng)
        else:
            data = mutate(whole[seed.file], rng.choice(others), rng)
        try:
            found = attempt(seed, data, golden[seed.root])
        except Hang:
            found = f"no end after {SECONDS} s"
        except MemoryError:
            found = "out of memory"
        finally:
            seed.file.write_bytes(whole[seed.file])
        if found:
            findings.append(f"#{n} {seed.reader} {seed.file.name}: {found}")
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{n}-{seed.file.name}").write_bytes(data)
    return findings


def _copy(root: Path) -> Path:
    target = root.with_name(f"golden-of-{root.name}") if root.is_dir() else root.parent / "golden" / root.name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(root, target) if root.is_dir() else shutil.copy(root, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first file")
    parser.add_argument("--only", default="", help="readers, separated by commas")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--compare", action="store_true", help="compare each with the file as it was, too: slower")
    options = parser.parse_args()
    started, findings, batch = time.time(), 0, 250
    with tempfile.TemporaryDirectory() as home:
        found = [s for s in seeds(Path(home)) if not options.only or s.reader in options.only.split(",")]
        shares = Counter(s.reader for _, s in cases(found, options.count, options.seed))
        print(f"{len(shares)} readers: " + ", ".join(f"{r} {n}" for r, n in sorted(shares.items())))
        for start in range(options.seed, options.seed + options.count, batch):
            pid = os.fork()
            if pid == 0:
                resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
                lines = run(
                    found, min(batch, options.seed + options.count - start), start, options.keep, options.compare
                )
                print("\n".join(lines), end="\n" if lines else "", flush=True)
                os._exit(min(len(lines), 100))
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                print(f"files {start} to {start + batch - 1}: the process died of signal {-code}")
            findings += abs(code)
    print(f"{options.count} files, {findings} findings, {time.time() - started:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
