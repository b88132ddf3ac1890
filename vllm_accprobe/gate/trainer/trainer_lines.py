"""A trainer's jsonl: token ids and the log-probability that the trainer gave each of them.

The problem: every trainer has its own names for the same four lists, pads on its own side, and counts log-probabilities
from the first token, from the second or from the answer's first. The idea: names are data; how a list is aligned is
told by its length; the result is one list over the whole sequence, with None where nothing is to be compared (prompt,
padding, what a tool wrote). Names that were looked up in the sources:
verl (prompts, responses, attention_mask, response_mask, old_log_probs, rollout_log_probs; prompt_ids, response_ids,
response_logprobs of its agent loop), NeMo-RL (train_data_stepN.jsonl: token_ids, token_loss_mask, input_lengths,
prev_logprobs, generation_logprobs; each value in a list of its own), TRL (prompt_ids, prompt_mask, completion_ids,
completion_mask, old_per_token_logps, sampling_per_token_logps), OpenRLHF (sequences, attention_mask, action_mask,
action_log_probs, rollout_log_probs), slime (tokens, response_length, loss_mask, log_probs, rollout_log_probs).
Not here: what a server says of the same tokens (rollout.py), the measures (ratios.py).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = ("prompt_token_ids", "prompt_ids", "prompts")
ANSWER = ("response_token_ids", "response_ids", "responses", "completion_ids", "output_token_ids", "token_ids")
WHOLE = ("input_ids", "sequences", "tokens", "observation_tokens", "token_ids")
TRAINER = ("logprobs", "log_probs", "old_log_probs", "prev_logprobs", "action_log_probs", "actor_old_log_probs",
           "old_per_token_logps", "per_token_logps")  # fmt: skip
ROLLOUT = ("rollout_log_probs", "rollout_logprobs", "generation_logprobs", "sampling_per_token_logps",
           "response_logprobs")  # fmt: skip
MASK = ("response_mask", "completion_mask", "token_loss_mask", "loss_mask", "action_mask")
LENGTH = ("input_lengths", "input_length")
ANSWERED = ("response_length", "response_lengths")
NO_JSON = "lines that are no json object"
NO_LISTS = "lines without token ids and log-probabilities"
NO_FIT = "lines whose log-probabilities are neither as many as tokens nor as the answer's"


class TrainerError(Exception):
    """One line: why a file has no trainer's log-probabilities."""


@dataclass(frozen=True)
class TrainerLine:
    """One sequence. ids: prompt and answer, without padding; start: where the answer begins; logprobs: of each of ids
    (natural), None where nothing is compared; it may hold NaN or infinities, as the trainer wrote them."""

    name: str
    ids: tuple[int, ...]
    start: int
    logprobs: tuple[float | None, ...]


@dataclass
class Trained:
    """A file. left_out: lines that were not read, by reason."""

    path: Path
    lines: list[TrainerLine] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read(path: Path, names: Sequence[str] = (*TRAINER, *ROLLOUT)) -> Trained:
    """names: fields with log-probabilities, the first that a line has is taken. Raises TrainerError, OSError."""
    found = Trained(path)
    seen: set[str] = set()
    with path.open("rb") as f:
        for number, raw in enumerate(f):
            if not raw.strip():
                continue
            try:
                value = json.loads(raw)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                found.left_out[NO_JSON] += 1
                continue
            line = _line(value, number, names)
            if isinstance(line, str):
                found.left_out[line] += 1
                continue
            if line.name in seen:
                line = TrainerLine(f"{line.name}.{number}", line.ids, line.start, line.logprobs)
            seen.add(line.name)
            found.lines.append(line)
    if not found.lines:
        why = ", ".join(f"{n:,} {what}" for what, n in found.left_out.items()) or "it is empty"
        raise TrainerError(f"{path} has no trainer's log-probabilities ({why}): docs/gate.md lists the fields")
    return found


def _line(value: dict[str, Any], number: int, names: Sequence[str]) -> TrainerLine | str:
    said = _list(value, names, float)
    prompt, answer, whole = (_list(value, known, int) for known in (PROMPT, ANSWER, WHOLE))
    if said is None or (prompt is None and whole is None):
        return NO_LISTS
    if prompt is not None and answer is not None:
        ids = [int(i) for i in (*prompt, *answer)]
        start = len(prompt)
    else:
        ids = [int(i) for i in whole or ()]
        start = min(max(len(ids) - len(said), 0), len(ids))
        if (n := _number(value, ANSWERED)) is not None:
            start = max(len(ids) - n, 0)
    logprobs = _aligned(said, len(ids), len(ids) - start)
    if logprobs is None:
        return NO_FIT
    kept = _kept(value, len(ids), start)
    if (wanted := _wanted(value, len(ids), start)) is not None:
        logprobs = [v if w else None for v, w in zip(logprobs, wanted, strict=True)]
        if prompt is None or answer is None:
            start = next((i for i, w in enumerate(wanted) if w), start)
        end = max((i + 1 for i, w in enumerate(wanted) if w), default=start)
        kept = [k and i < end for i, k in enumerate(kept)]  # padding, or a tool's last words, which nothing follows
    places = [i for i, keep in enumerate(kept) if keep]
    start = sum(kept[:start])
    final = [logprobs[i] for i in places]
    if final:
        final[0] = None  # nothing stands before the first token
    return TrainerLine(_name(value, number), tuple(ids[i] for i in places), start, tuple(final))


def _name(value: dict[str, Any], number: int) -> str:
    """The sequence's, as a request may be called."""
    found = next((value[k] for k in ("id", "request_id", "uid") if value.get(k) is not None), "")
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    return "".join(c for c in str(found) if "!" <= c <= "~")[:150] or f"t{number:04}"


def _list(value: dict[str, Any], names: Sequence[str], kind: type) -> list[Any] | None:
    """The first of ``names`` that is a list of numbers; a list in a list of one is unwrapped."""
    for name in names:
        found = value.get(name)
        if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
            found = found[0]
        if isinstance(found, list) and found and all(_fits(v, kind) for v in found):
            return found
    return None


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is not int
    return isinstance(value, int) or (kind is float and (isinstance(value, float) or value is None))


def _number(value: dict[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        found = value.get(name)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if type(found) is int:
            return found
    return None


def _aligned(said: list[Any], n: int, answered: int) -> list[float | None] | None:
    """One for each of n tokens: as many as tokens, one less (from the second on), or the answer's."""
    values: list[float | None] = [None if v is None else float(v) for v in said]
    if len(values) not in (n, n - 1, answered):
        return None
    nothing: list[float | None] = [None] * (n - len(values))
    return nothing + values


def _kept(value: dict[str, Any], n: int, start: int) -> list[bool]:
    """Which tokens are no padding."""
    kept = [True] * n
    mask = _list(value, ("attention_mask",), float)
    if mask is not None and len(mask) == n:
        kept = [bool(v) for v in mask]
    mask = _list(value, ("prompt_mask",), float)
    if mask is not None and len(mask) == start:
        kept[:start] = [bool(v) for v in mask]
    length = _number(value, LENGTH)
    return kept if length is None or not 0 < length < n else [k and i < length for i, k in enumerate(kept)]


def _wanted(value: dict[str, Any], n: int, start: int) -> list[bool] | None:
    """Which tokens the model chose itself, by the trainer's mask; None without one."""
    mask = _list(value, MASK, float)
    if mask is None:
        return None
    flags = [bool(v) for v in mask]
    if len(flags) in (n, n - 1):
        return [False] * (n - len(flags)) + flags
    return [False] * start + flags if len(flags) == n - start else None


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
