"""How far the policy that trains is from the one that serves: a trainer's jsonl against a server's log-probabilities.

The problem: every trainer has its own names for the same lists, pads on its own side, and counts from the first token,
the second or the answer's first; and what differs between the two programs enters every gradient as if it were
learning. The idea: names are data (verl, NeMo-RL, TRL, OpenRLHF, slime; from their sources), a list's length says how
it is aligned, and the result is one list over the sequence, None where nothing is compared. The server's side is its
answers, a folder of `send`, or what the trainer recorded while it sampled. With p the trainer's probability of a token,
q the server's and r = p / q, the measures are those of the field; `Span` and `Ratios` name them.

Not here: forcing (sending/client.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.files import bounded_lines
from vllm_accprobe.gate.sending import client, passes, replies
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.gate.sending.passes import Forcing, parse
from vllm_accprobe.gate.sending.prompts import PromptLine, to_text
from vllm_accprobe.gate.served_run import served
from vllm_accprobe.gate.sides import SendSettings
from vllm_accprobe.progress import waiting

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
_IDS, _NUMBERS = frozenset[type]((int,)), frozenset[type]((int, float, bool, type(None)))
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
    """names: fields with log-probabilities, the first that a line has is taken. Raises TrainerError, OSError,
    DumpError."""
    found = Trained(path)
    seen: set[str] = set()
    for number, raw in enumerate(bounded_lines(path)):
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
    numbers = _list(value, names, _NUMBERS)
    prompt, answer, whole = (_list(value, known, _IDS) for known in (PROMPT, ANSWER, WHOLE))
    if numbers is None or (prompt is None and whole is None):
        return NO_LISTS
    if prompt is not None and answer is not None:
        ids = [int(i) for i in (*prompt, *answer)]
        start = len(prompt)
    else:
        ids = [int(i) for i in whole or ()]
        start = min(max(len(ids) - len(numbers), 0), len(ids))
        if (n := _number(value, ANSWERED)) is not None:
            start = max(len(ids) - n, 0)
    logprobs = _aligned(numbers, len(ids), len(ids) - start)
    if logprobs is None:
        return NO_FIT
    kept = _kept(value, len(ids), start)
    if (counted := _counted(value, len(ids), start)) is not None:
        logprobs = [v if w else None for v, w in zip(logprobs, counted, strict=True)]
        if prompt is None or answer is None:
            start = next((i for i, w in enumerate(counted) if w), start)
        end = max((i + 1 for i, w in enumerate(counted) if w), default=start)
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


def _list(value: dict[str, Any], names: Sequence[str], kinds: frozenset[type]) -> list[Any] | None:
    """The first of ``names`` that is a list of these ``kinds`` and not empty; a list in a list of one is unwrapped."""
    for name in names:
        found = value.get(name)
        if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
            found = found[0]
        if isinstance(found, list) and found and set(map(type, found)) <= kinds:
            return found
    return None


def _number(value: dict[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        found = value.get(name)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if type(found) is int:
            return found
    return None


def _aligned(numbers: list[Any], n: int, answered: int) -> list[float | None] | None:
    """One for each of n tokens: as many as tokens, one less (from the second on), or the answer's."""
    values: list[float | None] = [None if v is None else float(v) for v in numbers]
    if len(values) not in (n, n - 1, answered):
        return None
    nothing: list[float | None] = [None] * (n - len(values))
    return nothing + values


def _kept(value: dict[str, Any], n: int, start: int) -> list[bool]:
    """Which tokens are no padding."""
    kept = [True] * n
    mask = _list(value, ("attention_mask",), _NUMBERS)
    if mask is not None and len(mask) == n:
        kept = [bool(v) for v in mask]
    mask = _list(value, ("prompt_mask",), _NUMBERS)
    if mask is not None and len(mask) == start:
        kept[:start] = [bool(v) for v in mask]
    length = _number(value, LENGTH)
    return kept if length is None or not 0 < length < n else [k and i < length for i, k in enumerate(kept)]


def _counted(value: dict[str, Any], n: int, start: int) -> list[bool] | None:
    """Which tokens the model chose itself, by the trainer's mask; None without one."""
    mask = _list(value, MASK, _NUMBERS)
    if mask is None:
        return None
    flags = [bool(v) for v in mask]
    if len(flags) in (n, n - 1):
        return [False] * (n - len(flags)) + flags
    return [False] * start + flags if len(flags) == n - start else None


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


LIMIT = 1.05
"""Chosen, by NeMo-RL: it plots each step whose token_mult_prob_error is above it."""
CLIP = (0.8, 1.2)
HALF = (0.5, 2.0)
QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
WORST = 10


