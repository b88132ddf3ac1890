"""The part `kills` of scripts/soak.py: captures killed at random moments, and every journalled tensor read afterwards.

The problem: a kill in the middle of a copy, a write or a header must cost no tensor that the journal promises, and an
engine's start takes too long for hundreds of them. The idea: one process imports torch and the probe once and forks a
victim for each kill: a torch model under `Probe`, with the writer that vLLM's workers have, in segments so small that
they close all the time. The victim says in shared memory whether it is inside a step, and whether a segment closes; the
killer waits for the state that it aims at. What each tap must have seen was computed before by torch's own hooks.

Not here: kills of real engines (soak.py has the server), torn bytes one by one (tests/dump).
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.dump import files, writer
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.repair import repair
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.dump.stats import warm_up

STEPS = 300
"""Steps after which a victim closes its dump by itself, if nobody has killed it before."""
AIMS = ("step", "close", "any")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WAIT_S = 60.0
_WIDTH = 128
Key = tuple[int, str, str, int]
"""Step, tap, input or output, call."""


class Model(torch.nn.Module):
    """Linear layers, one of them wider than a block of the writer's, one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(5))
        self.twice = torch.nn.Tanh()
        self.wide = torch.nn.Linear(_WIDTH, 12 * _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.twice(x)
        return self.wide(self.twice(x * 2))


def argument(step: int) -> torch.Tensor:
    """What the model gets in a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(1 + step * 7 % 40, _WIDTH, generator=generator)


def made() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def _hash(tensor: torch.Tensor) -> str:
    return str(xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().numpy().tobytes()))


def reference(model: Model) -> dict[Key, str]:
    """Hashes of what each module's first input and output are in each step, by torch's hooks alone, in order."""
    seen: dict[Key, str] = {}
    calls: Counter[str] = Counter()
    step = 0

    def hook(name: str) -> Callable[..., None]:
        def take(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[step, name, "input", calls[name]] = _hash(inputs[0])
            seen[step, name, "output", calls[name]] = _hash(output)
            calls[name] += 1

        return take

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        for step in range(STEPS):
            calls.clear()
            model(argument(step))
    for handle in handles:
        handle.remove()
    return seen


class Shared:
    """Memory that the victim and its killer see: in_step, closing, and the number of steps done."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 4096)

    def clear(self) -> None:
        self._map[:10] = bytes(10)

    def set(self, at: int, on: bool) -> None:
        self._map[at] = on

    def count(self, steps: int) -> None:
        self._map[2:10] = struct.pack("<q", steps)

    in_step = property(lambda self: bool(self._map[0]))
    closing = property(lambda self: bool(self._map[1]))
    steps = property(lambda self: struct.unpack("<q", self._map[2:10])[0])


def _flagged(shared: Shared, at: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        shared.set(at, True)
        try:
            return original(*args, **kwargs)
        finally:
            shared.set(at, False)

    return watched


def victim(model: Model, root: Path, shared: Shared, goes_on: bool) -> None:
    """Captures steps until it is killed, or all are done. goes_on: after an interrupt, as in a notebook."""
    defaults = writer.RankWriter.__init__.__kwdefaults__
    defaults.update(segment_bytes=1 << 19, block_bytes=1 << 16)
    files.SegmentFile.finish = _flagged(shared, 1, files.SegmentFile.finish)  # type: ignore[method-assign]
    writer.WriterThread.end = _flagged(shared, 1, writer.WriterThread.end)  # type: ignore[method-assign]

    def ends(*_: Any) -> None:  # as vLLM's worker does
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, ends)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with torch.no_grad(), Probe(model, dir=str(root)) as probe:
        forward = _flagged(shared, 0, probe._forward)
        probe._forward = forward  # type: ignore[method-assign]
        step = 0
        while step < STEPS:
            x = argument(step)
            try:
                model(x)
            except KeyboardInterrupt:
                if not goes_on:
                    raise
                goes_on = False
                probe.next_step = step + 1
            step += 1
            shared.count(step)


@dataclass
class Kills:
    """What became of the victims. where: by state at the signal; found: defects, a sentence each."""

    done: int = 0
    tensors: int = 0
    where: Counter[str] = field(default_factory=Counter)
    by: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)


