"""The rows of the running step, in the order in which vLLM's runner computes them, and what masks their logits.

The problem: which request a row belongs to is decided when the runner prepares its inputs; V1 keeps it in its input
batch, V2 in a local of execute_model, and the scheduler's output has another order. With ``--mm-encoder-tp-mode data``
every rank encodes some of a step's images, and the tensors do not say which. A grammar that forbids tokens looks like a
wrong sampler. The idea: keep the scheduler's output and ask the runner only when a tap fires; its answer must add up to
what was scheduled. vLLM runs a distributed encoder in functions of its own, ``run_dp_sharded_*``, which pick images by
plain arithmetic; the same arithmetic, while such a call runs, says what this rank has. What masks a request's logits
stands in the runner's bookkeeping, and is read just before sampling.

Not here: other releases' names (vllm_compat.py), arithmetic on rows (core/rows.py), taking logits (sampling.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import xxhash

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.rows import (
    EncoderDataParallel,
    EncoderItem,
    ItemRun,
    Requests,
    Scheduled,
    Space,
    logits_space,
    share_space,
    token_space,
    vision_space,
)
from vllm_accprobe.capture.core.session import HEAD, VISION
from vllm_accprobe.capture.vllm.names_by_release import unsampled
from vllm_accprobe.capture.vllm.vllm_compat import (
    device_buffer,
    guesses,
    placeholders,
    positions_of,
    prefill_lengths,
    starts,
)
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    BUDGET,
    GRAMMAR,
    LOGITS,
    MIN_TOKENS,
    PENALTIES,
    TRACE,
    Mask,
)

Grammar = dict[str, "str | None"]
"""Engine's id of a request that a grammar constrains → hash of its row of the bitmask, or None where there are several.
The same hash means that the same tokens were allowed."""


def processor(obj: Any) -> str:
    """The word for a logits processor of other code, which may touch any row."""
    return f"logits processor {type(obj).__name__}"


def grammar_of(args: Iterable[Any]) -> Grammar:
    """The requests that a grammar constrains, of a call's arguments or of a scheduler's output: they stand in an object
    with ``structured_output_request_ids`` (a list, in 0.11 a dict) and a ``grammar_bitmask`` of int32 [rows, words]."""
    for value in args:
        names, mask = getattr(value, "structured_output_request_ids", None), getattr(value, "grammar_bitmask", None)
        if names and mask is not None:
            if not isinstance(names, list) or len(names) != len(mask):  # drafts: several rows for one
                return dict.fromkeys(names)
            return {name: xxhash.xxh3_128_hexdigest(mask[i].tobytes()) for i, name in enumerate(names)}
    return {}


def masks_of(runner: Any, prepared: Any, names: Sequence[str], grammar: Grammar) -> dict[str, tuple[str, ...]]:
    """By engine's id of a request: what changes its logits in this step, sorted. Requests with nothing are left out.

    prepared: V2's batch of the step, None for V1. names: the batch's requests in row order.
    """
    found: dict[str, set[str]] = {name: {GRAMMAR} for name in names if name in grammar}
    if prepared is None:
        _of_input_batch(getattr(runner, "input_batch", None), names, found)
    else:
        _of_states(getattr(runner, "sampler", None), prepared, names, found)
    return {name: tuple(sorted(by)) for name, by in found.items()}


def reports_masks(runner: Any) -> bool:
    """Whether `masks_of` sees all that this runner has: V2 of 0.13 and 0.14 keeps penalties and biases in tensors of
    the step only, where no entry does not mean no mask."""
    if not hasattr(runner, "prepare_inputs"):
        return getattr(getattr(runner, "input_batch", None), "sampling_metadata", None) is not None
    sampler = getattr(runner, "sampler", None)
    biases = any(hasattr(sampler, name) for name in ("logit_bias_state", "logits_processors"))
    return hasattr(sampler, "penalties_state") and biases


_Found = dict[str, set[str]]


def _of_input_batch(batch: Any, names: Sequence[str], found: _Found) -> None:
    """V1: sets of ids and dicts by row."""
    metadata = getattr(batch, "sampling_metadata", None)
    if metadata is None:
        return
    _ids(found, ALLOWED, getattr(batch, "has_allowed_token_ids", ()), names)
    for which in ("frequency", "presence", "repetition"):
        _ids(found, PENALTIES, getattr(batch, f"{which}_penalties_reqs", ()), names)
    _places(found, BAD_WORDS, getattr(metadata, "bad_words_token_ids", None) or (), names)
    for one in getattr(getattr(metadata, "logitsprocs", None), "non_argmax_invariant", ()):
        kind = type(one).__name__
        if kind == "MinTokensLogitsProcessor":
            _places(found, MIN_TOKENS, getattr(one, "min_toks", ()), names)
        elif kind == "LogitBiasLogitsProcessor":
            _places(found, BIAS, getattr(one, "biases", ()), names)
        else:
            _ids(found, processor(one), names, names)
    holder = getattr(metadata, "thinking_budget_state_holder", None)
    if holder is not None and holder.has_tracked_requests():
        _ids(found, BUDGET, names, names)


_OF_STATES = (
    ("num_allowed_token_ids", ALLOWED),
    ("num_logit_bias", BIAS),
    ("num_stop_token_ids", MIN_TOKENS),
    ("num_bad_words", BAD_WORDS),
    ("use_penalty", PENALTIES),
)
"""V2: arrays with a place for each request's state, and what a number there means."""