class RatioError(Exception):
    """One line: nothing could be compared. Exit code 3."""


@dataclass(frozen=True)
class Scored:
    """What a server says of one sequence. ids: the whole; logprobs: of each, None where it says nothing."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True)
class Span:
    """Tokens of one kind. n; mean, worst: of |log r|. k1 = -log r, k3 = (r - 1) - log r: means over tokens that q drew,
    which estimate KL(q || p) without bias [J. Schulman, Approximating KL divergence, 2020]. ess: (sum r)^2 / sum r^2 as
    a share of n [L. Kish, Survey Sampling, 1965]. beyond: share outside [1/2, 2]; clipped: outside PPO's range, 1 - 0.2
    to 1 + 0.2 [J. Schulman et al., arXiv 1707.06347]."""

    where: str
    n: int
    mean: float
    worst: float
    k1: float
    k3: float
    ess: float
    beyond: float
    clipped: float


@dataclass(frozen=True)
class Ratios:
    """spans: all tokens, then by how many tokens of the answer stand before. quantiles: of r. sequences: how many;
    product, geometric: quantiles of their ratios' logarithms and of their geometric means (GSPO's [C. Zheng et al.,
    arXiv 2507.18071]); sequence_ess: share. mult: mean exp|log r|, NeMo-RL's token_mult_prob_error; prob_mean,
    prob_worst: of |p - q|, verl's rollout_probs_diff. worst: (sequence, token of the answer, log p, log q).
    nonfinite: tokens of which a side has no finite number. left_out: by reason."""

    spans: tuple[Span, ...]
    quantiles: tuple[float, ...]
    sequences: int
    product: tuple[float, ...]
    geometric: tuple[float, ...]
    sequence_ess: float
    mult: float
    prob_mean: float
    prob_worst: float
    worst: tuple[tuple[str, int, float, float], ...]
    nonfinite: int
    how: str
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "fail" if self.nonfinite or self.mult > LIMIT else "pass"


def compare(golden: Trained, mine: Mapping[str, Scored], how: str = "", left_out: Counter[str] | None = None) -> Ratios:
    """golden: the trainer's; mine: the server's, by name. Raises RatioError."""
    left = Counter(golden.left_out) + (left_out or Counter())
    rows: list[tuple[int, int, float, float]] = []
    names = [line.name for line in golden.lines]
    nonfinite = 0
    for k, line in enumerate(golden.lines):
        scored = mine.get(line.name)
        if scored is None:
            left["sequences that the server did not answer"] += not left_out
            continue
        same = min(len(line.ids), len(scored.ids))
        same = next((i for i in range(same) if line.ids[i] != scored.ids[i]), same)
        if same <= line.start:
            left["sequences whose prompt the server read as other tokens"] += 1
            continue
        counted = [i for i, v in enumerate(line.logprobs) if v is not None]
        left["tokens after the first that the server did not write"] += sum(i >= same for i in counted)
        for i in counted:
            if i >= same:
                break
            ours, theirs = line.logprobs[i], scored.logprobs[i]
            if theirs is None:
                left["tokens that the server did not return"] += 1
            elif finite(ours) and finite(theirs):
                rows.append((k, i - line.start, float(ours or 0.0), theirs))
            else:
                nonfinite += 1
    if not rows and not nonfinite:
        reasons = ", ".join(f"{n:,} {what}" for what, n in left.items() if n) or "no token is on both sides"
        raise RatioError(f"nothing could be compared: {reasons}")
    return _measured(rows, names, nonfinite, how, +left)


def _measured(
    rows: list[tuple[int, int, float, float]], names: list[str], nonfinite: int, how: str, left: Counter[str]
) -> Ratios:
    table = np.array(rows, np.float64).reshape(-1, 4)
    sequence, ordinal, p, q = table.T
    log_r = p - q
    spans = [_span("all tokens", log_r)] if len(rows) else []
    powers = np.frexp(np.maximum(ordinal, 0))[1]  # 0 for the first token, then 1, 2-3, 4-7, ...
    for power in np.unique(powers):
        low, high = (0, 0) if power == 0 else (2 ** (int(power) - 1), 2 ** int(power) - 1)
        where = f"answer's token {low:,}" if low == high else f"answer's tokens {low:,}-{high:,}"
        spans.append(_span(where, log_r[powers == power]))
    each = [log_r[sequence == k] for k in np.unique(sequence)]
    sums = np.array([v.sum() for v in each])
    far = np.argsort(-np.abs(log_r), kind="stable")[:WORST]
    worst = tuple((names[int(sequence[i])], int(ordinal[i]), float(p[i]), float(q[i])) for i in far)
    gap = np.abs(np.exp(p) - np.exp(q))
    return Ratios(
        tuple(spans), _quantiles(np.exp(log_r)), len(each), _quantiles(sums),
        _quantiles(np.exp(np.array([v.mean() for v in each]))), effective(sums),
        float(np.exp(np.abs(log_r)).mean()) if len(rows) else 1.0, float(gap.mean()) if len(rows) else 0.0,
        float(gap.max(initial=0.0)), worst, nonfinite, how, dict(left),
    )  # fmt: skip


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in np.quantile(values, QUANTILES)) if len(values) else ()


def _span(where: str, log_r: np.ndarray) -> Span:
    r = np.exp(log_r)
    size = np.abs(log_r)
    return Span(
        where, len(r), float(size.mean()), float(size.max()), float(-log_r.mean()) + 0.0,
        float((np.expm1(log_r) - log_r).mean()), effective(log_r),
        float(((r < HALF[0]) | (r > HALF[1])).mean()), float(((r < CLIP[0]) | (r > CLIP[1])).mean()),
    )  # fmt: skip


def effective(log_w: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2) of weights given by their logarithms, which are shifted so that nothing overflows; 1.0
    for equal weights, 1/n where one has all."""
    if not len(log_w):
        return 1.0
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))


