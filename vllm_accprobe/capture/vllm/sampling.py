"""What was sampled: token ids, the best logits, and what each request asks of the sampler.

The problem: a flipped token is an error only if its margin was wide, and whether it is right depends on temperature,
filters, seed, penalties and word lists, which a batch that mixes two requests up has wrong in its own tensors. The
idea: ``compute_logits`` gives the best ids and values on the device, before penalties and grammars change them in
place; the runner's sampling method gives the tokens. They are records of a tap ``sampler``, with the settings as the
runner has them by row. A request's own parameters are copied from the scheduler's output before the runner reads them;
what is cut is named, and is in the digest. Where anything masks logits the journal says so by request, and the best
logits that are left are taken too. Tokens that a client names come in ``vllm_xargs`` as one string: 0.11 takes no lists
there.

Not here: what masks logits (batch.py), putting named tokens in place (teacher_forcing.py), what a flip means (judge).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.attribute_override import wrap_method
from vllm_accprobe.capture.core.session import HEAD, Session, Sites
from vllm_accprobe.capture.taps.hooks import chooses
from vllm_accprobe.capture.vllm.batch import ChosenRows, Grammar, grammar_of, reports_masks
from vllm_accprobe.capture.vllm.names_by_release import unsampled
from vllm_accprobe.dump.journal import MASKS
from vllm_accprobe.dump.schema import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    BUDGET,
    EXPONENTIAL,
    FILTERED,
    GRAMMAR,
    GUMBEL,
    MASKS_KNOWN,
    MIN_TOKENS,
    NAMED_TOKENS,
    NOISE,
    NOISE_DRAWS,
    SCALED,
    TRACE,
    WATERMARK,
    Masks,
    Module,
    SamplingParameters,
)

KEY = "accprobe_along"
"""Of ``vllm_xargs``: token ids in decimal with a blank between two, the first generated token first. The client has
the same word (gate/sending/client.py)."""
_NUMBERS = re.compile(r"\d{1,9}(?: \d{1,9})*")


@dataclass(frozen=True)
class NamedTokens:
    """prompt: tokens of the prompt; ids: of the answer, from its first token on; largest of ids."""

    prompt: int
    ids: tuple[int, ...]
    largest: int

    def at(self, computed: int) -> int:
        """The token that follows the first ``computed`` ones; -1 where none is named: in the prompt, or after the
        last one."""
        k = computed - self.prompt
        return self.ids[k] if 0 <= k < len(self.ids) else -1


def named_tokens(extra: Mapping[str, Any] | None, prompt: int) -> NamedTokens | None:
    """Of a request's extra_args; None where it asks for nothing. Raises ValueError, which quotes nothing."""
    text = (extra or {}).get(KEY)
    if text is None:
        return None
    if not isinstance(text, str) or not _NUMBERS.fullmatch(text):
        raise ValueError(f"{KEY} is not a text of token ids with a blank between two")
    ids = tuple(map(int, text.split(" ")))
    return NamedTokens(prompt, ids, max(ids))


LISTED = 4096
"""Chosen: tokens of one list that a line holds, 30 kB at most."""
_PROMPT = 1 << 15
"""Chosen: distinct tokens of a prompt: those of nearly all prompts, 200 kB at most, and only with a repetition
penalty."""


def sampling_of(new: Any, prompt: Sequence[int] | None) -> SamplingParameters | None:
    """Of the scheduler's entry of a new request; None for a pooling request, and where a release has other types.
    prompt: its token ids, None for embeddings."""
    params = getattr(new, "sampling_params", None)
    if params is None:
        return None
    try:
        return _copied(params, prompt)
    except (TypeError, ValueError, AttributeError):
        return None