def kills(work: Path, count: int, seed: int, until: float, say: Callable[[str], None]) -> Kills:
    """Kills ``count`` victims, or fewer when time.monotonic() is past ``until``."""
    torch.set_num_threads(1)
    rng, shared, model, result = random.Random(seed), Shared(), made(), Kills()
    expected = reference(model)
    weights = {name: _hash(value) for name, value in model.named_parameters()}
    warm_up()
    for number in range(count):
        if time.monotonic() > until:
            break
        # A third each of aims and signals, and each with each.
        aim, by = AIMS[number % 3], SIGNALS[number // 3 % 3]
        goes_on = by is signal.SIGINT and rng.random() < 0.5
        root = work / f"kill-{number}"
        before = len(result.found)
        try:
            ended = _kill(model, root, shared, aim, by, goes_on, rng, result)
            _check(root, expected, weights, by, ended, rng, result)
        except Exception as error:
            result.found.append(f"{type(error).__name__}: {error}")
        result.found[before:] = [f"kill {number} ({by.name}, {aim}): {text}" for text in result.found[before:]]
        for text in result.found[before:]:
            say(text)
        if len(result.found) == before:
            shutil.rmtree(root, ignore_errors=True)
        result.done += 1
        if result.done % 20 == 0:
            say(f"{result.done} kills, {result.tensors} tensors read, {len(result.found)} defects")
    return result


def _kill(
    model: Model, root: Path, shared: Shared, aim: str, by: signal.Signals, goes_on: bool, rng: random.Random,
    result: Kills,
) -> bool:  # fmt: skip
    """One victim and its end; whether it had closed its dump before the signal came."""
    shared.clear()
    child = os.fork()
    if child == 0:
        code = 1
        log = os.open(root.with_suffix(".log"), os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            victim(model, root, shared, goes_on)
            code = 0
        except (SystemExit, KeyboardInterrupt):
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(code)
    end = time.monotonic() + WAIT_S
    wanted = rng.randrange(1, STEPS * 3 // 4)

    def reached() -> bool:
        if shared.steps < wanted and not _ended(child):
            return False
        return aim == "any" or (shared.in_step if aim == "step" else shared.closing) or _ended(child)

    while not reached() and time.monotonic() < end:
        time.sleep(0 if shared.steps >= wanted else 0.001)
    time.sleep(rng.random() * {"any": 0.1, "step": 5e-4, "close": 2e-3}[aim])
    state = _state(shared)
    os.kill(child, by)
    code = _wait(child, end)
    if by is signal.SIGKILL:
        state = _state(shared)  # as it died
    result.where[state] += 1
    result.by[by.name] += 1
    if code not in (0, -by):
        result.found.append(f"the victim ended with {code}; read {root.with_suffix('.log')}")
    return shared.steps >= STEPS


def _state(shared: Shared) -> str:
    names = [name for name, on in (("a segment closes", shared.closing), ("within a step", shared.in_step)) if on]
    return " and ".join(names) or "between steps"


_CODES: dict[int, int] = {}


def _ended(child: int) -> bool:
    if child not in _CODES:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _CODES[child] = os.waitstatus_to_exitcode(status)
    return child in _CODES


def _wait(child: int, end: float) -> int:
    while not _ended(child):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"the victim did not end within {WAIT_S:.0f} s after the signal")
        time.sleep(0.002)
    return _CODES.pop(child)


def _check(
    root: Path, expected: dict[Key, str], weights: dict[str, str], by: signal.Signals, ended: bool,
    rng: random.Random, result: Kills,
) -> None:  # fmt: skip
    dump = open_dump(root)
    found = result.found
    result.tensors += _compare(dump, expected, weights, by, found)
    if by is signal.SIGKILL and not ended:
        if any("not closed" not in problem and "torn" not in problem for problem in dump.problems):
            found.append(f"problems: {dump.problems}")
        if rng.random() < 0.5:
            _killed_repair(root, rng)
        repair(root)
        again = open_dump(root)
        if again.problems or len(again.records) != len(dump.records):
            found.append(f"after repair: {again.problems}, {len(again.records)} of {len(dump.records)} records")
        _compare(again, expected, weights, by, found)
        again.close()
    elif 0 not in dump.ends or any("interrupted while a tensor was copied" not in p for p in dump.problems):
        found.append(f"a signal left the dump open or damaged: {dump.problems}")
    dump.close()


def _compare(
    dump: Dump, expected: dict[Key, str], weights: dict[str, str], by: signal.Signals, found: list[str]
) -> int:
    """Reads every tensor; each must be what torch's hooks saw, and of all steps but the interrupted one none is
    missing: the last one of a killed process, and any one where it goes on after an interrupt."""
    seen: dict[int, int] = {}
    for record in dump.records:
        digest = str(xxhash.xxh3_128_hexdigest(dump.read(record).tobytes()))
        if record.step is None:
            want = weights.get(f"{record.tap}.{record.role.partition('.')[2]}")
        else:
            tap = "" if record.tap == ROOT_TAP else record.tap
            want = expected.get((record.step, tap, record.role.partition(".")[0], record.call))
            seen[record.step] = seen.get(record.step, 0) + 1
        if digest != want or digest != record.hash:
            found.append(f"{record.name} of step {record.step} is not what was captured")
            return len(dump.records)
    each = len(expected) // STEPS
    short = [step for step in range(max(seen, default=-1) + 1) if seen.get(step, 0) != each]
    if len(short) > 1 or (short and by is signal.SIGKILL and short[0] != max(seen)):
        found.append(f"tensors are missing in steps {short[:5]}, the last of which is {max(seen)}")
    return len(dump.records)


def _killed_repair(root: Path, rng: random.Random) -> None:
    """`accprobe inspect --repair`, killed at a random moment."""
    child = os.fork()
    if child == 0:
        try:
            repair(root)
        finally:
            os._exit(0)
    time.sleep(rng.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