HOW = {
    client.PLUGIN: "decoded, forced along the trainer's tokens",
    client.TRACE: "decoded, forced along the trainer's tokens by trace replay",
    client.SCORED: "scored as prompts: decode's kernels are not exercised",
    None: "decoded freely, up to the first token that is not the trainer's",
}
WRITTEN = "as the trainer wrote them down while it sampled"


@dataclass(frozen=True)
class Rollout:
    """answers: by the sequence's name; how: which kernels they come from; left_out: sequences, by reason."""

    answers: Mapping[str, Scored]
    how: str
    left_out: Counter[str]


def of_file(path: Path) -> Rollout:
    """Of another file, or the same one where it has both sides. Raises TrainerError, OSError."""
    found = read(path, (*ROLLOUT, *TRAINER))
    return Rollout({line.name: Scored(line.ids, line.logprobs) for line in found.lines}, WRITTEN, Counter())


def of_folder(path: Path) -> Rollout:
    """Of a folder of `send`, its first pass. Raises FolderError, OSError."""
    sent = replies.read(path)
    scored, left = {}, Counter[str]()
    how: set[str | None] = set()
    for name, reply in (sent.passes[0] if sent.passes else {}).items():
        if reply.refused is not None:
            left[f"sequences that the server refused: {reply.refused}"] += 1
        elif reply.prompt_token_ids and reply.token_ids and reply.logprobs:
            before: list[float | None] = [None] * len(reply.prompt_token_ids)
            scored[name] = Scored((*reply.prompt_token_ids, *reply.token_ids), (*before, *reply.logprobs))
            how.add(reply.forced)
        else:
            left["sequences without token ids of the server"] += 1
    return Rollout(scored, "; ".join(sorted(HOW.get(h, str(h)) for h in how)), left)


def of_server(
    golden: Trained, url: str, key: str, out: Path, made: Mapping[str, Any], sending: SendSettings
) -> Rollout:
    """Asks ``url`` for the trainer's tokens; ``out`` becomes, or is, a folder of `send`. Raises SendError, FolderError,
    OSError."""
    sender, server = Sender(url, key, timeout=sending.timeout, model=sending.model).introduced()
    if (way := sender.how_forced()) is None:
        raise SendError(f"{url} neither decodes nor scores tokens that are named: {client.HOW_TO_FORCE}")
    lines = []
    for line in golden.lines:
        start = max(line.start, 1)
        lines.append(PromptLine(line.name, token_ids=line.ids[:start], along=line.ids[start:]))
    digest = hashlib.sha256(to_text(lines).encode()).hexdigest()
    with waiting(lambda: "the server scores the trainer's sequences", sending.say):
        passes.send(sender, server, lines, [parse("all")], sending.concurrency, out, dict(made),
                    plan=Forcing(way, digest))  # fmt: skip
    return of_folder(out)


def of_command(
    golden: Trained, command: str, environ: Mapping[str, str], out: Path, made: Mapping[str, Any],
    sending: SendSettings,
) -> Rollout:  # fmt: skip
    """The same of a server that is started and ended."""
    if replies.exists(out) and replies.read_about(out).get("complete"):
        return of_folder(out)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with served("the server", command, environ, out, sending.ready_s, sending.say) as run:
        return of_server(golden, run.command.url, run.command.key, out, made, sending)
