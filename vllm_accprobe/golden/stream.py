"""A golden of any size on a CPU: a transformers model of which one block at a time is in memory.

The problem: a model in float32 fits into few machines, and a golden must not depend on one that it fits into. The idea:
the model's own forward runs once for each block and prompt: blocks that are done give what they gave, one block is
computed, and at the next one the pass ends. A block's parameters are read once, used for all prompts, and freed. Each
prompt is a call of its own, so no row is padding, and the numbers are to the bit those of the whole model. Taps take
each module once, as a `Probe` does, and write an ordinary dump. After each block the dump is whole on disk and the
hidden states are saved next to it: a killed run continues there.

Not here: models and blocks (model_blocks.py), tensors of the files (checkpoint.py), taps and lines (capture/).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_accprobe import __version__
from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.attribute_override import override
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, run_facts, unsplit
from vllm_accprobe.capture.core.rows import Requests, Scheduled, Space, token_space
from vllm_accprobe.capture.core.session import HEAD, StepState
from vllm_accprobe.capture.padded_batch import Rectangle, language_path
from vllm_accprobe.capture.taps.hooks import Tap, Taps, tapped
from vllm_accprobe.capture.taps.params import ParameterLines
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import LOGITS, RUN_JSON, Segment, Step, hash_tokens
from vllm_accprobe.dump.writer import DumpCheckpoint
from vllm_accprobe.golden.checkpoint import (
    CheckpointTensors,
    StreamedExperts,
    StreamedRows,
    assign,
    identity,
    shards_of,
)
from vllm_accprobe.golden.model_blocks import ModelBlocks, available_memory, built
from vllm_accprobe.refusals import CommandError, one_line
from vllm_accprobe.whole_file import whole

ANSWERS = "answers"
"""The folder in the dump with log-probabilities, as `accprobe send` writes it."""
TOP = 20
_SCHEMA, _STATE = 2, "state.safetensors"
_NO_BUDGET_GB = 999_999
_CHUNK, _LOGITS = 256, 1 << 24
"""Rows of logits that are computed at a time for log-probabilities alone, and numbers in them; chosen."""
_FLUSH_S = 3600.0


@dataclass(frozen=True)
class StreamSummary:
    """What `streamed` did. seconds, read_bytes: of this process; peak_bytes: its largest resident memory. blocks: of
    the model; resumed: those that an earlier process had done. tensors: lines in the dump; payload_bytes: of them."""

    blocks: int
    resumed: int
    seconds: float
    read_bytes: int
    peak_bytes: int
    tensors: int
    payload_bytes: int


def streamed(
    model: Path,
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    dtype: str = "float32",
    modules: Sequence[str] = (),
    resume: bool = True,
    progress: Callable[[str], None],
    prompt_lengths: Sequence[int] | None = None,
    rows: Sequence[Sequence[int]] | None = None,
    parts: Sequence[str] = ("input", "output"),
    names: Sequence[str] | None = None,
    expert_bytes: int | None = None,
) -> StreamSummary:
    """Writes the dump ``out`` of the checkpoint at ``model``, in ``dtype`` (float32 or float64), on this CPU.

    Args:
        prompts: token ids, generated ones included: each is one prefill.
        modules, parts: as VLLM_ACCPROBE_MODULES and _PARTS have them; no modules are all.
        resume: continue a run that was killed; False: refuse where there is one.
        progress: gets a line before the start and one for each block.
        prompt_lengths: ids of each that are the prompt; later ones count as generated, and logits are stored from the
            prompt's last row on. None: all.
        rows: of each prompt the positions whose rows are stored; None: all.
        names: of the prompts, in the answers.
        expert_bytes: of a layer that needs more memory, experts are read one at a time, for each prompt again. None:
            half of what is available; a run that continues does as it began.

    Raises:
        CommandError: what cannot be read, does not fit, or is of another run; one line.
        OSError: as the file system has it.
    """
    ids = [[int(i) for i in prompt] for prompt in prompts]
    lengths = [len(i) for i in ids] if prompt_lengths is None else list(prompt_lengths)
    for what, other in (("prompt lengths", lengths), ("lists of rows", rows), ("names", names)):
        if other is not None and len(other) != len(ids):
            raise CommandError(f"{len(ids)} prompts and {len(other)} {what}: name one for each prompt")
    for number, (prompt, length) in enumerate(zip(ids, lengths, strict=True)):
        if not 0 < length <= len(prompt):
            raise CommandError(f"prompt {number} has {len(prompt)} token ids, {length} of them the prompt's: name some")
    if not ids:
        raise CommandError("there is no prompt: name one or more")
    if dtype not in ("float32", "float64"):
        raise CommandError(f"dtype {dtype}: a streamed golden is in float32 or float64")
    shards_of(model)
    config = ProbeConfig.from_kwargs(dir=str(out), modules=list(modules), parts=list(parts), max_gb=_NO_BUDGET_GB)
    net, block = built(model, getattr(torch, dtype))
    larger = available_memory() // 2 if expert_bytes is None else expert_bytes
    files = CheckpointTensors(model, net, getattr(torch, dtype), block)
    run = _StreamRun(model, net, files, ids, lengths, None if rows is None else [set(r) for r in rows], config, larger)
    run.names = [f"p{n}" for n in range(len(ids))] if names is None else list(names)
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(run.close, "interrupted")  # a later process cuts off what follows the last checkpoint
        run.open(out.absolute(), resume, progress, stack)
        return run.through(progress)


def finished(out: Path) -> bool:
    """Whether the dump ``out`` is there and whole."""
    try:
        ends = open_dump(out).ends
    except (DumpError, OSError):
        return False
    return bool(ends) and all(end.reason == "closed" for end in ends.values())


class PromptRows(Rectangle):
    """The rows of prompt ``number``, whose logits are computed from position ``first`` on. wanted: positions whose rows
    are stored; None: all."""

    def __init__(
        self, config: ProbeConfig, requests: Requests, model: torch.nn.Module, number: int, ids: list[int], length: int,
        wanted: set[int] | None,
    ):  # fmt: skip
        super().__init__(config, requests, model, number)
        self.number, self.length, self.first, self._wanted = number, len(ids), length - 1, wanted
        requests.add(f"call-{number}", ids[:length], length)
        self.begin({"input_ids": torch.tensor([ids])})

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Rectangle; also [1, rows of logits, ...] → [rows of logits, ...]."""
        scored = self.length - self.first
        if tensor.dim() == 3 and tensor.shape[:2] == (1, scored) and self.length not in tensor.shape[1:]:
            return tensor[0]
        return super().flatten(tensor)

    def space(self, part: str, rows: int) -> Space | None:
        """See Rectangle."""
        first = self.first if part == HEAD else 0
        batch = [Scheduled(self.batch[0].internal, first, self.length - first)]
        space = token_space(self._config, self._requests, batch, 0)
        if self._wanted is not None:
            space = _narrowed(space, self._wanted)
        space.ids = None if self._ids is None else self._ids[first:]
        space.name = LOGITS if part == HEAD else space.name
        return space