def _copied(params: Any, prompt: Sequence[int] | None) -> SamplingParameters:
    def number(name: str, default: float) -> float:
        value = getattr(params, name, None)
        return default if value is None else float(value)

    repetition = number("repetition_penalty", 1.0)
    bias = {int(t): float(b) for t, b in (getattr(params, "logit_bias", None) or {}).items()}
    allowed = getattr(params, "allowed_token_ids", None)
    allowed = None if allowed is None else sorted(map(int, allowed))
    least = int(number("min_tokens", 0))
    stop = sorted(map(int, getattr(params, "all_stop_token_ids", None) or ())) if least else []
    words = [tuple(map(int, w)) for w in getattr(params, "bad_words_token_ids", None) or ()]
    also = set()
    for there, word in (
        (getattr(params, "structured_outputs", None) or getattr(params, "guided_decoding", None), GRAMMAR),
        (getattr(params, "thinking_token_budget", None), BUDGET),
        (getattr(params, "trace_decode_token_ids", None), TRACE),
        (getattr(params, "watermarking", None), WATERMARK),
        ((getattr(params, "extra_args", None) or {}).get(KEY), NAMED_TOKENS),
        (len(bias) > LISTED, BIAS),
        (len(allowed or ()) > LISTED, ALLOWED),
        (len(stop) > LISTED, MIN_TOKENS),
        (sum(map(len, words)) > LISTED, BAD_WORDS),
    ):
        if there:
            also.add(word)
    seen = sorted(set(prompt)) if repetition != 1.0 and prompt is not None else None
    seed = getattr(params, "seed", None)
    plain = (
        number("temperature", 1.0), number("top_p", 1.0), int(number("top_k", 0)), number("min_p", 0.0),
        None if seed is None else int(seed), repetition, number("presence_penalty", 0.0),
        number("frequency_penalty", 0.0),
    )  # fmt: skip
    every = repr((plain, sorted(bias.items()), allowed, least, stop, words, sorted(also)))
    return SamplingParameters(
        *plain,
        bias=tuple(sorted(bias.items())) if BIAS not in also else (),
        allowed=None if allowed is None or ALLOWED in also else tuple(allowed),
        min_tokens=least,
        stop=tuple(stop) if MIN_TOKENS not in also else (),
        bad_words=tuple(words) if BAD_WORDS not in also else (),
        prompt=None if seen is None or len(seen) > _PROMPT else tuple(map(int, seen)),
        also=tuple(sorted(also)),
        digest=xxhash.xxh3_128_hexdigest(every.encode()),
    )


SAMPLER = "sampler"
BEST = 5
"""How many of the best logits are kept per row."""
_SETTINGS = ("temperature", "top_k", "top_p")
_PENALTIES = ("repetition_penalties", "presence_penalties", "frequency_penalties")


