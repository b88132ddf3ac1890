"""``scripts/card.sh``: what accprobe does on a machine's card with the machine's own vLLM, as one page and one archive.

The problem: we have no card, and whoever has one has an hour, another vLLM, and no wish to debug ours. The idea: a list
of parts (card_parts.py), each in a process of its own with a time limit; one that fails or hangs is a row on the page
with its last lines, and the next one runs. What is done is not done again by a second call. Nothing is downloaded, and
nothing is sent: the archive lies there.

Exit code: 0 everything passed, 1 not, 2 bad usage. Not here: what is run (card_parts.py), inside a part
(card_engine.py), what it means (card_found.py), the page (card_page.py).
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from card_engine import probe_version
from card_found import DONE, FAILED, NOT_RUN, NOT_YET, all_good, changed_bits, dump_facts
from card_page import tail, write
from card_parts import HERE, Asked, Part, environment, machine, parts

LOOKED_UP = "modelinfos"
"""In vLLM's cache: what it found out about a model's class, in a process of its own that takes ten seconds."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="card.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("accprobe-card"), help="folder of everything (accprobe-card)")
    parser.add_argument("--quick", action="store_true", help="fewer engines: no step costs, no taps chosen")
    parser.add_argument("--only", metavar="GLOBS", default="*", help="parts, e.g. 'compiled-*,torch'; see --list")
    parser.add_argument("--again", nargs="?", const="*", default="", metavar="GLOBS", help="parts that are done, too")
    parser.add_argument("--engine", default="{}", metavar="JSON", help="further arguments of vllm.LLM, for all engines")
    parser.add_argument("--limit", type=float, default=600, help="seconds that one part may take (600)")
    parser.add_argument("--device", default="", help="of the part with torch alone: cuda, npu, ...")
    parser.add_argument("--list", action="store_true", help="say the parts and stop (after asking the machine)")
    args = parser.parse_args(arguments)
    try:
        engine = json.loads(args.engine)
        if not isinstance(engine, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        parser.error(f"--engine {args.engine!r} is no JSON object of arguments: {error}")
    root = args.out.absolute()
    for folder in ("jobs", "results", "logs", "dumps", "plugin", "torch"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    lock = (root / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        parser.error(f"another card.sh works in {root}: wait for it, or name another folder with --out")
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the part that is running must not outlive this one
        signal.signal(name, signal.default_int_handler)
    card = Card(Asked(root, engine, args.quick, args.device), args.only, args.again, args.limit)
    try:
        return card.run(args.list)
    except KeyboardInterrupt:
        card.page()
        print(f"\ninterrupted; the page so far: {root / 'card.md'}; the same command goes on", file=sys.stderr)
        return 130


class Card:
    """The parts, one after another. results: by part, in their order."""

    def __init__(self, asked: Asked, only: str, again: str, limit: float):
        self.asked, self.only, self.again, self.limit = asked, only.split(","), again.split(","), limit
        self.results: dict[str, dict[str, Any]] = {}
        self.planned: list[Part] = []
        self.source = probe_version()["source"]
        make_plugin(asked.root / "plugin")

    def run(self, just_list: bool) -> int:
        self.do(machine(self.asked), "1")
        found = self.results["machine"].get("found") or {}
        rest = parts(self.asked, found) if found else []
        if just_list:
            print("\n".join(f"{part.name:28} {part.says}" for part in rest))
            return 0
        if not rest:  # torch may still be there
            rest = [part for part in parts(self.asked, {"ways": {}}) if part.name == "torch"]
        self.planned = rest
        for number, part in enumerate(rest, 2):
            self.do(part, f"{number}/{len(rest) + 1}")
            self.page()
        archive = self.page()
        print((self.asked.root / "card.md").read_text(encoding="utf-8"))
        print(f"the page: {self.asked.root / 'card.md'}; to send: {archive}")
        return 0 if all_good(self.results) else 1

    def page(self) -> Path:
        """What there is, and which parts are still to come."""
        names = [part.name for part in self.planned if not part.doubt]
        later = {name: {"status": NOT_YET, "s": 0.0} for name in names if name not in self.results}
        return write(self.asked.root, self.results | later, self.asked.quick)

    def do(self, part: Part, number: str) -> None:
        """Runs one part, or takes its result from an earlier call."""
        file = self.asked.root / "results" / f"{part.name}.json"
        asked = hashlib.sha256(f"{self.source} {part.asked()}".encode()).hexdigest()[:16]
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        current = old.get("asked") == asked and old.get("status") == DONE
        again = any(fnmatch.fnmatch(part.name, one) for one in self.again)
        wanted = part.name == "machine" or any(fnmatch.fnmatch(part.name, one) for one in self.only)
        if current and not (again and wanted):
            self.results[part.name] = old
            return
        if not wanted:
            return
        if part.doubt and not changed_bits(self.results, part.doubt):
            return
        missing = [name for name in part.needs if self.results.get(name, {}).get("status") != DONE]
        if missing:
            self.results[part.name] = {"status": NOT_RUN, "why": f"needs {', '.join(missing)}", "s": 0.0}
            return
        print(f"[{number}] {part.says} ...", end=" ", file=sys.stderr, flush=True)
        begin, before = time.monotonic(), children_cpu_s()
        result = self._run(part)
        spent = {"s": time.monotonic() - begin, "cpu_s": children_cpu_s() - before}
        self.results[part.name] = result | spent | {"asked": asked}
        file.write_text(json.dumps(self.results[part.name]), encoding="utf-8")
        print(f"{result['status']}, {spent['s']:.0f} s {result.get('why', '')}", file=sys.stderr)

    def _run(self, part: Part) -> dict[str, Any]:
        root = self.asked.root
        for left in (part.dump, root / "caches" / part.name, part.result.parent if part.result else None):
            if left is not None:
                shutil.rmtree(left, ignore_errors=True)
        command, result = list(part.command), part.result
        if part.job is not None:
            job, result = root / "jobs" / f"{part.name}.json", root / "jobs" / f"{part.name}.result.json"
            result.unlink(missing_ok=True)
            job.write_text(json.dumps({**part.job, "result": str(result)}), encoding="utf-8")
            command = [str(HERE / "card_engine.py"), str(job)]
        log = root / "logs" / f"{part.name}.log"
        own, known = root / "caches" / part.name / LOOKED_UP, root / "caches" / LOOKED_UP
        if known.is_dir():
            shutil.copytree(known, own)
        code = launch([sys.executable, *command], environment(self.asked, part), log, self.limit)
        if own.is_dir() and not known.is_dir():
            own.rename(known)
        shutil.rmtree(own.parent, ignore_errors=True)
        if code is None:
            return {"status": FAILED, "why": f"stopped: it took longer than {self.limit:.0f} s"}
        if code not in part.expect:
            return {"status": FAILED, "why": f"exit code {code}: {last_error(log)}"}
        try:
            found = self._found(part, result, code, log)
        except Exception as error:
            return {"status": FAILED, "why": f"no result ({type(error).__name__}: {error}): {last_error(log)}"}
        return {"status": DONE, "found": found}

    def _found(self, part: Part, result: Path | None, code: int, log: Path) -> dict[str, Any]:
        found = json.loads(result.read_text(encoding="utf-8")) if result else {}
        if part.name.startswith("compare-"):
            found = {name: found.get(name) for name in ("verdict", "origins", "coverage")}
            found["origins"] = (found["origins"] or [])[:5]
        if part.name.startswith("errcheck-"):
            said = [line for line in tail(log, 200) if line.startswith("errcheck: ")]
            return {"code": code, "said": said[0].removeprefix("errcheck: ") if said else ""}
        if part.dump is not None:
            found["dump"] = dump_facts(part.dump)
            if "-cost-" in part.name:  # hundreds of megabytes that nobody will read
                shutil.rmtree(part.dump, ignore_errors=True)
                del found["dump"]["outside"]
        return found


def launch(command: list[str], env: dict[str, str], log: Path, limit: float) -> int | None:
    """The exit code; None where it took longer than ``limit`` seconds. Nothing that it started outlives it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def last_error(log: Path) -> str:
    """The line of a log that most likely says why: the last one that names an error, else the last one."""
    lines = [line.strip() for line in tail(log, 200) if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or ["it said nothing"])[-1][:300]


def make_plugin(folder: Path) -> None:
    """Lets vLLM find the probe where only the checkout is on PYTHONPATH: the metadata of an installation of it."""
    from vllm_accprobe import __version__

    if any(point.name == "accprobe" for point in metadata.entry_points(group="vllm.general_plugins")):
        return
    info = folder / f"vllm_accprobe-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-accprobe\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\naccprobe = vllm_accprobe.plugin:register\n\n"
        "[vllm.platform_plugins]\naccprobe = vllm_accprobe.plugin:platform\n"
    )


if __name__ == "__main__":
    sys.exit(main())
