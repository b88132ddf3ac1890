"""Long runs of real servers with the probe: thousands of requests, kills, failing disks, an online check under attack.

    bash scripts/soak.sh [requests|kills|disk|online|all] [--requests 10000] [--kills 200] [--engine-kills 20]
                         [--minutes 60] [--seed 0] [--work DIR]

The problem: a probe that leaks a hundred bytes a request, loses a tensor in one kill of fifty, or fails a request when
the disk is full passes every short test. The idea: the same plan of requests, drawn from a seed, goes to a server
without the probe and to one with it that is armed and disarmed in turns; what is compared is exact, since an engine
with --max-num-seqs=1 computes each request alone, whatever else waits. Memory is a slope with its standard error. Each
part is bounded in count and time; one table at the end; exit code 1 where anything failed.

Not here: kills without an engine (soak_kills.py), disks and taps that fail (soak_disk.py), the online check
(online_cases.py).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import xxhash
from preloaded_vllm import preloaded
from tiny_model import VOCAB, make
from vllm_server import ENV, Server

from vllm_accprobe.capture.states.schedule import MORE, RECENT
from vllm_accprobe.dump.reader import open_dump

PARTS = ("requests", "kills", "disk", "online")
SERVED = ("--enforce-eager", "--max-num-seqs=24", "--kv-cache-memory-bytes=64M")
"""Eager, as the probe makes its engine by default."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}  # fmt: skip
"""Two threads of a tiny model wait for each other longer than they compute, on a machine that others use. oneDNN keeps
1,024 products by shape, 0.1 MB each: without the probe 29,000 bytes a request for thousands of requests; 64 are full
within 240."""
FILLED = RECENT + MORE
"""Requests after which the last of the probe's stores that are bounded by a count of requests has reached its bound
(states/schedule.py; 0.3 KB a request before). A slope is taken from there on."""
EVERY = 100
"""Requests between two samples of memory."""
TURN = 1
"""Samples between two calls of `accprobe arm`."""
CLIENTS = 24
LEAK = 128.0
"""Chosen: bytes a request below which a slope is no leak even where it is more than noise. The smallest thing that a
request can leave behind, an entry of a dict with its key, has that size."""
SELECTIONS = (("--tokens", "0-1"), None, (), None, ("--modules", "attention"), None)
"""What the server is armed for in turns; None: disarmed."""


@dataclass(frozen=True)
class Row:
    """A line of the table. failures: 0, or the exit code is 1."""

    part: str
    what: str
    count: str
    failures: int
    note: str = ""