class Sampling:
    """Wraps ``model.compute_logits`` and the runner's ``_sample`` (V1) or ``sample`` (V2)."""

    def __init__(self, session: Session, runner: Any, model: Any, rows: ChosenRows):
        self._session = session
        self._runner = runner
        self._rows = rows
        self._batch = rows.batch
        self._grammar: Grammar = {}
        self._cls = type(getattr(runner, "sampler", None)).__name__
        self._sites: Sites = {}
        if not chooses(session.config, SAMPLER, self._cls):
            return
        why = unsampled(runner)
        if why:
            session.sink.skip(SAMPLER, why)
            say(f"{why}: logits and tokens are skipped")
            return
        reported = reports_masks(runner)
        sampler = getattr(runner, "sampler", None)
        attrs: dict[str, Any] = ({MASKS_KNOWN: True} if reported else {}) | noise_of(sampler) | filters_of(runner)
        if hasattr(sampler, "apply_sampling_params"):
            attrs[SCALED] = True
        session.module(Module(SAMPLER, self._cls, 1 << 20, attrs))
        if not reported:
            session.sink.skip(SAMPLER, "this runner does not tell by request what masks logits", "masks")
        self._wrap(model, "compute_logits", self._compute_logits)
        method = "_sample" if hasattr(runner, "_sample") else "sample"
        if hasattr(runner, method):
            self._wrap(runner, method, self._sample)
        elif callable(getattr(sampler, "forward", None)):
            self._wrap(sampler, "forward", self._forward)  # vllm-ascend 0.11 samples inside execute_model
        else:
            session.sink.skip(SAMPLER, "this runner has neither _sample nor sample")
        if getattr(runner, "sample_tokens", None) is not None:
            self._wrap(runner, "sample_tokens", self._sample_tokens)
        # What goes into the last stage that leaves the best logit the best: V1's sample, V2's result of all stages.
        if hasattr(sampler, "apply_sampling_params"):
            self._wrap(sampler, "apply_sampling_params", self._after_masks)
        elif hasattr(sampler, "sample"):
            self._wrap(sampler, "sample", self._before_sample)

    def _wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        if wrap_method(owner, name, replacement) is None:
            self._session.sink.skip(SAMPLER, f"no {name} to wrap")

    def _compute_logits(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self._session.state
        if state is None:
            return original(*args, **kwargs)
        before, state.inside = state.inside, HEAD
        try:
            logits = original(*args, **kwargs)
        finally:
            state.inside = before
        try:
            first = state.calls.get("sampler:logits", 0) == 0
            state.calls["sampler:logits"] = 1
            # A second call in a step computes prompt log-probabilities: its rows are others.
            if (
                first
                and isinstance(logits, torch.Tensor)
                and logits.dim() == 2
                and self._session.config.capture_outputs
            ):
                state.taking += 1
                best = torch.topk(logits, min(BEST, logits.shape[-1]), dim=-1)
                self._record("output.top_logits", best.values.float())
                self._record("output.top_ids", best.indices.int())
                state.taking -= 1
        except Exception as error:
            self._session.fail("the logits", error)
        return logits

    def _sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._grammar = {}
        self._guarded(self._constrained, (*args, *kwargs.values()))
        return original(*args, **kwargs)

    def _constrained(self, args: tuple[Any, ...]) -> None:
        self._grammar = grammar_of(args)

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._masks)
        if self._session.config.capture_inputs:
            self._guarded(self._settings)
        output = original(*args, **kwargs)
        if self._session.config.capture_outputs:
            self._guarded(self._tokens, output)
        return output

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of ``_sample``, where a runner has none: with drafts the result is one of several, and not taken."""
        if self._session.state is None:
            return original(*args, **kwargs)
        try:
            guessed = any(part.drafts for part in self._batch.rows())
        except Exception as error:
            self._session.fail(SAMPLER, error)
            return original(*args, **kwargs)
        if guessed:
            self._session.sink.skip(SAMPLER, "this runner has no _sample: a step with drafts", "output.token")
            return original(*args, **kwargs)
        return self._sample(original, *args, **kwargs)

    def _guarded(self, take: Callable[..., None], *args: Any) -> None:
        """Takes something of the step, if there is one; the operators that this calls are none of the model's."""
        state = self._session.state
        if state is None:
            return
        state.taking += 1
        try:
            take(*args)
        except Exception as error:
            self._session.fail(SAMPLER, error)
        finally:
            state.taking -= 1

    def _masks(self) -> None:
        """Tells the journal whose logits are masked in this step; most steps cost a look into empty dicts."""
        state = self._session.state
        assert state is not None
        found = self._rows.masks(self._grammar)
        traced = any(TRACE in mask.by for mask in found.values())  # whose tokens no logits chose
        state.masked = (bool(found) or self._rows.processed()) and not traced
        if found:
            self._session.sink.line(MASKS.to_line(Masks(state.number, found)))

    def _before_sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._left, args[0] if args else kwargs.get("logits"))
        return original(*args, **kwargs)

    def _after_masks(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = original(*args, **kwargs)
        self._guarded(self._left, logits)
        return logits

    def _left(self, logits: Any) -> None:
        """The best logits after all masks, as the sampler sees them."""
        state = self._session.state
        if state is None or not state.masked or not self._session.config.capture_outputs:
            return
        state.masked = False  # once in a step
        batch = self._batch.rows()
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) < len(batch):
            return
        if any(part.drafts for part in batch):
            self._session.sink.skip(SAMPLER, "logits left by masks, in a step with drafts", "output.masked_logits")
            return
        best = torch.topk(logits[: len(batch)], min(BEST, logits.shape[-1]), dim=-1)
        self._record("output.masked_logits", best.values.float())
        self._record("output.masked_ids", best.indices.int())

    def _settings(self) -> None:
        """What the runner samples each row with, where not all are greedy, or penalised. (V1: the batch holds it, one
        entry per request.)"""
        metadata = getattr(getattr(self._runner, "input_batch", None), "sampling_metadata", None)
        if metadata is None:
            return
        values: dict[str, Any] = {}
        if not getattr(metadata, "all_greedy", True):
            values |= {name: getattr(metadata, name, None) for name in _SETTINGS}
            for one in getattr(getattr(metadata, "logitsprocs", None), "argmax_invariant", ()):
                if getattr(one, "min_p_count", 0) and isinstance(one.min_p, torch.Tensor):
                    values["min_p"] = one.min_p.reshape(-1)
        if not getattr(metadata, "no_penalties", True):
            values |= {name: getattr(metadata, name, None) for name in _PENALTIES}
        if not values:
            return
        batch = self._batch.rows()
        if any(part.drafts for part in batch):
            self._session.sink.skip(SAMPLER, "settings by request, and rows by draft", "input.temperature")
            return
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == len(batch):
                self._record(f"input.{name}", value)

    def _tokens(self, output: Any) -> None:
        """One token per logits row: the one sampled after it, -1 where a draft was rejected before it."""
        count = None
        if isinstance(output, tuple):  # V2: (SamplerOutput, num_sampled, num_rejected)
            output, count = output[0], output[1]
        sampled = getattr(output, "sampled_token_ids", None)
        if not isinstance(sampled, torch.Tensor):
            return
        sampled = sampled.reshape(sampled.shape[0], -1) if sampled.dim() != 2 else sampled
        if isinstance(count, torch.Tensor) and sampled.shape[1] > 1:
            place = torch.arange(sampled.shape[1], device=sampled.device)
            sampled = torch.where(place[None, :] < count[: sampled.shape[0], None], sampled, -1)
        batch = self._batch.rows()
        width = sampled.shape[1]
        if all(part.drafts == 0 for part in batch):
            tokens = sampled[: len(batch), 0]
        else:
            flat = [
                row * width + place
                for row, part in enumerate(batch)
                for place in range(part.drafts + 1)
                if place < width
            ]
            if len(flat) != sum(part.drafts + 1 for part in batch):
                self._session.sink.skip(SAMPLER, "fewer sampled columns than drafts", "output.token")
                return
            tokens = sampled.reshape(-1)[torch.tensor(flat, device=sampled.device)]
        self._record("output.token", tokens.to(torch.int64))

    def _record(self, role: str, tensor: torch.Tensor) -> None:
        state = self._session.state
        if state is not None:
            self._session.fired.add(SAMPLER)
            self._session.take(state, self._sites, SAMPLER, self._cls, role, 0, tensor.contiguous(), HEAD)


