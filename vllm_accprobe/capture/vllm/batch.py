"""The rows of the step that runs, in the order in which vLLM's runner computes them.

The problem: which request a row belongs to is decided by the runner when it prepares its inputs; V1 keeps the answer
in its input batch, V2 in a local of execute_model, and the scheduler's output has other orders. The idea: hold the
scheduler's output, and ask the runner only when a tap fires; its answer must add up to what was scheduled, or it is an
error that is said. Not here: which steps are wanted (runner.py), what other releases call things (vllm_compat.py),
arithmetic on rows (rows.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.rows import (
    LOGITS,
    Deal,
    EncoderItem,
    ItemRun,
    Requests,
    Scheduled,
    Space,
    dealt_space,
    logits_space,
    token_space,
    vision_space,
)
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import HEAD, VISION
from vllm_accprobe.capture.vllm.masks import Grammar, grammar_of, masks_of
from vllm_accprobe.capture.vllm.names.modes import unsampled
from vllm_accprobe.capture.vllm.vllm_compat import (
    device_buffer,
    guesses,
    placeholders,
    positions_of,
    prefill_lengths,
    starts,
)
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import Mask


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
        self._deals = 0
        self._usual: Deal | None = None
        self._said = False
        self.deal: Deal | None = None
        """What this rank's encoder computes at the moment, where images are dealt out to ranks."""

    def begin(self, out: Any) -> None:
        """A step begins with the scheduler's output ``out``; what was known of the last one is forgotten."""
        self._scheduled = out
        self._prepared = self._rows = None
        self._items = []
        self.deal = self._usual
        self._taken = self._deals = 0

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

    def dealt(self, runs: Callable[[list[EncoderItem]], tuple[int, tuple[ItemRun, ...]] | None]) -> None:
        """The encoder begins with images that are dealt out. runs: gets the items that no call has taken yet; how many
        this one takes, and what of them is this rank's. Never raises: what cannot be told has rows without names."""
        if self._scheduled is None:
            return
        self._deals += 1
        found, why = None, "the function is not one of vLLM's, or its images are others"
        try:
            found = runs(self.items()[self._taken :])
        except Exception as error:  # an older or a vendor's way to deal
            why = f"{type(error).__name__}: {error}"
        if found is None:
            self._unknown(why)
        self._taken += sys.maxsize if found is None else found[0]  # after a call that nobody knows: none either
        self.deal = Deal(self._deals, None if found is None else found[1])

    def gathered(self) -> None:
        """The encoder has ended, and every rank has what all have computed."""
        self.deal = self._usual

    def blind(self) -> None:
        """Images are dealt out, and nobody will say when: no row of an encoder can be told."""
        self.deal = self._usual = Deal(0, None)
        self._unknown("no function of vLLM's that deals was found")

    def _unknown(self, why: str) -> None:
        if not self._said:
            self._said = True
            known = "images are dealt out to ranks in a way that is not known"
            say(f"{known} ({why}): rows of the encoder are not told apart")

    def buffers(self, n: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The runner's own buffers of token ids and positions of the first ``n`` rows: integers of shape [n], on the
        runner's device or in host memory. (What the positions may say is limited by rowmaps.py.)"""
        source = self._prepared if self._prepared is not None else self._runner
        ids = device_buffer(getattr(source, "input_ids", None))
        positions = positions_of(source)
        return (ids[:n] if ids is not None else None), (positions[:n] if positions is not None else None)

    def masked(self, grammar: Grammar) -> dict[str, Mask]:
        """By request, in the order of the rows: what masks its logits in this step. grammar: those that a grammar
        constrains, where somebody was told."""
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
        batch, deal = self.batch.rows(), self.batch.deal
        if part == VISION and deal is not None:
            return dealt_space(self._config, self._requests, deal, rows)
        if part == VISION:
            return self.images(self.batch.items(), rows)
        if part == HEAD:
            return self.logits(batch, rows)
        space = self.tokens(batch, max(self.batch.padded, rows if rows > 1 else 0))
        space.ids, space.positions = self.batch.buffers(space.src)
        return space

    def images(self, items: list[EncoderItem], rows: int) -> Space | None:
        """Rows of the encoder's ``items``; None where ``rows`` of them cannot be told apart."""
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
