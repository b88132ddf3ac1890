"""What a request's own parameters make of its logits, and which token they let the sampler take.

The problem: a token is right or wrong only by its own request's temperature, filters, seed, penalties and word lists.
The idea: one row of logits is processed again in float64; what the engine's processors left, and its token, either lie
within rounding of that or do not. Where the noise of draws is known, a seed names the token; else the filters bound it.

Order and formulas are vLLM's [vllm/v1/sample/sampler.py: allowed tokens, bad words, a minimum of tokens, biases,
penalties; then temperature, min-p, top-k, top-p]. Repetition: N. Keskar et al., CTRL, arXiv 1909.05858, section 4.1.
Presence and frequency: OpenAI's API reference. Top-p: A. Holtzman et al., arXiv 1904.09751. Min-p: M. Nguyen et al.,
arXiv 2407.01082. The draw: argmax of x plus Gumbel noise [L. Devroye, 1986]. Not here: what a dump has of a row
(align/tokens.py), what a flipped token means (near_ties.py), vendors' operators (opcheck/references/sampling.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_accprobe.dump import schema
from vllm_accprobe.judge.constants import SAMPLER_BORDER, SAMPLER_DRAW, SAMPLER_ROUND, SAMPLER_STEPS

_VOCABULARY = 1 << 22
"""Chosen: more tokens than any vocabulary has, and than any answer: what a damaged dump says beyond it is not used."""
_COMPUTED = {schema.ALLOWED, schema.BAD_WORDS, schema.MIN_TOKENS, schema.BIAS, schema.PENALTIES}
"""What changes logits and can be computed from a request's parameters."""
OTHER_PAST = "as if other tokens had been seen"
"""How penalties are wrong where some past, nobody's that is known, explains a row: the weakest way."""
RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"
FORCED = "its token was named by its client"
DRAFTS = "its step verifies drafts"
NO_PARAMETERS = "the sampling parameters of its request were not captured"
NO_LOGITS = "not all logits of its row were captured"
NAN_LOGITS = "the model's logits of its row hold NaN or infinity"
_NOTHING = np.zeros(0, np.int64)
Way = tuple[tuple[str, ...], str]
Draw = Callable[[np.ndarray, int, int], "int | None"]
"""(logits float64 [V], minus infinity for what may not be taken; seed; how many tokens the request had) → the token
that the engine's noise draws, None where rounding may decide."""


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """What a dump has of one row of logits. asks: None where it does not know. raw: float64 [V], NaN where not known.
    left: (logits, ids) of the best after all processors, descending, None where they were not recorded. prompt: the
    distinct tokens of the prompt; output: the tokens generated before, in order; None where not all are known.
    generated: how many these are. masked: the words of what the runner itself says changed this row, None where it does
    not say. draw: by the noise of this engine, None where that is not known. others: what each request of its step asks
    for, with its prompt. scaled: ``left`` of a random row is divided by its temperature, and filtered. filtered: by
    what else draws are filtered, "" for nothing. broken: the model's own logits hold NaN or infinity, of which no token
    is the largest."""

    asks: schema.SamplingParameters | None
    raw: np.ndarray | None
    left: tuple[np.ndarray, np.ndarray] | None
    token: int | None
    prompt: np.ndarray | None
    output: np.ndarray | None
    generated: int
    drafts: bool = False
    masked: tuple[str, ...] | None = None
    draw: Draw | None = None
    others: tuple[tuple[schema.SamplingParameters, np.ndarray | None], ...] = ()
    scaled: bool = False
    filtered: str = ""
    broken: bool = False

    @property
    def whole(self) -> bool:
        return self.raw is not None and not bool(np.isnan(self.raw).any())


def is_of(raw: np.ndarray, best: tuple[np.ndarray, np.ndarray] | None) -> bool:
    """Whether the best logits that the sampler's side saw are those of ``raw``: some models change what their logits
    processor gives."""
    if best is None or not len(best[0]) or best[1].min() < 0 or best[1].max() >= len(raw):
        return best is None
    return bool(np.array_equal(raw[best[1]], best[0], equal_nan=True)) and not bool(best[0][0] < raw.max())


