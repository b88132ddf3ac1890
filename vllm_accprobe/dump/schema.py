"""The words of the dump: run.json, each line of a journal, and how the tensor of one rank is a part of the whole.

The problem: capture (inside vLLM) and analysis (anywhere) share nothing but files, so every name, unit and default of
those files must be said once. The idea: plain frozen dataclasses, one per kind of line; JSON keys are the field names,
except that ``cls`` is spelt ``class`` and a payload's three fields stand in the tensor's line itself. One value next to
each tensor says how to put the whole together without knowing the model. docs/dump-format.md says the same in prose.

Not here: finding a layout (capture/core/layout.py) and undoing it (align/ranks.py), lines as text (journal.py), labels
(label_files.py), what a dtype's bits mean (dtypes.py).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """How this rank's tensor is a part of the whole.

    kind:
      ``replicated``  every rank of the group holds the whole
      ``shard``       the whole is cut along ``dim`` (counted from the end, e.g. -1)
      ``partial``     the whole is the sum over the ranks (a row-parallel product before its all-reduce)
      ``own``         each rank has a tensor of its own, of the images that were distributed to it; its rows say which
      ``unknown``     capture could not tell; analysis compares replicas or guesses from shapes, and says so
    group: ``tp`` or ``ep``: the ranks in question; ``index`` of ``size`` is this rank's place in it.
    parts: for ``shard``: the blocks along ``dim`` in this rank's tensor, in order, as [local size, replicas]. A QKV
      projection has three, q, k and v; ``replicas`` > 1 says that so many neighbouring ranks hold the same block (KV
      heads fewer than ranks). The whole is, block by block, the concatenation over every replicas-th rank.
    valid: for ``shard``: how much of the whole is real along ``dim`` (a vocabulary without its padding), or None.
    """

    kind: str
    group: str = "tp"
    index: int = 0
    size: int = 1
    dim: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    valid: int | None = None

    def to_event(self) -> dict[str, Any]:
        """The keys of a line's ``layout``; those that are the default may be missing."""
        event: dict[str, Any] = {"kind": self.kind}
        if self.size > 1 or self.kind != "replicated":
            event |= {"group": self.group, "index": self.index, "size": self.size}
        if self.kind == "shard":
            event |= {"dim": self.dim, "parts": [list(p) for p in self.parts]}
            if self.valid is not None:
                event["valid"] = self.valid
        return event


REPLICATED = Layout("replicated")
OWN = "own"


SCHEMA = 1
ROOT_TAP = "<root>"
"""Tap of the model itself, whose module path is the empty string."""
RUN_JSON = "run.json"
JOURNAL = "journal.jsonl"
PREFILL, DECODE = "prefill", "decode"

TOKENS, LOGITS = "tokens", "logits"
"""Names of the two row spaces that every step of a language model has. Others: ``vision/<k>``, see RowSpace."""
PADDING = f"{TOKENS}/padding"
"""The row space of rows that a captured graph computes behind the tokens' and that belong to no request."""
ADAPTER_ROLE = "lora."
"""Begins, behind ``param.``, the role of a LoRA adapter's weight: ``param.lora.<adapter>.lora_a``."""
ADAPTER_ANEW = "an adapter of this name was loaded again with other weights: the first ones are in the dump"
"""Why a weight of an adapter was skipped."""
DRAFT_TAP = "draft:"
"""Begins the tap of a draft model's parameter."""
DEALT = "#"
"""Stands in the name of a vision space whose images were distributed to ranks: ``vision/4#1`` is this rank's own."""


def rank_dir(rank: int) -> str:
    """Name of a rank's directory in the dump."""
    return f"rank{rank:04d}"


def segment_name(index: int) -> str:
    """Name of a finished segment."""
    return f"seg-{index:05d}.safetensors"


def hash_tokens(ids: Iterable[int]) -> str:
    """128-bit BLAKE2b of the token ids as little-endian int32: the identity of a prompt, as 32 hex digits."""
    return hash_token_bytes(b"".join(int(i).to_bytes(4, "little", signed=True) for i in ids))


