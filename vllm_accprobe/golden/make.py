"""From a model to a golden pack: serve it, send the prompts, capture what the pack stores, and do it once more.

The problem: a pack needs few rows, and a capture of everything may exceed the disk; a pack is worth nothing where the
golden machine itself does not give the same numbers twice. The idea: the server starts disarmed. A first pass answers
freely and gives token ids and log-probabilities; then the same prompts are sent along those tokens, captured: the rows
that a pack may store in full (arm.json's ``rows``), and whole requests while they are small. A last pass repeats the
capture on the same server, with a fresh prefix cache and fresh images; equal hashes mean equal bits.

Elsewhere: the pack's file (pack.py), the same prompts to another server (check.py), prompts (prompts.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmSelection, literal
from vllm_accprobe.config import Ranges
from vllm_accprobe.dump.decode import DecodeError
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import Record, hash_tokens
from vllm_accprobe.gate import preflight
from vllm_accprobe.gate.localize import MEASURED, SPARE, RowSizes, environment, measured, salted
from vllm_accprobe.gate.sending import passes, prompts as prompts_file, rendering, replies
from vllm_accprobe.gate.sending.client import PLUGIN, Reply, Sender, SendError
from vllm_accprobe.gate.sending.passes import Done, Forcing, parse
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.served_run import served
from vllm_accprobe.gate.sides import SendSettings
from vllm_accprobe.golden import prompts
from vllm_accprobe.golden.answers import check_prompt, to_text
from vllm_accprobe.golden.pack import PackSummary, RequestShape, pack, rows_wanted
from vllm_accprobe.progress import progress, waiting
from vllm_accprobe.refusals import CommandError
from vllm_accprobe.whole_file import write_private

if TYPE_CHECKING:
    from vllm_accprobe.golden.stream import StreamSummary

DUMP, ANSWERS, CAPTURED, AGAIN = "dump", "answers", "captured", "again"
"""Folders of the work: the capture, and three folders of `send`."""
TEXT = "answers.jsonl"
"""What goes into the pack of the first of these."""
_WHOLE = 256e6
"""Chosen: bytes of rows that are captured beyond those that a pack stores in full: for a 7B model none, of which a pack
has 2 rows in full and 129 sketches."""
_VOCABULARY = 500
"""Chosen: of a model whose config.json names none."""


_PLAIN = PromptLine(MEASURED, token_ids=(3, 4, 5, 6))


class GoldenError(SendError):
    """One line: why there is no pack, or nothing to check. Exit code 2."""


@dataclass(frozen=True)
class GoldenServer:
    """A server that captures into ``dump`` once it is armed. work: folder of its answers and its log."""

    sender: Sender
    about: dict[str, Any]
    work: Path
    how: SendSettings

    @property
    def dump(self) -> Path:
        return self.work / DUMP

    def send(
        self, folder: str, lines: list[PromptLine], plan: Forcing, title: str,
        before: Callable[[int], None] = lambda index: None, chats: Sequence[PromptLine] = (),
    ) -> Sent:  # fmt: skip
        """The answers to ``lines``, one after another, in WORK/folder. Raises SendError, GoldenError where no prompt is
        answered, OSError."""
        out, one = self.work / folder, [parse("one")]
        with progress(title, len(lines) * (1 + plan.score), steps=True, pace=self.how.say) as tell:
            made = passes.made_by(self.how.prompts)
            done = passes.send(self.sender, self.about, lines, one, 1, out, made, tell, plan, before, chats)
        self._say_refusals(title, done)
        return replies.read(out)

    def _say_refusals(self, title: str, done: Done) -> None:
        if not done.answered:
            raise GoldenError(f"{title}: no prompt was answered: {passes.refusals(done.reasons)}")
        if done.refused:
            self.how.say(f"{title}: refused {passes.refusals(done.reasons)}")

    def captured(
        self, folder: str, golden: Sent, rows: Mapping[str, Ranges], end: str = "", score: bool = False
    ) -> Sent:
        """As `send`, along golden's tokens, while rows are captured. rows: see `rows_to_capture`. end: of the requests'
        ids. score: a last pass scores the prompts where the server can; it is not captured."""
        lines = [replace(one, name=one.name + end) for one in fresh(passes.forced_lines(golden), folder)]
        plan = passes.planned(self.sender, passes.digest(golden), 1, None if score else False, None)
        if plan.how != PLUGIN:
            raise GoldenError(f"the server cannot be forced by accprobe's plugin ({plan.how}): nothing can be captured")
        named = {name + end: found for name, found in rows.items()}
        selection = ArmSelection(True, tuple(literal(line.name) for line in lines), rows=named)
        if len(json.dumps(selection.to_json(), indent=1)) > arm_file.MAX_BYTES:
            raise GoldenError(f"{len(lines):,} prompts are too many for a pack: name fewer with --prompts")

        def arm(index: int) -> None:
            arm_file.write(self.dump, selection if index == 0 else ArmSelection(False))

        found = self.send(folder, lines, plan, folder, arm)
        arm_file.write(self.dump, ArmSelection(False))
        return found


@contextmanager
def golden_server(
    name: str, command: str, work: Path, how: SendSettings, environ: Mapping[str, str], gigabytes: float
) -> Iterator[GoldenServer]:
    """The server that ``command`` starts, with the probe on and disarmed; it is ended with the context. work: an
    existing folder. Raises NotServed, SendError."""
    environ = environment(environ, work / DUMP, gigabytes)
    with served(name, command, environ, work, how.ready_s, how.say) as run:
        with waiting(lambda: f"{name}: asking the server what it supports", how.say):
            sender, about = how.sender(run.command.url, run.command.key).introduced()
        yield GoldenServer(sender, about, work, how)


def fresh(lines: Sequence[PromptLine], salt: str) -> list[PromptLine]:
    """The lines in a way that no prefix cache and no cache of images has them. salt: the same for both sides of a
    comparison."""
    return [
        line if line.messages is None else replace(line, messages=tuple(_fresh_images(line.messages, line.name, salt)))
        for line in salted(lines, f"accprobe-{salt}")
    ]


def _fresh_images(messages: Iterable[dict[str, Any]], name: str, salt: str) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [part if part.get("type") == "text" else {**part, "uuid": f"{name}-{i}-{salt}"}
                       for i, part in enumerate(content)]  # fmt: skip
        yield {**message, "content": content}


# --- which rows ---


def shapes_of(golden: Sent, work: Path) -> dict[str, RequestShape]:
    """By prompt, those that were answered. work: where the engine's steps are, which know the chunks."""
    steps = replies.read_steps(work)
    found = {}
    for name, reply in golden.passes[0].items():
        ids = reply.prompt_token_ids
        if reply.refused is None and ids and reply.token_ids:
            ends = {before + n - 1 for _, before, n, _ in steps.rows(0, name)}
            chunks = tuple(sorted(end for end in ends if end < len(ids)))
            found[name] = RequestShape(len(ids), len(reply.token_ids) - 1, chunks, hash_tokens(ids))
    return found