def broken(*values: np.ndarray | None) -> bool:
    """Whether logits as a model gave them hold what has no order; minus infinity has one."""
    return any(bool((np.isnan(v) | np.isposinf(v)).any()) for v in values if v is not None)


def of_best(
    best: tuple[np.ndarray, np.ndarray] | None, left: tuple[np.ndarray, np.ndarray] | None, token: int | None
) -> np.ndarray | None:
    """``LogitsRow.raw`` where only the best (logits, ids) are known: the others are NaN."""
    if best is None:
        return None
    known = [*best[1].tolist(), *(left[1].tolist() if left is not None else ()), token or 0]
    if min(known) < -1 or max(known) > _VOCABULARY:
        return None
    raw = np.full(max(known) + 2, np.nan)
    raw[best[1]] = best[0]
    return raw


@dataclass(frozen=True, slots=True)
class RowCheck:
    """left: whether the processors did what the request asks; token: whether the sampler took a right one of what they
    left. RIGHT, WRONG, or UNKNOWN, with the reason in ``why_*``, which of a wrong one says what is wrong. processors:
    the words of those that left a wrong row; none where what reached the sampler follows from no processor. best:
    (logits, ids) that should have been left, as many as were recorded; should: the token. drawn: the token is right by
    its seed, not only one that might be taken. ways: (words of processors, how) of all wrong ways that give just this
    row; a fault is that which gives all its rows."""

    left: str
    token: str
    why_left: str = ""
    why_token: str = ""
    processors: tuple[str, ...] = ()
    best: tuple[np.ndarray, np.ndarray] | None = None
    should: int | None = None
    drawn: bool = False
    ways: tuple[Way, ...] = ()


class Unknown(Exception):
    """A row that cannot be computed again; its text says why."""


def processed(row: LogitsRow) -> tuple[np.ndarray, np.ndarray]:
    """(logits that the request's processors should leave, float64 [V], how far off a right engine may be). Raises
    Unknown."""
    asks, raw = row.asks, row.raw
    if asks is None:
        raise Unknown(NO_PARAMETERS)
    if raw is None:
        raise Unknown(NO_LOGITS)
    unwritten = [w for w in asks.also if w not in (schema.NAMED_TOKENS, schema.TRACE)]
    unwritten += [w for w in row.masked or () if w not in _COMPUTED]
    if unwritten:
        raise Unknown(f"what {' and '.join(dict.fromkeys(unwritten))} changes is not in the dump")
    if row.drafts and asks.processors:
        raise Unknown(DRAFTS)
    if asks.repetition <= 0.0:
        raise Unknown(f"its repetition penalty is {asks.repetition:.3g}")
    z, size = raw.copy(), np.abs(raw)
    forbidden = _forbidden(row, asks, len(z))
    for token, bias in asks.bias:
        if token < len(z):
            z[token] += bias
            size[token] += abs(bias) + abs(z[token])
    if asks.penalised:
        z, more = _penalised(z, row, asks)
        size = size + more
    z[forbidden] = -np.inf
    return z, SAMPLER_STEPS * SAMPLER_ROUND * np.where(np.isfinite(size), size, 0.0)


def _forbidden(row: LogitsRow, asks: schema.SamplingParameters, width: int) -> np.ndarray:
    out = np.zeros(width, bool)
    if asks.allowed is not None:
        out[:] = True
        out[[t for t in asks.allowed if t < width]] = False
    if asks.min_tokens > row.generated:
        out[[t for t in asks.stop if t < width]] = True
    if asks.bad_words:
        counted = _generated(row).tolist()
        for *before, last in asks.bad_words:
            if last < width and len(before) <= len(counted) and counted[len(counted) - len(before) :] == before:
                out[last] = True
    return out


def _generated(row: LogitsRow) -> np.ndarray:
    if row.output is None:
        raise Unknown("not all tokens that its request had generated are in the dump")
    return row.output