def filters_of(runner: Any) -> dict[str, str]:
    """An attribute that names logits processors of other code that change what is drawn and not what is best (V1);
    {} where there are none."""
    every = getattr(getattr(getattr(runner, "input_batch", None), "logitsprocs", None), "argmax_invariant", ())
    names = sorted({type(one).__name__ for one in every} - {"MinPLogitsProcessor"})
    return {FILTERED: ", ".join(names)} if names else {}


def noise_of(sampler: Any) -> dict[str, str]:
    """Attributes that tell which noise draws a seeded request's tokens (V1): {} where that is not known.

    On a CPU, the second token that it draws of 64 equal logits by each of the seeds 1 to 8 is written down, too:
    whoever has the same noise can show it."""
    draw = getattr(sampler, "topk_topp_sampler", None)
    way = getattr(getattr(draw, "forward", None), "__name__", "")
    if not way:
        return {}
    from vllm.platforms import current_platform

    device = str(getattr(current_platform, "device_type", ""))
    if device != "cpu" or getattr(draw, "use_fp64_gumbel", False):
        return {NOISE: f"{device} {way}"}
    generators = [torch.Generator().manual_seed(seed) for seed in range(1, 9)]
    fused = getattr(torch.ops._C, "fused_gumbel_argmax", None) if way == "forward_cpu" else None
    if fused is not None:
        numbers = [torch.randint(0, 2**31, (1,), generator=g) for _ in range(2) for g in generators]
        found = fused(torch.zeros(8, 64), torch.cat(numbers[8:]))
    else:
        noise = [torch.empty(64).exponential_(generator=g) for _ in range(2) for g in generators]
        found = torch.stack(noise[8:]).argmin(-1)
    kind = GUMBEL if fused is not None else EXPONENTIAL
    return {NOISE: kind, NOISE_DRAWS: ",".join(map(str, found.tolist()))}