def rows_to_capture(
    shapes: Mapping[str, RequestShape], sizes: RowSizes, seed: int, *, times: int = 1, most: float = float("inf")
) -> dict[str, Ranges]:
    """By prompt the positions that are captured, those that a pack stores in full, of the prompts that do not fit whole
    into what ``sizes`` leaves; {}: all fit. times: the rows are captured so often; most: bytes of whole requests."""
    choice = rows_wanted([*shapes.values()], seed)
    chosen = {name: choice.of(i) for i, name in enumerate(shapes)}
    sampled = {name: (shape.generated + 1) * sizes.sampled for name, shape in shapes.items()}
    left = min(sizes.left / times - sum(len(chosen[name]) * sizes.row + sampled[name] for name in shapes), most)
    found = {}
    for name, shape in sorted(shapes.items(), key=lambda item: item[1].prompt_len):
        more = (shape.prompt_len + shape.generated - len(chosen[name])) * sizes.row
        if more <= left:
            left -= more
        else:
            found[name] = tuple((p, p) for p in chosen[name])
    return found


# --- the same prompts again ---


@dataclass(frozen=True)
class Noise:
    """Two captures of the same prompts on one server. tensors: in both; equal: to the bit; unpaired: in one of them;
    worst: by class the largest relative L2 distance and its tap; answers: tokens whose log-probability differs."""

    tensors: int
    equal: int
    unpaired: int
    worst: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    answers: int = 0

    @property
    def reproduced(self) -> bool:
        return self.tensors > 0 and self.tensors == self.equal and not self.unpaired and not self.answers

    @property
    def sentence(self) -> str:
        if not self.tensors:
            return "NOT verified: no tensor was captured twice"
        if self.reproduced:
            return f"reproduced to the bit: {self.tensors:,} tensors of a second pass have the same bytes"
        lines = [f"NOT reproduced to the bit: {self.tensors - self.equal:,} of {self.tensors:,} tensors differ in a "
                 "second pass on the same server"]  # fmt: skip
        if self.worst:
            size, tap = max(self.worst.values())
            lines.append(f"at most by {size:.2g} (relative L2, {tap})")
        if self.answers:
            lines.append(f"{self.answers:,} tokens have another log-probability")
        if self.unpaired:
            lines.append(f"{self.unpaired:,} are in one of the two only")
        return "; ".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reproduced": self.reproduced}