def _penalised(z: np.ndarray, row: LogitsRow, asks: schema.SamplingParameters) -> tuple[np.ndarray, np.ndarray]:
    """(z, what adds to the size of its roundings)"""
    counted = _generated(row)
    counts = np.bincount(counted[counted < len(z)], minlength=len(z)).astype(np.float64)
    size = np.abs(z)
    if asks.repetition != 1.0:
        if row.prompt is None:
            raise Unknown("not all tokens of its prompt are in the dump")
        seen = counts > 0
        seen[row.prompt[row.prompt < len(z)]] = True
        z = np.where(seen, np.where(z > 0, z / asks.repetition, z * asks.repetition), z)
    size = size + np.abs(z) + abs(asks.frequency) * counts + abs(asks.presence) * (counts > 0)
    return z - asks.frequency * counts - asks.presence * (counts > 0), size


# --- which tokens may be taken ------------------------------------------------------------------------------------


def kept(z: np.ndarray, asks: schema.SamplingParameters, slack: float = SAMPLER_BORDER) -> np.ndarray:
    """bool [V]: the tokens that the filters may keep of processed logits. slack: below 0 those that they surely keep.
    A float32 sum may fall on either side of a limit, and equals may stand in any order."""
    x = z / asks.temperature
    keep = np.isfinite(x)
    if asks.min_p > 0.0:
        p = _softmax(x)
        keep &= p >= asks.min_p * p.max() * (1.0 - slack)
    if 0 < asks.top_k < int(keep.sum()):
        limit = float(np.partition(x[keep], -asks.top_k)[-asks.top_k])
        tiny = SAMPLER_BORDER * 2.0**-8 * max(abs(limit), 1.0)
        near = keep & (x >= limit - tiny)
        keep = near if slack > 0 or int(near.sum()) == asks.top_k else keep & (x > limit + tiny)
    if asks.top_p < 1.0 and keep.any():
        p = _softmax(np.where(keep, x, -np.inf))
        order = np.argsort(-p, kind="stable")
        fallen = p[order]
        inside = np.cumsum(fallen) - fallen < asks.top_p + slack
        last = max(int(inside.sum()), 1)
        if slack > 0:  # equals of the last one may stand before it
            inside = fallen >= fallen[last - 1] * (1.0 - slack)
        elif last < len(fallen) and fallen[last] > 0.0:
            inside &= fallen > fallen[last] * (1.0 - slack)
        inside[0] = True
        keep = np.zeros_like(keep)
        keep[order[inside & (fallen > 0.0)]] = True
    return keep


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


# --- the noise ------------------------------------------------------------------------------------------------------


def draw_of(kind: str | None, drew: str | None) -> Draw | None:
    """The noise of an engine whose sampler says ``kind``, where ours draws the same (schema.NOISE_DRAWS)."""
    if kind != schema.GUMBEL or not drew:
        return None
    for words in (2, 1):
        ours = (int(_gumbel(_number(seed, 1, words), 64).argmax()) for seed in range(1, 9))
        if ",".join(map(str, ours)) == drew:
            return functools.partial(by_gumbel, words=words)
    return None


def by_gumbel(x: np.ndarray, seed: int, generated: int, words: int = 2) -> int | None:
    """As vLLM's CPU sampler draws: the request's generator gives one number below 2**31 for each token, and that the
    noise [vllm/v1/sample/ops/topk_topp_sampler.py, forward_cpu]. words: as `_number`'s."""
    return _sure_best(x + _gumbel(_number(seed, generated, words), len(x)))


def _number(seed: int, n: int, words: int) -> int:
    """The ``n``-th, from 0, of torch.randint(0, 2**31) by a generator of this seed: a Mersenne Twister [M. Matsumoto
    and T. Nishimura, ACM TOMACS 8 (1998) 3]. words: how many of its numbers a torch takes for one."""
    numbers = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, size=words * (n + 1), dtype=np.uint32)
    return int(numbers[-1]) & 0x7FFFFFFF