def _narrowed(space: Space, wanted: set[int]) -> Space:
    """The same with the rows of ``wanted`` positions alone."""
    ranges: list[tuple[int, int]] = []
    segments: list[Segment] = []
    for segment in space.segments:
        for at in (k for k in range(segment.n) if segment.pos + k in wanted):
            row, last = segment.row + at, ranges[-1][1] if ranges else -1
            if row == last:
                ranges[-1] = ranges[-1][0], row + 1
            else:
                ranges.append((row, row + 1))
            if row == last and segments[-1].phase == segment.phase:
                segments[-1] = dataclasses.replace(segments[-1], n=segments[-1].n + 1)
            else:
                segments.append(dataclasses.replace(segment, pos=segment.pos + at, n=1, row=row))
    return Space(space.name, space.src, space.padded, ranges, segments)


class _Gone(torch.Tensor):
    """Stands for what a layer before the last one gave, which is not kept. What torch computes of it is one, too."""


class _Shared:
    """What a block is called with that it may leave something in for later blocks: mappings and lists."""

    def __init__(self, kwargs: dict[str, Any]):
        self._before = {name: dict(v) for name, v in kwargs.items() if isinstance(v, MutableMapping)}
        self._lists = {name: len(v) for name, v in kwargs.items() if isinstance(v, list)}

    def left(self, kwargs: dict[str, Any]) -> list[Any]:
        """[argument, key, a copy of its value] of what is new in a mapping."""
        return [[name, key, _copied(value)] for name, before in self._before.items()
                for key, value in kwargs[name].items() if before.get(key) is not value]  # fmt: skip

    def changed(self, kwargs: dict[str, Any]) -> str:
        """Why a list, or a key that is no text and no number, cannot be kept; else empty."""
        longer = next((name for name, n in self._lists.items() if len(kwargs[name]) != n), "")
        if longer:
            return f"adds to the list {longer}"
        if any(not isinstance(key, (int, str)) for _, key, _ in self.left(kwargs)):
            return "adds to a mapping by keys that cannot be saved"
        return ""