Place = tuple[Any, ...]


def noise(dump: Dump, first: Sent, second: Sent) -> Noise:
    """Of a dump that has each request twice, and of the answers to both. Raises DumpError where a payload cannot be
    read."""
    sides: tuple[dict[Place, Record], dict[Place, Record]] = ({}, {})
    for r in dump.records:
        space = None if r.step is None or r.rows is None else dump.rows.get((r.rank, r.step, r.rows))
        names = {dump.requests[r.rank, s.req].id for s in space.segments} if space is not None else set()
        if space is None or len(names) != 1 or MEASURED in names:
            continue
        name = names.pop()
        again = name.endswith(f".{AGAIN}")
        places = tuple((s.image, s.pos, s.n) for s in space.segments)
        key = (name.removesuffix(f".{AGAIN}"), r.rank, r.tap, r.role, r.call, r.rows, places)
        sides[again].setdefault(key, r)
    both = sides[0].keys() & sides[1].keys()
    worst: dict[str, tuple[float, str]] = {}
    equal = 0
    for key in sorted(both, key=str):
        a, b = sides[0][key], sides[1][key]
        if a.hash is not None and (a.hash, a.dtype, a.shape) == (b.hash, b.dtype, b.shape):
            equal += 1
        else:
            worst[a.cls] = max(worst.get(a.cls, (0.0, "")), (_distance(dump, a, b), a.tap))
    pairs = [(one, second.passes[0].get(f"{name}.{AGAIN}")) for name, one in first.passes[0].items()]
    other = sum(_differing(one, two) for one, two in pairs)
    return Noise(len(both), equal, len(sides[0].keys() ^ sides[1].keys()), worst, other)