def _sure_best(total: np.ndarray) -> int | None:
    best = int(total.argmax())
    rest = np.delete(total, best)
    second = float(rest.max()) if len(rest) else -np.inf
    return best if total[best] - second > SAMPLER_DRAW * max(abs(float(total[best])), 1.0) else None


def _gumbel(seed: int, n: int) -> np.ndarray:
    """float64 [n]: Gumbel noise of each token from SplitMix64 [G. Steele, D. Lea and C. Flood, OOPSLA 2014] of the seed
    and the token."""
    with np.errstate(over="ignore"):
        key = _mixed(np.array([seed], np.uint64))
        bits = _mixed(key + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    u = (bits.astype(np.float64) + 0.5) * 2.0**-53
    noise: np.ndarray = -np.log(-np.log(u))
    return noise


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# --- one row ----------------------------------------------------------------------------------------------------------


@dataclass
class _Check:
    row: LogitsRow
    z: np.ndarray | None = None
    bound: np.ndarray = field(default_factory=lambda: np.zeros(0))
    why: str = ""

    def run(self) -> RowCheck:
        if self.row.broken:  # what comes of it is the model's
            return RowCheck(UNKNOWN, UNKNOWN, NAN_LOGITS, NAN_LOGITS)
        try:
            self.z, self.bound = processed(self.row)
        except Unknown as why:
            self.why = str(why)
        return self._left()

    def _left(self) -> RowCheck:
        row, z = self.row, self.z
        if row.left is None or z is None:
            why = self.why or "what the processors left was not recorded"
            return self._token(RowCheck(UNKNOWN, UNKNOWN, why))
        wrong = deviations(z, self.bound, row)
        best = self._best(len(row.left[0]))
        if not wrong:
            known = row.whole or not np.isnan(z[row.left[1][np.isfinite(row.left[0])].astype(np.int64)]).any()
            return self._token(RowCheck(RIGHT if known else UNKNOWN, UNKNOWN, "" if known else NO_LOGITS, best=best))
        ways = explained(row)
        words = ways[0][0] if ways else _scope(row, {token for token, _ in wrong}, len(z))
        if not words and _other_past(row):
            ways = (((schema.PENALTIES,), OTHER_PAST),)
            words = ways[0][0]
        text = wrong[0][1]
        if not words:
            text = f"what reached it does not follow from the model's logits by its request's parameters: {text}"
        return self._token(RowCheck(WRONG, UNKNOWN, text, processors=words, best=best, ways=ways))

    def _best(self, n: int) -> tuple[np.ndarray, np.ndarray] | None:
        if self.z is None or not self.row.whole:
            return None
        ids = np.argsort(-self.z, kind="stable")[:n]
        return self.z[ids], ids

    def _token(self, found: RowCheck) -> RowCheck:
        row, token, asks = self.row, self.row.token, self.row.asks
        why = ""
        if token is None or token < 0:
            why = "its token was not recorded"
        elif asks is None:
            why = NO_PARAMETERS
        elif schema.NAMED_TOKENS in asks.also or schema.TRACE in asks.also or schema.TRACE in (row.masked or ()):
            why = FORCED
        if why or token is None or asks is None:
            return replace(found, token=UNKNOWN, why_token=why)
        if asks.greedy:
            return self._greedy(found, asks, token)
        if row.drafts or row.filtered:
            why = DRAFTS if row.drafts else f"what {row.filtered} filters is not in the dump"
            return replace(found, token=UNKNOWN, why_token=why)
        if self.z is None or not row.whole or found.left == WRONG:
            why = "it was drawn from wrong logits" if found.left == WRONG else self.why or NO_LOGITS
            return replace(found, token=UNKNOWN, why_token=why)
        return self._drawn(found, asks, token)

    def _greedy(self, found: RowCheck, asks: schema.SamplingParameters, token: int) -> RowCheck:
        row = self.row
        enough = row.whole or (row.left is None and not asks.processors)  # of the best alone, the best is known
        if found.left != WRONG and self.z is not None and enough:
            z, bound = np.where(np.isnan(self.z), -np.inf, self.z), self.bound
            if token >= len(z):
                return replace(found, token=WRONG, why_token=f"token {token} is none of {len(z)}")
            best = int(z.argmax())
            behind = float(z[best] - z[token])
            if behind <= bound[best] + bound[token]:
                return replace(found, token=RIGHT, should=token)
            text = f"greedy, and token {token} is {behind:.3g} behind the best, {best}"
            blamed = self._blamed(found, text, best) if row.left is None else None
            if blamed is not None:
                return blamed
            return replace(found, token=WRONG, why_token=text, should=best)
        if row.left is None:
            return replace(found, token=UNKNOWN, why_token=self.why or NO_LOGITS)
        values, ids = row.left
        at = np.flatnonzero(ids == token)
        behind = float(values[0] - values[at[0]]) if len(at) else np.inf
        if behind == 0.0:
            return replace(found, token=RIGHT, should=token)
        best = int(ids[0])
        far = f"{behind:.3g} behind" if np.isfinite(behind) else "not among the best: behind"
        text = f"greedy, and token {token} is {far} what was left as best, {best}"
        return replace(found, token=WRONG, why_token=text, should=best)

    def _drawn(self, found: RowCheck, asks: schema.SamplingParameters, token: int) -> RowCheck:
        z = self.z
        assert z is not None
        may = kept(z, asks)
        best = int(z.argmax())
        if token >= len(z) or not may[token]:
            blamed = self._blamed(found, f"token {token} may not be taken", best)
            if blamed is not None:
                return blamed
            text = f"token {token} is none of the {int(may.sum())} that {filters(asks)} keep"
            return replace(found, token=WRONG, should=best, why_token=text)
        if asks.seed is None or self.row.draw is None:
            return replace(found, token=RIGHT, should=token)
        should = drawn(z, asks, self.row)
        if should is None:
            return replace(found, token=RIGHT, should=token)
        if should == token:
            return replace(found, token=RIGHT, should=token, drawn=True)
        blamed = self._blamed(found, f"its seed draws token {should}, not {token}", should)
        if blamed is not None:
            return blamed
        nth = f"draw {self.row.generated + 1} of seed {asks.seed} by {filters(asks)}"
        text = f"{nth} is token {should}, not {token}"
        return replace(found, token=WRONG, why_token=text, should=should)

    def _blamed(self, found: RowCheck, text: str, should: int) -> RowCheck | None:
        """The processors, where a wrong way of theirs gives the token, and what was seen of what they left."""
        ways = explained(self.row, token=True) if self.row.asks is not None and self.row.asks.processors else ()
        if not ways:
            return None
        return replace(found, left=WRONG, token=UNKNOWN, processors=ways[0][0], ways=ways, should=should,
                       why_left=text, why_token="it was taken from wrong logits")  # fmt: skip


def commonest(ways: Iterable[Sequence[Way]]) -> Way:
    """Of the ways of several rows the one that gives most of them, the first of these; ((), "") of none."""
    counts: dict[Way, int] = {}
    for row in ways:
        for words, how in row:
            way = tuple(words), how
            counts[way] = counts.get(way, 0) + 1
    return max(counts, key=lambda way: counts[way]) if counts else ((), "")


def check(row: LogitsRow) -> RowCheck:
    """Whether what was done to one row of logits, and the token taken of it, follow from its request's parameters."""
    return _Check(row).run()


def drawn(z: np.ndarray, asks: schema.SamplingParameters, row: LogitsRow) -> int | None:
    """The token that the engine's noise draws of processed logits; None where it is not known, or rounding decides."""
    if asks.seed is None or row.draw is None or row.generated > _VOCABULARY:
        return None
    x = z / asks.temperature
    both = [kept(z, asks, s) for s in (SAMPLER_BORDER, -SAMPLER_BORDER)]
    if not both[1].any():
        return None
    found = {row.draw(np.where(keep, x, -np.inf), asks.seed, row.generated) for keep in both}
    return next(iter(found)) if len(found) == 1 else None


def filters(asks: schema.SamplingParameters) -> str:
    parts = [f"temperature {asks.temperature:.3g}"]
    parts += [f"top-k {asks.top_k}"] if asks.top_k > 0 else []
    parts += [f"top-p {asks.top_p:.3g}"] if asks.top_p < 1.0 else []
    parts += [f"min-p {asks.min_p:.3g}"] if asks.min_p > 0.0 else []
    return ", ".join(parts)


def deviations(z: np.ndarray, bound: np.ndarray, row: LogitsRow) -> list[tuple[int, str]]:
    """Where the best logits that an engine left are not those of ``z``: (token, in words). z: NaN where not known."""
    if row.left is None:
        return []
    values, ids = row.left
    real = np.isfinite(values)
    scaled = row.scaled and row.asks is not None and not row.asks.greedy
    if scaled and row.asks is not None:
        values, bound = values * row.asks.temperature, 2.0 * bound
    at = ids[real].astype(np.int64)
    if len(at) and (at.min() < 0 or at.max() >= len(z)):
        return [(int(at.max()), f"token {int(at.max())} was left, of {len(z)}")]
    with np.errstate(invalid="ignore"):
        off = np.abs(values[real] - z[at])
        off[~np.isfinite(z[at]) & ~np.isnan(z[at])] = np.inf
        bad = np.flatnonzero(off > bound[at] * 2.0 + SAMPLER_ROUND * np.abs(values[real]))
    found = [(int(at[i]), f"the logit of token {int(at[i])} became {float(values[real][i]):.5g}, not "
              f"{float(z[at[i]]):.5g}") for i in bad]  # fmt: skip
    if scaled:  # what is missing may have been filtered
        return found
    last = float(values[real].min()) if real.all() else -np.inf
    out = np.ones(len(z), bool)
    out[at] = False
    with np.errstate(invalid="ignore"):
        more = np.flatnonzero(out & (z - 2.0 * bound - SAMPLER_ROUND * np.abs(z) > last))
    text = "token {}, whose logit should be {:.5g}, was not among the best that were left"
    return found + [(int(t), text.format(int(t), float(z[t]))) for t in more[np.argsort(-z[more])]]


def _scope(row: LogitsRow, wrong: set[int], width: int) -> tuple[str, ...]:
    """Words of the one processor that touches all tokens whose logits are wrong, and few others; () where none does."""
    asks = row.asks
    if asks is None or not wrong:
        return ()
    seen = {*(row.prompt.tolist() if row.prompt is not None and asks.repetition != 1.0 else ()),
            *(row.output.tolist() if row.output is not None else ())}  # fmt: skip
    scopes = (
        (schema.PENALTIES, seen if asks.penalised else set()),
        (schema.BIAS, {token for token, _ in asks.bias}),
        (schema.BAD_WORDS, {word[-1] for word in asks.bad_words}),
        (schema.MIN_TOKENS, set(asks.stop) if asks.min_tokens else set()),
    )
    return next(((word,) for word, scope in scopes if wrong <= scope and 2 * len(scope) < width), ())


def explained(row: LogitsRow, token: bool = False) -> tuple[Way, ...]:
    """(words of the processors, how) of each way to process the row wrongly that gives just what the engine left, as
    far as that was seen, and, if ``token``, what it took."""
    found: list[Way] = []
    for words, how, other in _variants(row):
        # Of what the best that were left do not show, penalties alone touch single tokens: a list that another request
        # has would have changed these, too, and explains any draw by chance.
        if token and row.left is not None and words != (schema.PENALTIES,):
            continue
        try:
            z, bound = processed(other)
        except Unknown:
            continue
        if (row.left is None or not deviations(z, bound, row)) and (not token or _taken(z, bound, other)):
            found.append((words, how))
    return tuple(dict.fromkeys(found))


def _taken(z: np.ndarray, bound: np.ndarray, row: LogitsRow) -> bool:
    asks, token = row.asks, row.token
    if asks is None or token is None or not row.whole or token >= len(z):
        return False
    if asks.greedy:
        return bool(z[token] >= z.max() - 2.0 * float(bound.max()))
    return drawn(z, asks, row) == token


_BY_PROCESSOR: tuple[tuple[tuple[str, ...], str], ...] = (
    (("repetition", "presence", "frequency"), schema.PENALTIES),
    (("bias",), schema.BIAS),
    (("allowed",), schema.ALLOWED),
    (("bad_words",), schema.BAD_WORDS),
    (("min_tokens", "stop"), schema.MIN_TOKENS),
)
_COUNTS = np.arange(17)
"""Chosen: how often a token may have been generated, where it is asked whether any past explains a penalty."""


def _other_past(row: LogitsRow) -> bool:
    """Whether the logits that were left are those of the request's own penalties for some other past."""
    asks = row.asks
    if asks is None or not asks.penalised or row.left is None:
        return False
    try:
        base, _ = processed(replace(row, asks=replace(asks, repetition=1.0, presence=0.0, frequency=0.0)))
    except Unknown:
        return False
    real = np.isfinite(row.left[0])
    scale = asks.temperature if row.scaled and not asks.greedy else 1.0
    values, z = row.left[0][real] * scale, base[row.left[1][real].astype(np.int64)]
    seen = np.where(z > 0, z / asks.repetition, z * asks.repetition)
    after = asks.frequency * _COUNTS + asks.presence * (_COUNTS > 0)
    may = np.concatenate([z[:, None], seen[:, None] - after[None, :]], 1)
    with np.errstate(invalid="ignore"):
        size = np.abs(z)[:, None] + np.abs(may) + after.max()
        near = np.abs(may - values[:, None]) <= SAMPLER_STEPS * SAMPLER_ROUND * size
    return bool(len(values)) and bool(near.any(1).all())


def _variants(row: LogitsRow) -> Iterator[tuple[tuple[str, ...], str, LogitsRow]]:
    asks = row.asks
    if asks is None:
        return
    active = asks.processors
    theirs = [other for other, _ in row.others if other.digest != asks.digest]
    if schema.PENALTIES in active:
        settings = (schema.PENALTIES,)
        if row.output is not None and len(row.output):
            yield settings, "as if nothing had been generated yet", replace(row, output=_NOTHING)
            yield settings, "as without the last token that was generated", replace(row, output=row.output[:-1])
        own = row.prompt
        if own is not None and asks.repetition != 1.0:
            yield settings, "as if the prompt did not count", replace(row, prompt=_NOTHING)
        prompts = [p for _, p in row.others if p is not None and own is not None and not np.array_equal(p, own)]
        for prompt in prompts if asks.repetition != 1.0 else ():
            yield settings, "as if another request's prompt were its own", replace(row, prompt=prompt)
    without: Sequence[tuple[str, dict[str, object]]] = (
        (schema.PENALTIES, {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}),
        (schema.BIAS, {"bias": ()}),
        (schema.ALLOWED, {"allowed": None}),
        (schema.BAD_WORDS, {"bad_words": ()}),
        (schema.MIN_TOKENS, {"min_tokens": 0}),
    )
    for word, change in without:
        if word in active:
            yield (word,), f"as without {word}", replace(row, asks=replace(asks, **change))  # type: ignore[arg-type]
    if asks.penalised:
        for name, usual in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
            if getattr(asks, name) != usual:
                less = replace(asks, **{name: usual})  # type: ignore[arg-type]
                yield (schema.PENALTIES,), f"as without the {name} penalty", replace(row, asks=less)
    if len(active) > 1:
        every = {k: v for _, change in without for k, v in change.items()}
        yield active, "as without any of them", replace(row, asks=replace(asks, **every))  # type: ignore[arg-type]
    for fields, word in _BY_PROCESSOR:
        for other in theirs:
            if any(getattr(other, f) != getattr(asks, f) for f in fields):
                has = replace(asks, **{f: getattr(other, f) for f in fields})
                yield (word,), f"with the {word.removeprefix('a ')} of another request", replace(row, asks=has)