def _of_states(sampler: Any, prepared: Any, names: Sequence[str], found: _Found) -> None:
    """V2: arrays by request state, in the sampler's own objects, or (later releases) in a list of processors."""
    where = getattr(prepared, "idx_mapping_np", None)
    if sampler is None or where is None:
        return
    own = [getattr(sampler, name, None) for name in ("logit_bias_state", "penalties_state", "bad_words_state")]
    every = [o for o in (*own, *(getattr(sampler, "logits_processors", None) or ())) if o is not None]
    for one in {id(o): o for o in every}.values():
        arrays = [(_array(getattr(one, name)), word) for name, word in _OF_STATES if hasattr(one, name)]
        if not arrays:
            _ids(found, processor(one), names, names)
        for array, word in arrays:
            _ids(found, word, [name for name, at in zip(names, where, strict=False) if array[at]], names)
    if getattr(sampler, "trace_replay_state", None) is not None:
        _ids(found, TRACE, names, names)


def _array(value: Any) -> Any:
    """The host's side of a pair of buffers, or an array."""
    return getattr(value, "np", value)


def _ids(found: _Found, word: str, ids: Iterable[str], names: Sequence[str]) -> None:
    if ids:
        known = set(names)
        for name in ids:
            if name in known:
                found.setdefault(name, set()).add(word)


def _places(found: _Found, word: str, places: Iterable[int], names: Sequence[str]) -> None:
    for at in places:
        if 0 <= at < len(names):
            found.setdefault(names[at], set()).add(word)