def hash_token_bytes(ids: bytes) -> str:
    """The same of ids that are little-endian int32 already."""
    return hashlib.blake2b(ids, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics over all elements of one tensor, float64.

    ``min``, ``max``, ``mean`` and ``l2`` (Euclidean norm) are over the finite elements only and None where there is
    none; ``nan`` and ``inf`` count the others; ``count`` is the number of elements in all.
    """

    count: int
    min: float | None
    max: float | None
    mean: float | None
    l2: float | None
    nan: int
    inf: int

    @property
    def std(self) -> float | None:
        """Population standard deviation, from l2 and mean (relative accuracy about 1e-8 of l2/sqrt(n))."""
        n = self.count - self.nan - self.inf
        if n <= 0 or self.mean is None or self.l2 is None:
            return None
        return float(max(self.l2 * self.l2 / n - self.mean * self.mean, 0.0) ** 0.5)


@dataclass(frozen=True, slots=True)
class Image:
    """One multi-modal item of a request: content ``hash``, first placeholder position ``pos``, ``n`` placeholders."""

    hash: str
    pos: int
    n: int


GRAMMAR = "a grammar"
ALLOWED = "allowed token ids"
BAD_WORDS = "bad words"
MIN_TOKENS = "a minimum of tokens"
BIAS = "a logit bias"
PENALTIES = "penalties"
BUDGET = "a thinking budget"
TRACE = "a replayed trace"
WATERMARK = "a watermark"
NAMED_TOKENS = "tokens that the client names"
"""What changes logits, or the token, of a request: words of the lines ``masks`` and ``request``."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """What one request requires of the sampler, as the scheduler passed it to the runner. Each default requires
    nothing.

    temperature: below 1e-5 the request is greedy. bias: (token, what is added) pairs. allowed: the only tokens that may
    be taken, None for all. stop: the tokens that ``min_tokens`` forbids until so many are generated. bad_words: token
    sequences whose last token is forbidden behind the others. prompt: the distinct tokens of the prompt, where a
    repetition penalty reads them and a row map may not have them (a prefix hit). also: what else changes this request's
    logits or tokens and is not written down here, in the words above, or because it is too long. digest: of all of
    it, the long ones included: equal for equal parameters.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt: tuple[int, ...] | None = None
    also: tuple[str, ...] = ()
    digest: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY

    @property
    def penalised(self) -> bool:
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    @property
    def processors(self) -> tuple[str, ...]:
        """What these parameters let change the logits, in the words above, sorted."""
        found = {
            PENALTIES: self.penalised, BIAS: self.bias, ALLOWED: self.allowed is not None,
            BAD_WORDS: self.bad_words, MIN_TOKENS: self.min_tokens and self.stop,
        }  # fmt: skip
        return tuple(sorted({w for w, there in found.items() if there} | (set(self.also) - {NAMED_TOKENS})))


GREEDY = 1e-5
"""vLLM's: below it a temperature means the largest logit [vllm/sampling_params.py, _SAMPLING_EPS]."""


@dataclass(frozen=True, slots=True)
class Request:
    """``{"event": "request"}``. ``req`` is the rank's own small number for it, used by segments.

    ``id`` is the external id (the client's, or the front end's counter), ``internal_id`` the engine's;
    ``prompt`` is hash_tokens(prompt ids), or the hash of a prompt that came as embeddings; ``adapter`` the name of the
    LoRA adapter, "" for none, None where the capture does not know; ``ordinal`` counts earlier requests of this run
    with the same prompt and adapter. ``salt``: a hash of the salt that keeps its prefixes from other requests, None for
    none. ``sampling``: None where the capture does not know it.
    """

    req: int
    id: str
    internal_id: str
    prompt: str
    prompt_len: int
    ordinal: int = 0
    images: tuple[Image, ...] = ()
    adapter: str | None = None
    salt: str | None = None
    sampling: SamplingParameters | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """``n`` consecutive stored rows of one request at positions ``pos`` .. ``pos + n - 1``.

    ``row`` is the first one's row in the tensor as the model saw it. In a vision space ``image`` is the item's
    index in its request and ``pos`` counts rows within that image. ``drafts``: the last so many rows are guesses that
    the step verifies; None for none, and in dumps that do not tell.
    """

    req: int
    pos: int
    n: int
    row: int
    phase: str = PREFILL
    image: int | None = None
    drafts: int | None = None


@dataclass(frozen=True, slots=True)
class RowSpace:
    """``{"event": "rows"}``: which row is what, for all tensors of ``step`` whose ``rows`` is ``space``.

    The stored rows are the segments one after the other. ``ids`` holds one token id per stored row (tokens and logits
    spaces; empty elsewhere). ``src_rows`` is the number of rows the model computed, padding included. ``padding``: how
    many rows the space PADDING has; the first is the tensor's row ``Step.batch["tokens"]``. ``vision/<k>`` spaces hold
    k rows per placeholder token as a fraction string: ``vision/4`` patches, ``vision/1`` merged patches,
    ``vision/image`` one row per image. Behind ``#`` stands a number where the encoder's images were distributed to
    ranks (in the n-th call of the step): the rows are this rank's, and other ranks have others.
    """

    step: int
    space: str
    src_rows: int
    segments: tuple[Segment, ...]
    ids: tuple[int, ...] = ()
    padding: int | None = None

    @property
    def n(self) -> int:
        """How many rows are stored."""
        return sum(s.n for s in self.segments) + (self.padding or 0)

    def stretches(self) -> Iterator[tuple[Segment, slice]]:
        """Each segment with the stored rows that are its."""
        stop = 0
        for s in self.segments:
            start, stop = stop, stop + s.n
            yield s, slice(start, stop)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The captured graph that computed a step. mode: ``PIECEWISE`` or ``FULL``; size: rows of its tensors, those of
    padding included, for which it was captured."""

    mode: str
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """``{"event": "step"}``: one execute_model with real requests. ``batch`` tells the whole batch's size, also
    of requests that are not stored: ``{"requests", "tokens", "padded"}``. ``graph``: None where no captured graph
    computed it. A later line of the same step replaces the earlier one."""

    step: int
    batch: Mapping[str, int] = field(default_factory=dict)
    time: float = 0.0
    graph: StepGraph | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """``{"event": "module"}``: one tap of the model, in the order of the module tree. ``attrs`` holds plain numbers,
    strings and booleans that describe the operator (eps, tp_size, head counts). ``source``: where its forward is
    written, ``package/file.py:line``, never a path of a machine; None where that is not known."""

    tap: str
    cls: str
    index: int
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None


OWN_REQUEST = "accprobe-asks"
"""What the gate calls the request by which it asks a server whether it can answer with named tokens: no user's prompt,
which is neither captured nor compared."""
MASKS_KNOWN = "masks_known"
"""Attribute of the tap ``sampler`` in captures that say which logits were masked: there, no line means none."""


NOISE, NOISE_DRAWS = "noise", "noise_draws"
"""Attributes of the tap ``sampler``: what draws the tokens of seeded requests, and the second token that it drew of 64
equal logits by each of the seeds 1 to 8, with commas between them."""
SCALED, FILTERED = "left_scaled", "other_filters"
"""Attributes of the tap ``sampler``: ``output.masked_logits`` of random rows are divided by the temperature, and some
are filtered (V2); names of other code's logits processors that change what is drawn, and leave the best the best."""
GUMBEL, EXPONENTIAL = "gumbel by seed and token", "exponential by torch's generator"
"""Values of NOISE on a CPU; elsewhere the device's type and the name of the sampler's method."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What changed one row of logits. by: in words, sorted: ``a grammar``, ``bad words`` ... see capture/vllm/batch.py;
    grammar: xxh3-128 of the grammar's bitmask: equal ones allow the same tokens; None where that is not known."""

    by: tuple[str, ...]
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Masks:
    """``{"event": "masks"}``: whose logits something changed in ``step`` between the model and the sampler.

    by request's number: what did."""

    step: int
    masked: Mapping[int, Mask]


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the bytes lie: segment ``seg`` of the same rank, ``off`` bytes after the start of its data."""

    seg: int
    off: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """``{"event": "tensor"}`` or, with ``step`` None, ``{"event": "param"}``: one captured tensor.

    rank: global rank whose journal holds the line (not in the line itself).
    seq: place in the order of execution within the step: inputs count when they go in, outputs when they come out.
    dtype: torch's name without prefix: bfloat16, float8_e4m3fn, int64, bool ...; shape: of the stored rows.
    rows: name of the row space along ``row_dim``, or None for a tensor without rows.
    hash: xxh3-128 of the stored bytes, 32 hex digits, or None (a fingerprint only).
    sample: parameters: hash of a fixed sample of elements, see capture/taps/params.py.
    rounded: parameters of a float32 golden: ``dtype:hash`` of the values and of their sample in each dtype of 16 bits.
    mutated: the module changed this input in place (the payload is the value before).
    payload: None in a ``stats`` dump, for a fingerprint, and where ``lost``: its file is not there, or damaged.
    stride, offset: of the tensor as the model had it, in elements, the offset from the beginning of its storage; None
    and 0 where it was contiguous. The payload has no gaps.
    """

    rank: int
    step: int | None
    tap: str
    cls: str
    role: str
    call: int
    seq: int
    dtype: str
    shape: tuple[int, ...]
    rows: str | None
    row_dim: int
    stats: Stats | None
    hash: str | None
    layout: Layout
    payload: Payload | None
    sample: str | None = None
    mutated: bool = False
    stride: tuple[int, ...] | None = None
    offset: int = 0
    lost: bool = False
    rounded: str | None = None

    @property
    def parameter(self) -> bool:
        return self.step is None

    @property
    def name(self) -> str:
        """How people and csv columns call it: ``tap/role``, where it is not 0 ``#call``, and ``@padding``."""
        return f"{self.tap}/{self.which}"

    @property
    def which(self) -> str:
        """The name without its tap, whatever a foreign dump's own name is."""
        return which(self.role, self.call, self.rows)


def which(role: str, call: int, rows: str | None) -> str:
    """`Record.which`."""
    return role + (f"#{call}" if call else "") + ("@padding" if rows == PADDING else "")


@dataclass(frozen=True, slots=True)
class OpCall:
    """``{"event": "op"}``: one call of an operator (``torch.ops.*``); its tensors are records of tap ``tap``.

    rank: as in Record. tap: ``<module path>::<op>``, or ``::<op>`` outside any module; call: its ordinal within the
    step; seq: place in the order of execution, when the call began. op: ``aten.mm.default``. module: the tapped module
    that was running, and module_call which call of it.
    args, kwargs, outputs: VALUES as in JSON, see journal.py; a record with ``role`` may hold a tensor's payload
    (``input.0``, ``input.0.1`` in a list, ``input.<name>`` by keyword, ``output.0``).
    mutates: roles of inputs that the call changed, by hash; what they became is in role ``inplace.<role>``.
    slot: place in the random sample of this operator, where one was kept; a later call with the same replaces it.
    inside: the operator whose Python kernel made the call.
    """

    rank: int
    step: int | None
    tap: str
    op: str
    call: int
    seq: int
    module: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    mutates: tuple[str, ...] = ()
    module_call: int = 0
    slot: int | None = None
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """``{"event": "skip"}``: what was not captured, and why. ``reason``: a short stable phrase, counted by analysis."""

    tap: str
    reason: str
    step: int | None = None
    role: str | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Armed:
    """``{"event": "armed"}``: from ``step`` on the control file's ``selection`` holds; on: 0 for nothing at all."""

    step: int
    on: int
    selection: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """``{"event": "stop"}``: capture ended before the run did: budget spent, disk full, an error in the probe."""

    reason: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """``{"event": "error"}``: something in the probe failed and was survived. where: the tap, or the probe's part."""

    where: str
    message: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """``{"event": "end"}``: the journal's last line when the dump was closed in order."""

    reason: str
    steps: int
    tensors: int
    bytes: int
    skipped: Mapping[str, int] = field(default_factory=dict)


REASON = "called several times in a step with several images: whose rows these are is not known"


def unnamed(records: Sequence[Record], rows: Mapping[tuple[int, int, str], RowSpace]) -> list[int]:
    """Which of one rank's ``records`` have rows of an encoder that cannot be trusted. rows: by (rank, step, space)."""
    calls: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, r in enumerate(records):
        if r.step is not None and r.rows is not None and r.rows.startswith("vision") and DEALT not in r.rows:
            calls[r.tap, r.role][r.step].append(i)
    found: list[int] = []
    for by_step in calls.values():
        if max(map(len, by_step.values())) < 2:
            continue
        several = {step: any(_several(records[i], rows) for i in at) for step, at in by_step.items()}
        usual = max((len(at) for step, at in by_step.items() if not several[step]), default=1)
        for step, at in by_step.items():
            if several[step] and len(at) > usual:
                found += at
    return found


def _several(record: Record, rows: Mapping[tuple[int, int, str], RowSpace]) -> bool:
    """Whether the step has more than one image, as far as its rows tell; those that were not selected count."""
    space = rows.get((record.rank, record.step or 0, record.rows or ""))
    if space is None:
        return False
    return len({(s.req, s.image) for s in space.segments}) > 1 or space.n < space.src_rows