def _distance(dump: Dump, a: Record, b: Record) -> float:
    """Relative L2; inf for another dtype or shape, and where NaN or Inf stand at other places."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.payload is None or b.payload is None:
        return float("inf")
    x, y = (widen(dump.read(r), r.dtype, as_float=True).astype(np.float64) for r in (a, b))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(all="ignore"):
        far = float(np.linalg.norm(np.where(same, 0.0, x - y)) / np.linalg.norm(np.where(np.isfinite(x), x, 0.0)))
    return far if far == far else float("inf")


def _differing(one: Reply, two: Reply | None) -> int:
    """Tokens of the answer whose log-probability is not the same, or is in one of the two only."""
    pairs = zip_longest(one.logprobs or (), (two.logprobs if two is not None else None) or ())
    return sum(a != b for a, b in pairs)


# --- all of it ---


@dataclass(frozen=True)
class Made:
    """What `make` wrote. prompts: that were answered; captured: bytes of the dump; seconds: of all."""

    pack: PackSummary
    noise: Noise
    prompts: int
    captured: int
    seconds: float


def make(
    command: str, model: str, out: Path, work: Path, how: SendSettings, environ: Mapping[str, str], *,
    gigabytes: float, max_bytes: int | None, seed: int,
) -> Made:  # fmt: skip
    """Writes the pack ``out`` of the model that ``command`` serves. work: a folder for the dump and the answers. Raises
    NotServed, SendError, GoldenError, DumpError, OSError."""
    began = time.monotonic()
    own = own_lines(how.prompts) if how.prompts else []
    with golden_server("golden", command, work, how, environ, gigabytes) as server:
        lines = own or lines_for(server.sender, model)
        score = server.sender.can(passes.client.SCORED)
        free = Forcing(score=score)
        answers = server.send(ANSWERS, lines, free, "golden answers", chats=rendering.chats(lines))
        with waiting(lambda: "measuring a row", how.say):
            plain = next((line for line in passes.forced_lines(answers) if line.token_ids is not None), _PLAIN)
            sizes = measured(server.sender, server.dump, plain, gigabytes * 1e9 * SPARE) or RowSizes(0.0, 0.0, 0.0)
        rows = rows_to_capture(shapes_of(answers, work), sizes, seed, times=2, most=_WHOLE)
        first = server.captured(CAPTURED, answers, rows)
        second = server.captured(AGAIN, answers, rows, f".{AGAIN}")
    how.say("comparing the two captures, and packing the first")
    dump = opened(work)
    try:
        found = noise(dump, first, second)
        text = work / TEXT
        write_private(text, to_text(answers, sizes.row, sizes.sampled, found.to_json()))
        keep_requests(dump, set(first.passes[0]))
        summary = pack(dump, out, max_bytes=max_bytes, seed=seed, prompts=text)
    finally:
        dump.close()
    size = sum(f.stat().st_size for f in (work / DUMP).rglob("*") if f.is_file())
    return Made(summary, found, len(first.passes[0]), size, time.monotonic() - began)


_SMALL = 2e9
"""Chosen: bytes of a checkpoint up to which all rows are computed into the dump, as sketches need them; of a larger
one those that a pack stores in full."""


_BEGUN = "begun"


def is_begun(work: Path) -> bool:
    """Whether `pack_streamed` has begun in this folder."""
    return (work / _BEGUN).is_file()


def pack_streamed(
    model: Path, names: Sequence[str], ids: Sequence[Sequence[int]], out: Path, work: Path,
    say: Callable[[str], None], *, max_bytes: int | None, seed: int,
) -> tuple[StreamSummary | None, PackSummary]:  # fmt: skip
    """Writes the pack ``out`` of the checkpoint at ``model``, computed in float32 on this CPU (stream.py), for prompts
    of ``ids``, whose last tokens count as generated. work: may hold what a killed run has begun; None where its dump is
    whole. Raises CommandError, DumpError, OSError."""
    from vllm_accprobe.golden.checkpoint import identity, shards_of
    from vllm_accprobe.golden.stream import ANSWERS as SCORED, finished, streamed

    if short := next((name for name, prompt in zip(names, ids, strict=True) if len(prompt) < 2), None):
        raise CommandError(f"--prompts: {short} has one token: a pack needs two or more")
    lengths = [max(len(prompt) - prompts.MAX_TOKENS, 1) for prompt in ids]
    shapes = [RequestShape(n, len(prompt) - n, prompt=hash_tokens(prompt[:n]))
              for prompt, n in zip(ids, lengths, strict=True)]  # fmt: skip
    choice = rows_wanted(shapes, seed)
    small = sum(f.stat().st_size for f in model.glob("*.safetensors")) <= _SMALL
    rows = None if small else [choice.of(i) for i in range(len(ids))]
    dump, begun = work / DUMP, work / _BEGUN
    about = {"checkpoint": identity(model, shards_of(model)), "prompts": [list(map(int, prompt)) for prompt in ids],
             "names": [*names], "rows": rows}  # fmt: skip
    text_of_run = hashlib.sha256(json.dumps(about).encode()).hexdigest() + "\n"
    if dump.exists() and is_begun(work) and begun.read_text() != text_of_run:
        raise CommandError(f"{work} was begun with another checkpoint, other prompts or another seed: remove it, or "
                           "name another folder with --keep")  # fmt: skip
    write_private(begun, text_of_run)
    done = None  # of an earlier process, which was killed while it packed
    if not finished(dump):
        try:
            done = streamed(model, ids, dump, progress=say, prompt_lengths=lengths, rows=rows, names=names)
        finally:
            if [*work.iterdir()] == [begun]:  # refused before its first block
                begun.unlink()
    text = work / TEXT
    write_private(text, to_text(_cut_answers(replies.read(dump / SCORED), lengths, work / ANSWERS), 0.0, 0.0, {}))
    return done, pack(dump, out, max_bytes=max_bytes, seed=seed, prompts=text)


def _cut_answers(scored: Sent, lengths: Sequence[int], out: Path) -> Sent:
    """``scored``, whose replies follow one token each, as a folder of `send` whose prompts have ``lengths`` and were
    answered one after another. What an earlier run left in ``out`` is removed."""
    shutil.rmtree(out, ignore_errors=True)
    found = [reply for reply in scored.passes[0].values() if reply.logprobs]
    cut = []
    for reply, n in zip(found, lengths, strict=True):
        whole = [*(reply.prompt_token_ids or ()), *(reply.token_ids or ())]
        later: dict[str, Any] = {key: (getattr(reply, key) or [])[n - 1 :] for key in ("logprobs", "top", "margins")}
        cut.append(replace(reply, prompt_token_ids=whole[:n], token_ids=whole[n:], forced=None, **later))
    one = {"arrive": "one", "answered": len(cut), "refused": 0, "resumed": 0}
    about = scored.about | {"passes": [one], "settings": scored.about["settings"] | {"arrive": ["one"]}}
    lines = (json.dumps({"id": reply.name, "token_ids": reply.prompt_token_ids}) for reply in cut)
    replies.begin(out, "\n".join(lines) + "\n", about)
    writer = replies.ReplyWriter(out / replies.pass_name(0))
    for reply in cut:
        writer.add(reply)
    writer.close()
    return replies.read(out)


def opened(work: Path) -> Dump:
    """What a server of `golden_server` captured. Raises GoldenError where that is nothing, or not all; DumpError."""
    dump = open_dump(work / DUMP)
    if dump.stops or not dump.records:
        reason = next((stop.reason for stop in dump.stops.values()), "no tensor was captured")
        dump.close()
        raise GoldenError(f"the capture is not whole: {reason}; raise --max-gb, or read the server's log (--keep DIR)")
    return dump


def keep_requests(dump: Dump, names: Collection[str]) -> None:
    """Takes all steps out of an opened dump but those of the requests ``names``. Each step has one request."""
    kept = {key for key, r in dump.requests.items() if r.id in names}
    steps = {(rank, step) for (rank, step, _), space in dump.rows.items()
             if space.segments and all((rank, s.req) in kept for s in space.segments)}  # fmt: skip
    dump.records = [r for r in dump.records if r.step is None or (r.rank, r.step) in steps]
    dump.ops = [op for op in dump.ops if (op.rank, op.step) in steps]
    dump.requests = {key: r for key, r in dump.requests.items() if key in kept}
    dump.steps = {key: step for key, step in dump.steps.items() if key in steps}
    dump.rows = {key: space for key, space in dump.rows.items() if key[:2] in steps}
    dump.masks = {key: mask for key, mask in dump.masks.items() if key[:2] in steps}
    dump.cached = [(rank, one) for rank, one in dump.cached if (rank, one.step) in steps]


def own_lines(source: str) -> list[PromptLine]:
    """The user's prompts. Raises PromptsError for those that a pack cannot carry, too, OSError."""
    found = prompts_file.read(source)
    for line in found:
        try:
            check_prompt(line.to_json())
        except DecodeError as e:
            raise prompts_file.PromptsError(f"{source}, {line.name}: {e}: a pack cannot carry it") from None
    return found


def lines_for(sender: Sender, model: str) -> list[PromptLine]:
    """The prompts that ship with us, as far as the server can read them. Raises ServerLost."""
    config = preflight.config_of(model)
    texts = prompts.texts()
    if sender.tokenized(texts[0]) is None:
        size = (config | (config.get("text_config") or {})).get("vocab_size")
        return prompts.by_formula(size if isinstance(size, int) else _VOCABULARY)
    return [*texts, *(prompts.images() if "vision_config" in config else ())]