class EngineBatch:
    """The batch of one worker's current step, the same for all who observe it. runner: vLLM's, of either generation."""

    def __init__(self, runner: Any):
        self._runner = runner
        self.guesses = guesses(getattr(runner, "vllm_config", None))
        self._scheduled: Any = None
        self._prepared: Any = None
        self._rows: list[Scheduled] | None = None
        self._items: list[EncoderItem] = []
        self._taken = 0
        self._shares = 0
        self._usual_share: EncoderDataParallel | None = None
        self._reported = False
        self.share: EncoderDataParallel | None = None
        """What this rank's encoder computes at the moment, where images are distributed to ranks."""

    def begin(self, out: Any) -> None:
        """A step begins with the scheduler's output ``out``; what was known of the last one is forgotten."""
        self._scheduled = out
        self._prepared = self._rows = None
        self._items = []
        self.share = self._usual_share
        self._taken = self._shares = 0

    def revised(self, out: Any) -> None:
        """What the runner makes of the scheduler's output, where it works with a copy of its own."""
        if self._scheduled is not None and out is not self._scheduled:
            self._scheduled = out
            self._rows = None

    def prepared(self, batch: Any) -> None:
        """V2's own batch of this step, whose rows are in the order of computation."""
        self._prepared = batch

    def rows(self) -> list[Scheduled]:
        """The requests in row order. Valid once the runner has prepared its inputs, that is when a tap fires.

        Raises:
            RuntimeError: the runner's rows are not as many as the scheduler's.
        """
        if self._rows is None:
            out, v2 = self._scheduled, self._prepared
            drafts = {
                name: len(ids) for name, ids in (getattr(out, "scheduled_spec_decode_tokens", None) or {}).items()
            }
            if v2 is not None:
                names = list(v2.req_ids)
                known = dict(zip(names, prefill_lengths(self._runner, v2), strict=True))
                counts = [int(n) for n in v2.num_scheduled_tokens[: len(names)]]
                rows = int(v2.num_tokens)
            else:
                names = list(self._runner.input_batch.req_ids)
                states = self._runner.requests
                known = {name: int(states[name].num_tokens) for name in names if name in states}
                counts = [int(out.num_scheduled_tokens[name]) for name in names]
                rows = sum(counts)
            if not rows == sum(counts) == int(out.total_num_scheduled_tokens):
                raise RuntimeError(
                    f"rows do not add up: the runner has {rows} rows for {names}, "
                    f"the scheduler {out.total_num_scheduled_tokens}"
                )
            before = starts(out)
            strange = [name for name in names if name not in before]
            if strange:
                raise RuntimeError(f"the scheduler does not say where {', '.join(strange)} begins")
            self._rows = [
                Scheduled(name, before[name], n, drafts.get(name, 0), known.get(name))
                for name, n in zip(names, counts, strict=True)
            ]
        return self._rows

    @property
    def unsampled(self) -> str:
        """Why rows of the logits are not those of the batch, "" where they are."""
        return unsampled(self._runner)

    @property
    def total(self) -> int:
        """How many rows were scheduled; 0 outside a step."""
        return int(getattr(self._scheduled, "total_num_scheduled_tokens", 0) or 0)

    @property
    def padded(self) -> int:
        """How many rows the runner computes, where it says so (V2); else 0."""
        return int(getattr(self._prepared, "num_tokens_after_padding", 0) or 0)

    def begin_share(self, runs: Callable[[list[EncoderItem]], tuple[int, tuple[ItemRun, ...]] | None]) -> None:
        """The encoder begins with images that are distributed. runs: gets the items that no call has taken yet; how
        many this one takes, and what of them is this rank's. Never raises: what is not known has rows without names."""
        if self._scheduled is None:
            return
        self._shares += 1
        found, why = None, "the function is not one of vLLM's, or its images are others"
        try:
            found = runs(self.items()[self._taken :])
        except Exception as error:  # an older or a vendor's way
            why = f"{type(error).__name__}: {error}"
        if found is None:
            self._unknown(why)
        self._taken += sys.maxsize if found is None else found[0]  # after an unknown call: none either
        self.share = EncoderDataParallel(self._shares, None if found is None else found[1])

    def end_share(self) -> None:
        """The encoder has ended, and every rank has what all have computed."""
        self.share = self._usual_share

    def no_known_shares(self) -> None:
        """Images are distributed, and no call shows when: no row of an encoder is known."""
        self.share = self._usual_share = EncoderDataParallel(0, None)
        self._unknown("no function of vLLM's that deals was found")

    def _unknown(self, why: str) -> None:
        if not self._reported:
            self._reported = True
            known = "images are dealt out to ranks in a way that is not known"
            say(f"{known} ({why}): rows of the encoder are not distinguished")

    def buffers(self, n: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The runner's own buffers of token ids and positions of the first ``n`` rows: integers of shape [n], on the
        runner's device or in host memory. (What the positions may say is limited by core/rows.py.)"""
        source = self._prepared if self._prepared is not None else self._runner
        ids = device_buffer(getattr(source, "input_ids", None))
        positions = positions_of(source)
        return (ids[:n] if ids is not None else None), (positions[:n] if positions is not None else None)

    def masked(self, grammar: Grammar) -> dict[str, Mask]:
        """By request, in the order of the rows: what masks its logits in this step. grammar: those that a grammar
        constrains, where the sampler got them."""
        names = [part.internal for part in self.rows()]
        grammar = grammar or grammar_of([self._scheduled])
        found = masks_of(self._runner, self._prepared, names, grammar)
        return {name: Mask(found[name], grammar.get(name)) for name in names if name in found}

    def items(self) -> list[EncoderItem]:
        """The encoder's inputs of this step in the order in which the runner batches them."""
        if not self._items:
            scheduled = getattr(self._scheduled, "scheduled_encoder_inputs", None) or {}
            for name, indices in scheduled.items():
                features = self._features(name)
                for index in indices:
                    feature = features[index]
                    if getattr(feature, "data", True) is not None:
                        self._items.append(
                            EncoderItem(name, index, str(getattr(feature, "modality", "image")), placeholders(feature))
                        )
            self._items.sort(key=lambda item: item.modality)
        return self._items

    def _features(self, name: str) -> Any:
        states = getattr(self._runner, "requests", None)
        if isinstance(states, dict) and name in states:
            return states[name].mm_features
        cache = getattr(self._runner, "encoder_cache", None)  # V2 keeps them here
        features = getattr(cache, "mm_features", None)
        if isinstance(features, dict) and name in features:
            return features[name]
        return next(new.mm_features for new in self._scheduled.scheduled_new_reqs if new.req_id == name)


class ChosenRows:
    """The rows of ``batch`` as one of its observers has them.

    config: which requests and tokens are wanted. requests: those that the observer remembers.
    """

    def __init__(self, batch: EngineBatch, config: ProbeConfig, requests: Requests):
        self.batch = batch
        self._config = config
        self._requests = requests

    def aim(self, config: ProbeConfig) -> None:
        """Other settings choose tokens from now on."""
        self._config = config

    def space(self, part: str, rows: int) -> Space | None:
        """The row space of a tensor with ``rows`` rows in ``part`` of the model (session.py's words for parts)."""
        batch, share = self.batch.rows(), self.batch.share
        if part == VISION and share is not None:
            return share_space(self._config, self._requests, share, rows)
        if part == VISION:
            return self.images(self.batch.items(), rows)
        if part == HEAD:
            return self.logits(batch, rows)
        space = self.tokens(batch, max(self.batch.padded, rows if rows > 1 else 0))
        space.ids, space.positions = self.batch.buffers(space.src)
        return space

    def images(self, items: list[EncoderItem], rows: int) -> Space | None:
        """Rows of the encoder's ``items``; None where ``rows`` of them cannot be distinguished."""
        return vision_space(self._config, self._requests, items, rows)

    def logits(self, batch: list[Scheduled], rows: int = 0) -> Space:
        """Rows of the logits of ``batch``, which may be an earlier step's; of ``rows`` rows none is anybody's where a
        mode of the runner gives them another order."""
        if self.batch.unsampled:
            return Space(LOGITS, rows, rows, [], [])
        space = logits_space(self._config, self._requests, batch)
        space.floors = self._floors(batch)
        return space

    def tokens(self, batch: list[Scheduled], padded: int) -> Space:
        """Rows of the tokens of ``batch``, which may be an earlier step's, without what only the device knows."""
        space = token_space(self._config, self._requests, batch, padded)
        space.floors = self._floors(batch)
        return space

    def masks(self, grammar: Grammar) -> dict[int, Mask]:
        """Which of the chosen requests, by number, have their logits masked in this step, and by what."""
        return {
            request.req: mask
            for name, mask in self.batch.masked(grammar).items()
            if (request := self._requests.get(name)) is not None and self._requests.wanted(name)
        }

    def processed(self) -> bool:
        """Whether one of the chosen requests of this step asks for something that changes its logits."""
        found = (self._requests.get(part.internal) for part in self.batch.rows())
        return any(r is not None and r.sampling is not None and bool(r.sampling.processors) for r in found)

    def _floors(self, batch: list[Scheduled]) -> dict[int, int]:
        """How far back a request's rows may be corrected: to the end of its prompt, and only where there are drafts."""
        if not self.batch.guesses:
            return {}
        found = (self._requests.get(part.internal) for part in batch)
        return {request.req: request.prompt_len for request in found if request is not None}


_NAME = "run_dp_sharded_"
_BY_SIZE, _BY_TILE = _NAME + "mrope_vision_model", _NAME + "vision_model"


def distributes_encoder(vllm_config: Any) -> bool:
    """Whether the engine distributes the encoder's inputs. Models that cannot do so split weights instead."""
    config = getattr(getattr(vllm_config, "model_config", None), "multimodal_config", None)
    mode = getattr(config, "mm_encoder_tp_mode", None)
    return mode == "data" and int(getattr(vllm_config.parallel_config, "tensor_parallel_size", 1) or 1) > 1


class EncoderDistribution:
    """Wraps the functions that distribute, wherever vLLM's modules hold them, until ``close``.

    batch: gets what its rank computes. seen: functions that were found.
    """

    def __init__(self, batch: EngineBatch):
        self._batch = batch
        self._undo = ExitStack()
        self.close = self._undo.close
        """Puts the functions back."""
        self.seen: set[str] = set()
        wrapped: dict[int, Callable[..., Any]] = {}
        for path, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if not path.startswith("vllm") or not isinstance(names, dict):
                continue
            for name in [n for n in names if n.startswith(_NAME)]:
                original = names[name]
                if callable(original):
                    self._put(names, name, wrapped.setdefault(id(original), self._counting(name, original)))

    def _put(self, names: dict[str, Any], name: str, wrapped: Callable[..., Any]) -> None:
        self.seen.add(name)
        before = names[name]
        names[name] = wrapped

        def undo() -> None:
            if names.get(name) is wrapped:  # else somebody wrapped it after us
                names[name] = before

        self._undo.callback(undo)

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        batch = self._batch

        def begin_share(*args: Any, **kwargs: Any) -> Any:
            try:
                batch.begin_share(lambda items: self._runs(name, original, items, args, kwargs))
                return original(*args, **kwargs)
            finally:
                batch.end_share()

        return begin_share

    def _runs(
        self, name: str, original: Any, items: list[EncoderItem], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, tuple[ItemRun, ...]] | None:
        """(how many of the waiting ``items`` this call takes, what this rank computes of them); None: not known."""
        world = getattr(original, "__globals__", {})
        if name == _BY_SIZE and len(args) >= 3:
            return by_size(items, [math.prod(map(int, grid)) for grid in args[2]], world)
        if name == _BY_TILE and args:
            return by_tile(items, int(args[0].shape[0]), *_place(world))
        return None


def _place(world: dict[str, Any]) -> tuple[int, int]:
    """(this rank, ranks) of the group that images are distributed to, as the distributing function asks for them."""
    rank, size = (world[f"get_tensor_model_parallel_{what}"]() for what in ("rank", "world_size"))
    return int(rank), int(size)


def by_size(
    items: list[EncoderItem], sizes: list[int], world: dict[str, Any]
) -> tuple[int, tuple[ItemRun, ...]] | None:
    """Whole images, by vLLM's own get_load_balance_assignment. sizes: patches of each image of the call."""
    mine = items[: len(sizes)]
    if len(mine) != len(sizes) or not all(
        size * mine[0].placeholders == sizes[0] * item.placeholders for size, item in zip(sizes, mine, strict=True)
    ):
        return None  # other images than these, or pruned ones
    rank, ranks = _place(world)
    order, counts, _ = world["get_load_balance_assignment"](sizes, ranks)
    start = sum(counts[:rank])
    return len(mine), tuple(ItemRun(mine[i], 0, mine[i].placeholders) for i in order[start : start + counts[rank]])


def by_tile(items: list[EncoderItem], tiles: int, rank: int, ranks: int) -> tuple[int, tuple[ItemRun, ...]] | None:
    """Equal stretches of all tiles, the last ones padded. An image is one tile or several, of equally many
    placeholders each."""
    total = sum(item.placeholders for item in items)
    if not tiles or not total or total % tiles or any(item.placeholders % (total // tiles) for item in items):
        return None
    width = total // tiles
    begin = rank * -(-tiles // ranks) * width
    end = begin + -(-tiles // ranks) * width
    runs, at = [], 0
    for item in items:
        first, stop = max(begin - at, 0), min(end - at, item.placeholders)
        if first < stop:
            runs.append(ItemRun(item, first, stop - first))
        at += item.placeholders
    if end > max(total, begin):
        runs.append(ItemRun(None, 0, end - max(total, begin)))
    return len(items), tuple(runs)