@dataclass
class Bounds:
    """The options of a run."""

    work: Path
    seed: int
    until: float
    requests: int
    kills: int
    engine_kills: int
    calls: int
    only: str = "*"

    def say(self, text: str) -> None:
        """A line of progress, with the time."""
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@dataclass(frozen=True)
class Ask:
    """A request. drop: chunks after which the client goes away, 0: it gets the whole answer. top: log-probabilities of
    each token that it wants, 0: none."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    drop: int = 0
    top: int = 2


def plan(seed: int, first: int, count: int, aborted: bool = True) -> list[Ask]:
    """Requests ``first`` and following; each depends on the seed and its number alone."""
    asks = []
    for number in range(first, first + count):
        rng = random.Random(f"{seed}-{number}")
        low, high = rng.choices(((3, 20), (20, 100), (100, 300)), (60, 35, 5))[0]
        prompt = tuple(rng.randrange(10, VOCAB - 10) for _ in range(rng.randint(low, high)))
        drop = rng.randint(1, 5) if aborted and rng.random() < 0.04 else 0
        tokens = 150 if drop else rng.choice((1, 2, 3, 4, 6, 8, 12, 24))
        asks.append(Ask(f"s{number}", prompt, tokens, drop))
    return asks


def asked(port: int, ask: Ask) -> str:
    """The answer, tokens and log-probabilities, as one text; "" of a request that was dropped. Raises what fails."""
    body = {
        "model": "tiny", "prompt": list(ask.prompt), "max_tokens": ask.tokens, "temperature": 0, "ignore_eos": True,
        "stream": bool(ask.drop),
    }  # fmt: skip
    if ask.top and not ask.drop:
        body["logprobs"] = ask.top
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": ask.name}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{ask.name}: status {reply.status}: {reply.read()[:200]!r}")
        if ask.drop:
            chunks = 0
            while chunks < ask.drop:
                line = reply.readline()
                if not line:
                    raise RuntimeError(f"{ask.name}: the stream ended after {chunks} chunks")
                chunks += line.startswith(b"data:")
            return ""
        choice = json.load(reply)["choices"][0]
        return json.dumps([choice["text"], choice["logprobs"], choice["finish_reason"]])
    finally:
        connection.close()


@dataclass
class Load:
    """What a server made of requests: answers by name, and what failed."""

    answers: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def send(
        self, server: Server, asks: Sequence[Ask], until: float = float("inf"),
        after: Callable[[int], None] = lambda done: None,
    ) -> None:  # fmt: skip
        """Sends them, CLIENTS at a time; ``after`` is called with their number when EVERY more are answered."""
        port = int(server.url.rpartition(":")[2])

        def one(ask: Ask) -> None:
            try:
                self.answers[ask.name] = asked(port, ask)
            except Exception as error:
                self.failed.append(f"{ask.name}: {type(error).__name__}: {error}")

        with ThreadPoolExecutor(CLIENTS) as pool:
            for at in range(0, len(asks), EVERY):
                if time.monotonic() > until:
                    break
                list(pool.map(one, asks[at : at + EVERY]))
                after(at + len(asks[at : at + EVERY]))


def engine(server: Server) -> psutil.Process:
    """The process that has the model: of those that write to the log, the last one that was started."""
    pids = re.findall(r"^\((?:EngineCore|Worker)\w* pid=(\d+)\)", server.log.read_text(errors="replace"), re.MULTILINE)
    if not pids:
        raise RuntimeError(f"no engine writes to {server.log}")
    return psutil.Process(int(pids[-1]))


class Memory:
    """Samples of one process: anonymous memory (VmRSS less what is mapped from files), threads, open files."""

    def __init__(self, process: psutil.Process | None = None):
        self.process = process
        self.done: list[int] = []
        self.bytes: list[int] = []
        self.threads: list[int] = []
        self.files: list[int] = []

    @classmethod
    def of(cls, samples: Sequence[Sequence[int]]) -> Memory:
        """What another process has sampled of itself."""
        memory = cls()
        for sample in samples:
            memory.add(*sample)
        return memory

    def add(self, done: int, size: int, threads: int, files: int) -> None:
        self.done.append(done)
        self.bytes.append(size)
        self.threads.append(threads)
        self.files.append(files)

    def sample(self, done: int) -> None:
        assert self.process is not None
        info = self.process.memory_info()
        self.add(done, info.rss - info.shared, self.process.num_threads(), self.process.num_fds())

    def slope(self) -> tuple[float, float]:
        """Bytes a request and their standard error, by least squares over means of five samples, the first fifth and
        the first FILLED requests left out: single samples follow each other too closely for an error of their own. NaN,
        which is a failure, for fewer than 20 samples of the rest."""
        skip = max(len(self.done) // 5, sum(done < FILLED for done in self.done))
        blocks = (len(self.done) - skip) // 5
        if blocks < 4:
            return float("nan"), float("nan")
        x, y = (np.array(v[len(v) - 5 * blocks :], float).reshape(blocks, 5).mean(1) for v in (self.done, self.bytes))
        dx = x - x.mean()
        slope = float(dx @ y / (dx @ dx))
        rest = y - y.mean() - slope * dx
        return slope, float(np.sqrt(rest @ rest / (blocks - 2) / (dx @ dx)))

    def grown(self) -> int:
        """How many more threads or files the last quarter has at most than the quarter after the warm-up."""
        quarter = max(len(self.done) // 4, 1)
        return max(max(v[-quarter:]) - max(v[quarter : 2 * quarter] or v) for v in (self.threads, self.files))

    def row(self, what: str, bare: Memory | None = None) -> Row:
        """Fails where the slope is more than noise and more than LEAK, and more than that of ``bare``."""
        if not self.done:
            return Row("requests", what, "0 samples", 1)
        slope, error = self.slope()
        note = f"slope {slope:+.0f} ± {error:.0f} bytes a request, {self.bytes[-1] / 1e6:.0f} MB"
        flat = abs(slope) < 2 * error or slope < LEAK
        if bare is not None:
            base, base_error = bare.slope()
            note += f" (without the probe {base:+.0f} ± {base_error:.0f}, {bare.bytes[-1] / 1e6:.0f} MB)"
            flat = flat or slope - base < 2 * float(np.hypot(error, base_error))
        note += f"; {self.threads[-1]} threads, {self.files[-1]} files, {self.grown()} more than after the warm-up"
        return Row("requests", what, f"{len(self.done)} samples", (not flat) + (self.grown() > 1), note)


def read_back(dump: Path) -> tuple[int, list[str], set[str]]:
    """Reads every payload that the journal promises: how many there are, what is wrong (also that the dump says of
    itself), and the requests in it."""
    found = open_dump(dump)
    wrong = list(found.problems)
    promised = [record for record in found.records if record.payload is not None]
    for record in promised:
        if xxhash.xxh3_128_hexdigest(found.read(record).tobytes()) != record.hash:
            wrong.append(f"{record.name} of step {record.step} is not what its hash says")
    found.close()
    return len(promised), wrong, {request.id for request in found.requests.values()}


def size_of(dump: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in dump.rglob("*") if path.is_file())


def probed(dump: Path, **more: str) -> dict[str, str]:
    """The environment of a server with the probe on."""
    return {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(dump), **{f"VLLM_ACCPROBE_{k}": v for k, v in more.items()}}


@contextmanager
def vllm(bounds: Bounds, name: str = "vllm", more: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A `vllm` whose servers start in a third of the time; its engines are forks. more: of the environment in which it
    is imported."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | ENV
    with preloaded(bounds.work / name, environ | {"OMP_NUM_THREADS": "1"} | dict(more or {})) as folder:
        yield folder / "vllm"


def arm(dump: Path, selection: Sequence[str] | None) -> None:
    words = ["--off"] if selection is None else list(selection)
    command = [sys.executable, "-m", "vllm_accprobe.cli", "arm", str(dump), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def requests_part(bounds: Bounds) -> list[Row]:
    """Answers, memory, threads, open files and the dump of engines that are armed and disarmed in turns."""
    model = make("qwen2", bounds.work / "model")
    return batches(bounds, model) + served(bounds, model)


def batches(bounds: Bounds, model: Path) -> list[Row]:
    """The same batches through an engine without the probe and one with it (soak_batches.py)."""
    rows, texts, memories = [], list[list[str]](), list[Memory]()
    share = (bounds.until - time.monotonic()) / 4
    for name in ("bare", "probed"):
        dump, out = bounds.work / f"dump-{name}", bounds.work / f"{name}.jsonl"
        env = os.environ | ENV | ONE_THREAD | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        env |= {"PYTHONMALLOC": "malloc"}
        if name == "probed":
            env |= probed(dump, ARMED="0", MAX_GB="8", PARTS="input,output")
        words = [str(Path(__file__).with_name("soak_batches.py")), model, out, bounds.seed, bounds.requests, int(share)]
        with (bounds.work / f"{name}.log").open("w") as log:
            code = subprocess.run([sys.executable, *map(str, words)], env=env, stdout=log, stderr=log).returncode
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        bounds.say(f"{name}: {sum(len(line['answers']) for line in lines)} requests in batches, exit code {code}")
        texts.append([json.dumps(answer) for line in lines for answer in line["answers"]])
        memories.append(Memory.of([line["sample"] for line in lines]))
        rows.append(Row("requests", f"in batches, {name}", f"{len(texts[-1])} answers", int(code != 0 or not lines)))
    pairs = list(zip(*texts, strict=False))
    unlike = [number for number, (golden, mine) in enumerate(pairs) if golden != mine]
    what = "in batches: answers (tokens, log-probabilities) equal to the bit to those without the probe"
    rows.append(Row("requests", what, f"{len(pairs)} pairs", len(unlike) + (not pairs), str(unlike[:3] or "")))
    rows.append(memories[1].row("in batches: memory, threads, files", memories[0]))
    rows.append(whole("in batches", bounds.work / "dump-probed"))
    return rows


def served(bounds: Bounds, model: Path) -> list[Row]:
    """Clients of a server, some of which go away in the middle of an answer."""
    dump, load, turns = bounds.work / "dump-served", Load(), [0]
    env = probed(dump, ARMED="0", MAX_GB="8", PARTS="input,output") | ONE_THREAD
    with (
        vllm(bounds) as program,
        Server(model, log=bounds.work / "served.log", env=env, args=SERVED, vllm=program) as server,
    ):
        bounds.say(f"the server answers after {server.ready_s:.0f} s")
        memory = Memory(engine(server))

        def after(done: int) -> None:
            memory.sample(done)
            if len(memory.done) % TURN == 0:
                arm(dump, SELECTIONS[turns[0] % len(SELECTIONS)])
                turns[0] += 1
            if done % 500 == 0:
                bounds.say(f"{done} requests, {len(load.failed)} failed, {memory.bytes[-1] / 1e6:.1f} MB")

        load.send(server, plan(bounds.seed, 0, bounds.requests), bounds.until, after)
    dropped = sum(not answer for answer in load.answers.values())
    return [
        Row("requests", f"served: armed and disarmed {turns[0]} times by `accprobe arm`",
            f"{len(load.answers)} answered, {dropped} of them aborted by the client",
            len(load.failed) + (not load.answers), "; ".join(load.failed[:2])),
        memory.row("served: memory, threads, files of the engine"),
        whole("served", dump),
    ]  # fmt: skip


def whole(name: str, dump: Path) -> Row:
    """Every tensor of a closed dump is read."""
    tensors, wrong, names = read_back(dump)
    note = f"{len(names)} requests, {size_of(dump) / 1e9:.2f} GB; {'; '.join(wrong[:2])}"
    if not wrong:
        shutil.rmtree(dump)
    return Row("requests", f"{name}: the dump", f"{tensors} tensors read", len(wrong) + (tensors == 0), note)


def kills_part(bounds: Bounds) -> list[Row]:
    """Small processes by the hundred, engines by the dozen."""
    import soak_kills

    found = soak_kills.kills(bounds.work, bounds.kills, bounds.seed, bounds.until, bounds.say)
    states = ", ".join(f"{n} {state}" for state, n in found.where.most_common())
    signals = ", ".join(f"{n} {name}" for name, n in sorted(found.by.items()))
    rows = [Row("kills", "torch models under Probe", f"{found.done} kills, {found.tensors} tensors", len(found.found),
                f"{signals}; {states}; {'; '.join(found.found[:2])}")]  # fmt: skip
    if bounds.engine_kills:
        rows.append(engine_kills(bounds))
    return rows


WAYS: tuple[tuple[str, Sequence[int], bool], ...] = (
    ("KILL", (signal.SIGKILL,), True),
    ("TERM", (signal.SIGTERM,), False),
    ("INT", (signal.SIGINT,), False),
    ("TERM, then KILL while the dump closes", (signal.SIGTERM, signal.SIGKILL), True),
)
"""Name, signals in their order, whether the dump may be left open."""


def engine_kills(bounds: Bounds) -> Row:
    """Servers that are killed while clients wait for their answers."""
    rng = random.Random(bounds.seed)
    model, wrong, by, tensors = make("qwen2", bounds.work / "model"), list[str](), Counter[str](), 0
    with vllm(bounds) as program:
        for number in range(bounds.engine_kills):
            if time.monotonic() > bounds.until:
                break
            name, signals, open_end = WAYS[number % len(WAYS)]
            dump = bounds.work / f"engine-{number}"
            log = dump.with_suffix(".log")
            with Server(model, log=log, env=probed(dump) | ONE_THREAD, args=SERVED, vllm=program) as server:
                load = Load()
                # Without log-probabilities, for which vLLM compiles in its first step.
                asks = [replace(ask, top=0) for ask in plan(bounds.seed, 1000 * number, 400)]
                threading.Thread(target=load.send, args=(server, asks), daemon=True).start()
                _until_step(dump)
                time.sleep(rng.uniform(0.5, 10.0))
                for at, sent in enumerate(signals):
                    time.sleep(at * rng.uniform(0.0, 1.0))
                    with suppress(ProcessLookupError):
                        if sent == signal.SIGKILL:
                            os.kill(server.process.pid, sent)
                        else:
                            server.process.send_signal(sent)
                if signals[-1] != signal.SIGKILL:
                    server.stop()
            by[name] += 1
            time.sleep(0.5)
            count, said, _ = read_back(dump)
            tensors += count
            allowed = ("not closed", "torn") if open_end else ()
            wrong += [f"engine {number} ({name}): {text}" for text in said if not any(a in text for a in allowed)]
            if not any(record.step is not None for record in open_dump(dump).records):
                wrong.append(f"engine {number} ({name}): no tensor of a step was captured")
            bounds.say(f"engine {number}: {name}: {count} tensors read, {len(wrong)} defects so far")
    ways = ", ".join(f"{n} {name}" for name, n in by.items())
    return Row("kills", "vLLM engines under load", f"{by.total()} kills, {tensors} tensors", len(wrong),
               f"{ways}; {'; '.join(wrong[:2])}")  # fmt: skip


def _until_step(dump: Path) -> None:
    """Waits until the journal has a step."""
    journal, until = dump / "rank0000/journal.jsonl", time.monotonic() + 120
    while b'{"event":"step"' not in journal.read_bytes():
        if time.monotonic() > until:
            raise RuntimeError(f"no step in {journal}")
        time.sleep(0.05)


def disk_part(bounds: Bounds) -> list[Row]:
    import soak_disk

    return soak_disk.rows(bounds)


def online_part(bounds: Bounds) -> list[Row]:
    """scripts/online_cases.py, its own process."""
    command = [sys.executable, str(Path(__file__).with_name("online_cases.py")), "--calls", str(bounds.calls),
               "--work", str(bounds.work / "online")]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(bounds.until - time.monotonic(), 60))
        code, lines = done.returncode, done.stdout.splitlines() or done.stderr.splitlines()[-3:]
    except subprocess.TimeoutExpired:
        code, lines = 1, ["it did not end in time"]
    for line in lines:
        bounds.say(line)
    note = "; ".join(line for line in lines if line.startswith(("the line was cut", "forged", "exit codes")))
    return [Row("online", "cut lines, killed receivers, hostile peers", f"{bounds.calls} calls", code, note)]


def table(rows: Sequence[Row]) -> str:
    """Markdown, for the page."""
    lines = ["| part | what | count | failures | |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {r.part} | {r.what} | {r.count} | {r.failures} | {r.note} |" for r in rows])


PART: Mapping[str, Callable[[Bounds], list[Row]]] = {
    "requests": requests_part, "kills": kills_part, "disk": disk_part, "online": online_part,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--requests", type=int, default=10_000, help="through servers with the probe")
    parser.add_argument("--kills", type=int, default=200, help="of torch models")
    parser.add_argument("--engine-kills", type=int, default=20, help="of vLLM engines")
    parser.add_argument("--calls", type=int, default=4_000, help="of the online check")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases of the part disk, by name")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each part; what is not done then is left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a new folder, which is kept")
    options = parser.parse_args()
    named = [options.parts] if isinstance(options.parts, str) else options.parts
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        for part in PARTS if "all" in named else named:
            work = (options.work or Path(made)) / part
            work.mkdir(parents=True)
            until = time.monotonic() + 60 * options.minutes
            bounds = Bounds(work, options.seed, until, options.requests, options.kills, options.engine_kills,
                            options.calls, options.only)  # fmt: skip
            try:
                rows += PART[part](bounds)
            except Exception as error:
                rows.append(Row(part, "the part itself", "", 1, f"{type(error).__name__}: {error}"))
    print(table(rows))
    sys.exit(any(row.failures for row in rows))


if __name__ == "__main__":
    main()