class _NextBlock(BaseException):
    """Ends a pass at a block whose turn is later. No Exception: a model's forward must not catch it."""


@dataclass
class _Prompt:
    """How far one prompt is. kept: what the blocks that are no layers gave, by their number; last: what the last layer
    gave; left: by block, [argument, key, value] of what it put into a mapping for later ones (Gemma 3n's keys and
    values). begun: modules outside blocks whose inputs are taken; finished: how many of their calls are. known: kinds
    of rows that the journal had when this process began."""

    rows: PromptRows
    state: StepState | None = None
    kept: dict[int, Any] = field(default_factory=dict)
    last: Any = None
    left: dict[int, list[Any]] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    finished: Counter[str] = field(default_factory=Counter)
    known: frozenset[str] = frozenset()


class _StreamRun:
    """A model, its taps, its prompts, and the pass that runs."""

    names: list[str]

    def __init__(
        self, folder: Path, model: Any, files: CheckpointTensors, ids: list[list[int]], lengths: list[int],
        wanted: list[set[int]] | None, config: ProbeConfig, larger: int,
    ):  # fmt: skip
        self._model, self._ids, self._lengths, self._wanted, self._config = model, ids, lengths, wanted, config
        self._blocks, self._larger = ModelBlocks(model), larger
        self._dtype = next(model.parameters()).dtype
        self._files = files
        self._folder = folder
        # as transformers does: what the files have is not tied
        self._tied = {name: of for name, of in self._blocks.tied.items() if not self._files.of(name)}
        text = getattr(model.config, "get_text_config", lambda: model.config)()
        self._width, self._vocabulary = int(text.hidden_size), int(text.vocab_size)
        for number, prompt in enumerate(ids):
            if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
                raise CommandError(f"prompt {number} has token ids outside 0 to {self._vocabulary - 1} of {folder}")
        self._chunk = max(1, min(_CHUNK, _LOGITS // self._vocabulary))
        self._chunked = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._recording: Recording | None = None
        self._prompts: list[_Prompt] = []
        self._requests = Requests(config)
        self._order: list[str] = []
        self._loaded, self._meta = "", dict[str, torch.nn.Parameter]()
        self._prompt: _Prompt | None = None
        self._number = 0
        self._seen: Counter[str] = Counter()
        self._spare: Any = None
        self._inside = self._complete = False
        self._stop_reason = ""

    # Before the first block.

    def open(self, out: Path, resume: bool, progress: Callable[[str], None], stack: ExitStack) -> None:
        """Checks memory and disk, begins the dump or continues it, and puts taps on the model until ``stack`` closes.
        Raises CommandError."""
        self._out, self._folder_of_state = out, out.with_name(out.name + ".stream")
        begun = self._read_state()
        unsaved = begun is None and resume and self._folder_of_state.is_dir() and (out / RUN_JSON).exists()
        if unsaved and not finished(out):  # killed before anything was saved
            shutil.rmtree(out, ignore_errors=True)
        self._larger = begun[0]["larger"] if begun is not None else self._larger
        self._blocks.stream_experts(self._larger)
        self._blocks.stream_rows(self._files.plain)
        if self._blocks.streamed:
            self._model.set_experts_implementation("eager")  # takes them by their number
        self._check_memory(progress, 0 if begun is None else begun[0]["files"]["payload"])
        if begun is None and (out / RUN_JSON).exists():
            raise CommandError(f"{out} already holds a dump: name another directory, or remove it")
        if begun is not None and not resume:
            raise CommandError(f"{out} is not finished: resume it, or remove it and {self._folder_of_state}")
        saved, tensors = begun if begun is not None else ({}, {})
        self._folder_of_state.mkdir(mode=0o700, parents=True, exist_ok=True)
        modules = dict(self._model.named_modules(remove_duplicate=False))
        self._recording = Recording(
            self._config, out, self._facts(), Layouts(modules, 0, 1), self._space, rank=0, parallel=unsplit(1),
            device=torch.device("cpu"), setting="out=", on_stop=self._stopped,
            begun=DumpCheckpoint(**saved["files"]) if begun is not None else None,
        )  # fmt: skip
        self._check_stopped()
        self._session = session = self._recording.session
        session.flatten = self._flatten
        known = ("line", "parameter") if begun is not None else ()  # the journal has these lines
        restores = [override(session.sink, name, _drop) for name in known]
        taps = Taps(session, self._outside)
        stack.callback(taps.remove)
        taps.attach(self._model, language_path(self._model))
        self._taps = taps
        self._parameters = parameters = ParameterLines(session, self._model, say, rounded=True)
        nbytes = sum(p.numel() for p in self._model.parameters()) * self._dtype.itemsize
        parameters.stored = self._config.wants_param_payloads(nbytes)
        for path, module in self._blocks.resident.items():
            own = [f"{path}.{leaf}" if path else leaf for leaf, p in module._parameters.items() if p is not None]
            assign(self._model, self._files.read(key for name in own for key in self._files.of(name)))
        inside = tuple(f"{block}." for block in self._blocks.modules)
        for path, module in self._model.named_modules():
            if not f"{path}.".startswith(inside):
                parameters.layer(path, module)
        for restore in restores:
            restore()
        for path, module in self._blocks.modules.items():
            stack.callback(override(module, "forward", self._block(path, module.forward)))
        if begun is None:
            self._save()
        else:
            self._restore(saved, tensors)

    def _check_memory(self, progress: Callable[[str], None], written: int) -> None:
        """written: bytes of the dump's payload that are there."""
        lengths = [len(prompt) for prompt in self._ids]
        scored = max(n - first + 1 for n, first in zip(lengths, self._lengths, strict=True))
        rows = max(scored, min(self._chunk, max(lengths)))
        need = self._blocks.memory(self._stored, lengths, rows, self._width, self._vocabulary)
        have, total = available_memory(), self._files.stored_bytes(set(self._files.tensors))
        stored = sum(lengths) if self._wanted is None else sum(map(len, self._wanted))
        disk = 2 * sum(lengths) * self._width * self._dtype.itemsize
        if not self._config.modules and "output" in self._config.parts:
            disk += 2 * stored * self._blocks.linear_bytes()
        disk = max(disk - written, 0)
        progress(
            f"{len(self._blocks.modules)} blocks, {_gb(total)} to read, {sum(lengths):,} tokens in {len(lengths)} "
            f"prompts; memory about {_gb(need)} of {_gb(have)}, disk about {_gb(disk)}"
        )
        if need > have:
            raise CommandError(
                f"about {_gb(need)} of memory are needed and {_gb(have)} are available: take fewer or shorter prompts, "
                "or a machine with more"
            )
        self._check_disk(disk)

    def _stored(self, path: str) -> int:
        if path in self._blocks.by_rows:
            return 0
        return self._files.stored_bytes(self._files.sources(path, self._blocks.streamed.get(path, ())))

    def _check_disk(self, need: int) -> None:
        place = self._out
        while not place.exists():
            place = place.parent
        if need > (free := shutil.disk_usage(place).free):
            raise CommandError(
                f"{self._out}: about {_gb(need)} more are needed and {_gb(free)} are free: make room and run the same "
                "command again, which continues, or choose fewer modules and rows for another directory"
            )

    def _facts(self) -> dict[str, Any]:
        import transformers

        about = {
            "path": str(self._folder), "class": type(self._model).__name__, "dtype": str(self._dtype).partition(".")[2],
        }  # fmt: skip
        return run_facts(
            self._config.to_json(), versions={"transformers": transformers.__version__}, device={"type": "cpu"},
            model=about, parallel=unsplit(1), engine={"runner": "accprobe.Probe", "eager": True, "streamed": True},
        )  # fmt: skip

    def _rows_of(self, number: int) -> PromptRows:
        wanted = None if self._wanted is None else self._wanted[number]
        ids, length = self._ids[number], self._lengths[number]
        return PromptRows(self._config, self._requests, self._model, number, ids, length, wanted)

    # A pass.

    def _pass(self, prompt: _Prompt, keep: Any, capture: bool = True) -> Any:
        """What the model gives; None where it ended at a block whose turn is later. keep: logits_to_keep."""
        number, session = prompt.rows.number, self._session
        self._prompt, self._number, self._seen, self._spare = prompt, 0, Counter(), None
        if capture and prompt.state is None:
            size = {"requests": 1, "tokens": prompt.rows.length}
            prompt.state = session.begin(Step(number, size, time.time()), self._requests.unsent, True)
        session.state = state = prompt.state if capture else None
        try:
            ids = torch.tensor([self._ids[number]])
            found = self._model(input_ids=ids, use_cache=False, **({"logits_to_keep": keep} if self._chunked else {}))
            self._check_read(getattr(found, "logits", None), "the head")
            return found
        except _NextBlock:
            return None
        finally:
            if state is not None:
                for tap in state.stack:  # of these, inputs are taken and outputs will be
                    state.calls[tap] -= 1
                state.stack.clear()
                state.inside, state.taking = None, 0
            session.end()

    def _block(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a block, computed in its turn only."""

        def run(*args: Any, **kwargs: Any) -> Any:
            number, done, prompt = self._number, len(self._order), self._prompt
            assert prompt is not None
            self._number += 1
            if number < done:
                for name, key, value in prompt.left.get(number, ()):
                    kwargs[name][key] = _copied(value)
                return self._gave(prompt, number)
            if number > done:
                raise _NextBlock
            self._check_read((args, kwargs), path)
            self._load(path)
            self._inside, shared = True, _Shared(kwargs)
            try:
                result = forward(*args, **kwargs)
            except Exception as e:
                raise CommandError(f"{path} cannot be computed: {type(e).__name__}: {one_line(e)}") from e
            finally:
                self._inside = False
            if why := shared.changed(kwargs):
                raise CommandError(f"{path} {why}, which another may read: it cannot be streamed")
            if self._session.state is not None:
                if more := shared.left(kwargs):
                    prompt.left[number] = more
                if path in self._blocks.layers:
                    prompt.last = _copied(result)
                elif not _is_head(path):
                    prompt.kept[number] = _copied(result)
            return result

        return run

    def _gave(self, prompt: _Prompt, number: int) -> Any:
        """A copy, which the model may change, of what a block gave. Of layers only the last one's is kept: those before
        give it as `_Gone`, which may go into blocks that are done, and nowhere else."""
        if number in prompt.kept:
            return _copied(prompt.kept[number])
        if any(path in self._blocks.layers for path in self._order[number + 1 :]):
            self._spare = _copied(prompt.last, _Gone) if self._spare is None else self._spare
            return self._spare
        return _copied(prompt.last)

    def _check_read(self, values: Any, where: str) -> None:
        """Raises CommandError where a value was made of an earlier layer's output."""
        if _holds_gone(values):
            raise CommandError(
                f"{where} reads the output of another layer than the one before it: {type(self._model).__name__} "
                "cannot be streamed; compute it as a whole (accprobe.Probe)"
            )

    def _outside(self, tap: Tap, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The tap of a module; of one outside blocks, which runs in many passes, what is taken is taken once."""
        taken, first = tapped(self._session, tap, forward), tap.names[0]
        inputs = tap.inputs

        def run(*args: Any, **kwargs: Any) -> Any:
            prompt = self._prompt
            if self._inside or prompt is None or self._session.state is None:
                return taken(*args, **kwargs)
            number = self._seen[first]
            self._seen[first] += 1
            if number < prompt.finished[first]:
                return forward(*args, **kwargs)
            self._check_read((args, kwargs), first)
            if first in prompt.begun and not prompt.finished[first]:
                tap.inputs = _no_inputs  # type: ignore[assignment]
            prompt.begun.add(first)
            try:
                result = taken(*args, **kwargs)
            finally:
                tap.inputs = inputs
            prompt.finished[first] += 1
            return result

        run.__accprobe__ = tap  # type: ignore[attr-defined]
        return run

    def _flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._prompt is not None
        return self._prompt.rows.flatten(tensor)

    def _space(self, part: str, rows: int) -> Space | None:
        prompt = self._prompt
        assert prompt is not None
        space = prompt.rows.space(part, rows)
        if space is not None and space.name in prompt.known and prompt.state is not None:
            space.announced = True
            self._session.know(prompt.state, space)
        return space

    # Blocks, one after the other.

    def _load(self, path: str) -> None:
        if self._loaded == path:
            return
        if self._loaded:
            raise CommandError(f"{path} runs where {self._loaded} ran for the first prompt: it cannot be streamed")
        block, tied, streamed_ = self._blocks.modules[path], self._tied, self._blocks.streamed.get(path, ())
        self._loaded = path
        self._meta = dict(block.named_parameters(prefix=path, remove_duplicate=False))
        by_rows = self._blocks.by_rows.get(path, "")
        found = self._files.read(self._files.sources(path, (*streamed_, by_rows)))
        for name in self._meta:
            if name == by_rows:
                key = self._files.plain(name) or self._files.plain(tied[name])
                block.__dict__["weight"] = StreamedRows(self._files, name, key, self._meta[name].shape, self._dtype)
                self._session.sink.skip(path, "read by rows: no fingerprint", "param.weight")
            elif name in streamed_:
                holder, _, leaf = name.rpartition(".")
                parameter = self._meta[name]
                module = self._model.get_submodule(holder)
                module.__dict__[leaf] = StreamedExperts(self._files, name, parameter.shape, self._dtype)
                self._session.sink.skip(holder, "read expert by expert: no fingerprint", f"param.{leaf}")
            elif name not in found and name in tied:
                found[name] = self._files.read(self._files.of(tied[name]))[tied[name]]
            elif name not in found:
                raise CommandError(f"{name} is not in the files of {self._folder}: the checkpoint is of another model")
        assign(self._model, found)
        for name, module in block.named_modules(prefix=path):
            if not any(f"{name}.{leaf}" in tied for leaf in module._parameters):
                self._parameters.layer(name, module)

    def _free(self) -> None:
        for name, parameter in self._meta.items():
            holder, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(holder)
            module.__dict__.pop(leaf, None)
            module._parameters[leaf] = parameter
        self._loaded, self._meta = "", {}

    def through(self, progress: Callable[[str], None]) -> StreamSummary:
        """Computes all blocks that are left and ends the dump. Raises CommandError, OSError."""
        began, resumed, total = time.monotonic(), len(self._order), len(self._blocks.modules)
        layer_seconds, layer_bytes, sink = [0.0], 0, self._session.sink
        if resumed:
            progress(f"continues after block {resumed} of {total}, {self._order[-1]}")
        while not self._complete:
            start, read, written = time.monotonic(), self._files.read_bytes, self._payload
            replies = []
            for number in range(len(self._ids)):
                if number == len(self._prompts):
                    self._prompts.append(_Prompt(self._rows_of(number)))
                prompt = self._prompts[number]
                outputs = self._pass(prompt, prompt.rows.length - prompt.rows.first)
                self._check_stopped()
                if not self._loaded:
                    raise CommandError(f"{type(self._model).__name__} called no further block for prompt {number}")
                self._complete = outputs is not None
                if self._complete:
                    replies.append(self._scored(prompt, outputs))
            path = self._loaded
            self._free()
            self._order.append(path)
            if self._complete:
                self._answer(replies)
            self._save()
            seconds, read = time.monotonic() - start, self._files.read_bytes - read
            line = f"block {len(self._order)} of {total}, {path}: {seconds:.1f} s, {_gb(read)} read"
            line += f", peak memory {_gb(_peak())}"
            if path in self._blocks.layers:
                layer_seconds.append(seconds)
                layer_bytes = self._payload - written
            left = sum(other not in self._order for other in self._blocks.layers)
            if left and layer_bytes:
                rest = left * sum(layer_seconds) / max(len(layer_seconds) - 1, 1)
                line += f"; {_duration(rest)} and {_gb(left * layer_bytes)} of disk are left"
                self._check_disk(left * layer_bytes)
            progress(line)
        for tap, why in self._taps.never_fired():
            sink.skip(tap, why)
        self.close("closed")
        shutil.rmtree(self._folder_of_state)
        return StreamSummary(
            total, resumed, time.monotonic() - began, self._files.read_bytes, _peak(), sink.tensors, self._payload
        )  # fmt: skip

    def close(self, reason: str) -> None:
        """Ends the dump, if it was begun. Safe to call twice."""
        if self._recording is not None:
            self._recording.close(reason)

    # Log-probabilities.

    def _scored(self, prompt: _Prompt, outputs: Any) -> dict[str, Any]:
        """`TOP` and the next token's log-probability at each position, in the words of a Reply."""
        ids, first = self._ids[prompt.rows.number], prompt.rows.first
        logits = getattr(outputs, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            return {}
        parts = [(logits.shape[1], logits)] if not self._chunked else [(len(ids) - first, logits)]
        at = len(ids) - parts[0][0]
        chosen: list[float] = []
        tops: list[tuple[list[int], list[float]]] = []
        for begin in range(0, at, self._chunk):
            stop = min(begin + self._chunk, at)
            rows = self._pass(prompt, torch.arange(begin, stop), capture=False).logits
            self._add(rows, ids[begin + 1 : stop + 1], chosen, tops)
        self._add(logits, ids[at + 1 :], chosen, tops)
        return {"prompt_token_ids": ids[:1], "token_ids": ids[1:], "logprobs": chosen, "top": tops}

    def _add(
        self, logits: torch.Tensor, following: list[int], chosen: list[float], tops: list[tuple[list[int], list[float]]]
    ) -> None:
        values = torch.log_softmax(logits[0, : len(following)].float(), -1)
        best = values.topk(min(TOP, values.shape[-1]))
        for k, token in enumerate(following):
            value = float(values[k, token])
            pairs = dict(zip(best.indices[k].tolist(), best.values[k].tolist(), strict=True)) | {token: value}
            ranked = sorted(pairs, key=lambda i: (-pairs[i], i))
            tops.append((ranked, [pairs[i] for i in ranked]))
            chosen.append(value)

    def _answer(self, scored: list[dict[str, Any]]) -> None:
        from vllm_accprobe.gate.sending import replies
        from vllm_accprobe.gate.sending.client import SCORED, Reply

        folder = self._out / ANSWERS
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed here
        lines = [json.dumps({"id": name, "token_ids": ids}) for name, ids in zip(self.names, self._ids, strict=True)]
        passes = [{"arrive": "score", "answered": len(scored), "refused": 0, "resumed": 0, "forced": SCORED}]
        about = {"schema": replies.SCHEMA, "accprobe": __version__, "server": {"model": str(self._folder)}}
        settings = {"top": TOP, "arrive": ["score"]}
        about |= {"settings": settings, "passes": passes, "complete": True}
        replies.begin(folder, "\n".join(lines) + "\n", about)
        writer = replies.ReplyWriter(folder / replies.pass_name(0))
        for name, values in zip(self.names, scored, strict=True):
            top = values.get("top") or []
            margins = [round(v[0] - v[1], 6) for _, v in top]
            writer.add(Reply(name, 0.0, 0.0, **values, margins=margins, finish="length", forced=SCORED))
        writer.close()

    # What a later process needs.

    def _stopped(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _check_stopped(self) -> None:
        session = getattr(self, "_session", None)
        reason = self._stop_reason or (session.dead if session is not None else None)
        if reason:
            raise CommandError(f"{self._out}: {reason}; the same command continues after block {len(self._order)}")

    def _identity(self) -> dict[str, str]:
        import transformers

        counted = [n for prompt in self._ids for n in (len(prompt), *prompt)]
        wanted = None if self._wanted is None else [sorted(rows) for rows in self._wanted]
        return {
            "checkpoint": identity(self._folder, shards_of(self._folder)),
            "prompts": hash_tokens([*counted, *self._lengths]),
            "settings": json.dumps([str(self._dtype), self._config.modules, self._config.parts, wanted]),
            "versions": f"accprobe {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        }

    def _save(self) -> None:
        """Makes the dump whole on disk, and what a later process needs after it. Raises CommandError, OSError."""
        files = self._session.sink.writer.checkpoint(_FLUSH_S)
        if files is None:
            self._check_stopped()
            raise CommandError(f"{self._out}: the disk did not take the dump; the same command continues")
        self._payload = files.payload
        tensors: dict[str, torch.Tensor] = {}
        prompts = []
        for prompt in self._prompts:
            state = prompt.state
            assert state is not None
            prompts.append({
                "calls": state.calls, "seq": state.seq, "known": [k for k, form in state.forms.items() if k],
                "begun": sorted(prompt.begun), "finished": prompt.finished,
                "kept": {str(k): _packed(v, tensors) for k, v in prompt.kept.items()},
                "last": _packed(prompt.last, tensors),
                "left": {str(k): _packed(v, tensors) for k, v in prompt.left.items()},
            })  # fmt: skip
        sink = self._session.sink
        saved = {
            "schema": _SCHEMA, "identity": self._identity(), "larger": self._larger, "files": dataclasses.asdict(files),
            "order": self._order, "complete": self._complete, "prompts": prompts, "fired": sorted(self._session.fired),
            "tensors": sink.tensors, "steps": sink.steps, "skipped": [[*key, n] for key, n in sink.skipped.items()],
        }  # fmt: skip
        with whole(self._folder_of_state / _STATE) as part:
            save_file(tensors, part, {"accprobe": json.dumps(saved)})
            part.chmod(0o600)

    def _read_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        path = self._folder_of_state / _STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                saved = json.loads(file.metadata()["accprobe"])
                if saved["schema"] != _SCHEMA:
                    raise ValueError
                was, now = saved["identity"], self._identity()
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as e:
            raise CommandError(f"{path} cannot be used ({e}): remove {self._folder_of_state} and {self._out}") from None
        if other := [name for name in now if was.get(name) != now[name]]:
            raise CommandError(
                f"{self._out} was begun with other {' and '.join(other)}: name another directory, or remove it and "
                f"{self._folder_of_state}"
            )
        return saved, tensors

    def _restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self._order, self._complete = saved["order"], saved["complete"]
        self._payload = saved["files"]["payload"]
        sink = self._session.sink
        sink.tensors, sink.steps, self._session.fired = saved["tensors"], saved["steps"], set(saved["fired"])
        sink.skipped = Counter({(tap, role, why): n for tap, role, why, n in saved["skipped"]})
        for number, one in enumerate(saved["prompts"]):
            state = StepState(number, True)
            state.calls, state.seq = one["calls"], one["seq"]
            kept = {int(k): _unpacked(v, tensors) for k, v in one["kept"].items()}
            left = {int(k): _unpacked(v, tensors) for k, v in one["left"].items()}
            last, finished = _unpacked(one["last"], tensors), Counter(one["finished"])
            self._prompts.append(_Prompt(self._rows_of(number), state, kept, last, left, set(one["begun"]), finished,
                                         frozenset(one["known"])))  # fmt: skip


def _drop(*_: Any) -> None:
    """Takes the place of what writes a line."""


def _no_inputs(args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    return []


def _is_head(path: str) -> bool:
    return path.rpartition(".")[2] == "lm_head"


def _copied(value: Any, kind: type[torch.Tensor] = torch.Tensor) -> Any:
    """A copy whose tensors are of that kind."""
    if isinstance(value, torch.Tensor):
        return value.clone().as_subclass(kind)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item, kind) for item in value)
    return value


def _holds_gone(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_holds_gone, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _Gone)


def _packed(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` in JSON's words, its tensors by their names in ``tensors``. Raises CommandError."""
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise CommandError(f"a block gives a {type(value).__name__}, which cannot be saved: the model cannot be streamed")


def _unpacked(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "value":
        return inner
    items: Iterable[Any] = (_unpacked(item, tensors) for item in inner)
    return list(items) if kind == "list" else tuple(items)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 5e7 else f"{nbytes / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _peak() -> int:
    """Largest resident memory of this process, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
