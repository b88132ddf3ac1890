"""What would decide, as commands, where a comparison leaves its answer open.

The problem: "no operator stands out" is all that these two captures can say, and the reader does not know which further
run would say more. The idea: from a finished comparison it is derived what is missing (a replay, inputs, a second run,
a float32 golden, rows, logits); each gap is a sentence and the commands that close it, with these dumps' paths. Nothing
is reported where the answer is closed. Not here: the finding (judge/), how it is shown (report/).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.align.tokens import AFTER_FLIP
from vllm_accprobe.comparison.gaps import suspects_of
from vllm_accprobe.comparison.pair import FAIL, PASS, SKIP, Pair, counted
from vllm_accprobe.comparison.result import PARTLY, WHOLE, Comparison
from vllm_accprobe.dump.decode import value_at
from vllm_accprobe.judge.near_ties import ROWS_AFTER, UNKNOWN
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, SIBLING_OUTLIER

FEW_ROWS = 32
"""chosen: a share of a few per cent of the rows, which is what a wrong tile or head touches, is one row of so many."""
MOST = 0.5
"""chosen: where more than half was not judged or differs, the other half is the exception."""


@dataclass(frozen=True)
class DumpFacts:
    name: str
    path: str
    run: Mapping[str, Any]

    def of(self, part: str, field: str) -> Any:
        """A field of a part of run.json; None where it is not there, as in another tool's dump."""
        return value_at(self.run, part, field)

    @property
    def ours(self) -> bool:
        return self.run.get("tool") == "accprobe"

    @property
    def task(self) -> str:
        return str(self.of("probe", "task") or "")

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(str(m) for m in self.of("probe", "modules") or ())

    @property
    def inputs(self) -> bool:
        """Whether inputs and outputs were captured with their values, by our probe: what a replay needs."""
        parts = self.of("probe", "parts") or ("input", "output")
        return self.ours and self.task == "tensor" and {"input", "output"} <= set(parts)

    def again(self, what: str) -> str:
        """The name of a further dump of this side, beside this one."""
        return f"{self.path.rstrip('/')}-{what}"

    def capture(self, what: str, dtype: str | None = None, **settings: str) -> str:
        values = {"": "1", "DIR": self.again(what)} | settings
        names = " ".join(f"VLLM_ACCPROBE{'_' * bool(k)}{k}={_word(v)}" for k, v in values.items())
        if not self.ours or not str(self.of("engine", "runner") or "").startswith("vllm"):
            more = "".join(f", {k}={_word(v)}" for k, v in settings.items()) + (f", in {dtype}" if dtype else "")
            return f"# what made {_word(self.path)} again{more}, into {_word(self.again(what))}"
        own = self.of("model", "dtype")
        dtype = dtype or ("float32" if own == "float32" else None)
        tp = self.of("parallel", "tp")
        ranks = tp[1] if isinstance(tp, Sequence) and len(tp) == 2 else 1
        out = f"{names} vllm serve {_word(str(self.of('model', 'path') or 'MODEL'))}"
        out += f" --dtype {dtype}" if dtype else ""
        return out + (f" --tensor-parallel-size {ranks}" if isinstance(ranks, int) and ranks > 1 else "")


def dump_facts(result: Comparison) -> tuple[DumpFacts, DumpFacts]:
    golden = DumpFacts("golden", result.golden_path, result.golden_run)
    return golden, DumpFacts("mine", result.mine_path, result.mine_run)


def would_decide(result: Comparison) -> list[dict[str, str]]:
    """compare.json's ``would_decide``: [{"why", "command"}], what decides most first. A command may have several lines,
    to be given one after the other; a line with # says what no command here can do. Empty where the answer is closed,
    and where another tool's standard, which knows no origins, gave it."""
    if result.foreign is not None or not (result.origins or any(p.status != SKIP for p in result.pairs)):
        return []  # another tool's, or about no tensors at all
    case = _Case(result, *dump_facts(result))
    found = case.passed() if result.verdict == PASS else case.failed()
    return [{"why": why, "command": command} for why, command in found]


def not_checked(result: Comparison) -> dict[str, str] | None:
    """Why the operators, or some of them, were compared and not checked, and what would check them: {"why",
    "command"}, the command "" where nothing can. None where everything that can be checked was, and where no tensors
    were compared."""
    if result.replayed == WHOLE or not any(p.status != SKIP for p in result.pairs):
        return None
    why, command = _Case(result, *dump_facts(result)).unchecked()
    return {"why": why, "command": command}


def convicted(origin: OriginEntry) -> bool:
    """Whether an origin breaks a floor that needs no further witness: any but that of its sibling layers, and not
    behind an unseen router. An origin that does not say its tier rests on fixed limits."""
    return origin.get("tier") not in (SIBLING_OUTLIER, BEHIND_A_ROUTER) or str(origin.get("role")).startswith("param.")


_Step = tuple[str, str]
"""(why, command)."""


@dataclass(frozen=True)
class _Case:
    result: Comparison
    golden: DumpFacts
    mine: DumpFacts

    def failed(self) -> Iterator[_Step]:
        origins = self.result.origins
        if origins and convicted(origins[0]):
            return
        yield from self._values()
        yield from self._eager()
        yield from self._replay()
        yield from self._second_run()
        yield from self._float32()
        yield from self._modules()
        yield from self._rows()
        yield from self._logits()

    def passed(self) -> Iterator[_Step]:
        yield from self._values()
        yield from self._unjudged()
        yield from self._without_partner()
        yield from self._logits()

    def unchecked(self) -> _Step:
        if not (self.golden.ours and self.mine.ours):
            return "files of another tool do not say all that an operator read", ""
        if self.golden.inputs and self.mine.inputs:
            if self.result.replayed:
                why = "the time for a replay ran out, or only what was suspected was replayed"
                return why, self._compare("--replay")
            return "no operator was computed again from what it read (a replay needs torch)", self._compare("--replay")
        if self.mine.inputs:
            why = "golden holds no inputs; mine's operators can be checked alone"
            return why, f"accprobe opcheck {_word(self.mine.path)}"
        poor = [s for s in self._sides() if not s.inputs]
        which = " and ".join(s.name for s in poor)
        return (
            f"{which} {'hold' if len(poor) > 1 else 'holds'} no inputs with their values, which a check needs",
            self._anew("inputs", poor, "--replay", TASK="tensor", PARTS="input,output,params"),
        )

    # --- what may be missing -----------------------------------------------------------------------------------

    def _values(self) -> Iterator[_Step]:
        poor = [s for s in self._sides() if s.ours and s.task != "tensor"]
        by_statistics = sum(p.max_abs_err is None for p in self._judged()) if poor else 0
        if by_statistics:
            which = " and ".join(s.name for s in poor)
            verb = "hold" if len(poor) > 1 else "holds"
            judged = f"{counted(by_statistics, 'pair')} {'was' if by_statistics == 1 else 'were'}"
            yield (
                f"{which} {verb} statistics only, which show less than values do: {judged} judged by them",
                self._anew("tensors", poor, TASK="tensor"),
            )

    def _eager(self) -> Iterator[_Step]:
        blind = [s for s in self._sides() if s.of("probe", "graphs")]
        if blind:
            yield (
                f"{' and '.join(s.name for s in blind)} ran as graphs, in which nothing is seen: eager, each module is",
                self._anew("eager", blind, GRAPHS="0"),
            )

    def _replay(self) -> Iterator[_Step]:
        if self.result.replayed == WHOLE or not all(s.ours and s.task == "tensor" for s in self._sides()):
            return
        if all(s.inputs for s in self._sides()):
            what = "only what was suspected was replayed" if self.result.replayed == PARTLY else "nothing was replayed"
            yield f"{what}; a replay tells which operator is wrong for its own inputs", self._compare("--replay")
            return
        if not self.result.origins:
            return
        taps = ",".join(suspects_of(self.result.origins[0]))
        yield (
            "inputs were not captured, so nothing can be replayed; with them, a replay tells whether this operator is "
            "wrong for its own",
            self._anew("inputs", self._sides(), "--replay", PARTS="input,output,params", MODULES=taps),
        )

    def _second_run(self) -> Iterator[_Step]:
        if self.result.standard.get("floor"):
            return
        g = self.golden
        floor = g.again("floor")
        yield (
            "a second run of golden's side, batched in another way, shows what correct runs differ by",
            f"{g.capture('again')}\n"
            f"accprobe compare {_word(g.path)} {_word(g.again('again'))} --calibrate {_word(floor)}\n"
            f"{self._compare('--floor', floor)}",
        )

    def _float32(self) -> Iterator[_Step]:
        own = [str(s.of("model", "dtype") or "") for s in self._sides()]
        if own[0] not in ("bfloat16", "float16") or own[0] != own[1] or self._alike_upstream() > MOST:
            return
        yield (
            f"golden is {own[0]} as mine is, and what comes before the error differs too: of a float32 golden, all "
            "differences are mine's",
            f"{self.golden.capture('float32', 'float32')}\n{self._compare(golden=self.golden.again('float32'))}",
        )

    def _modules(self) -> Iterator[_Step]:
        some = [s for s in self._sides() if s.chosen]
        if some and not self.result.origins:
            yield (
                f"{' and '.join(s.name for s in some)} kept only some modules ({', '.join(some[0].chosen)}): the error "
                "may come from one that was not captured",
                self._anew("whole", some),
            )

    def _rows(self) -> Iterator[_Step]:
        rows = int(self.result.coverage.get("rows_compared") or 0)
        if 0 < rows < FEW_ROWS:
            yield (
                f"{counted(rows, 'row')} compared, too few to tell a habit from an accident: send both sides more and "
                "longer requests",
                self._anew("more", self._sides()),
            )

    def _logits(self) -> Iterator[_Step]:
        unknown = sum(f.get("why") == UNKNOWN for f in self.result.tokens.get("flipped") or ())
        if unknown:
            yield (
                f"{counted(unknown, 'flipped token')} may be near ties: the logits, which tell, were not captured",
                self._anew("logits", self._sides(), MODULES="logits"),
            )

    def _unjudged(self) -> Iterator[_Step]:
        skipped = self.result.coverage.get("skipped") or {}
        compared = int(self.result.coverage.get("rows_compared") or 0)
        ties, flips = int(skipped.get(ROWS_AFTER) or 0), int(skipped.get(AFTER_FLIP) or 0)
        # Rows after a near tie were compared and then left unjudged; those after a flip were never compared.
        if ties + flips > MOST * (compared + flips):
            yield (
                f"{ties + flips:,} of {counted(compared + flips, 'row')} are not judged, for they come after a near "
                "tie or a flipped token: send both sides more requests, and shorter ones",
                self._anew("more", self._sides()),
            )

    def _without_partner(self) -> Iterator[_Step]:
        alone = self.result.coverage.get("taps_only_mine") or ()
        if alone and self.result.replayed != WHOLE and self.mine.inputs:
            yield (
                f"{counted(len(alone), 'module')} of mine have no partner in golden, first {alone[0]}; run again from "
                "their own inputs they need none",
                f"accprobe opcheck {_word(self.mine.path)}",
            )

    # --- facts -------------------------------------------------------------------------------------------------

    def _sides(self) -> tuple[DumpFacts, DumpFacts]:
        return self.golden, self.mine

    def _judged(self) -> list[Pair]:
        return [p for p in self.result.pairs if p.status != SKIP and not p.role.startswith("param.")]

    def _alike_upstream(self) -> float:
        """The share of what comes before the first failed pair, all where none fails, that is identical."""
        judged = self._judged()
        first = min((p.order for p in judged if p.status == FAIL), default=None)
        before = [p.identical for p in judged if first is None or p.order < first]
        return sum(before) / len(before) if before else 1.0

    def _compare(self, *more: str, golden: str = "", mine: str = "") -> str:
        words = ["accprobe", "compare", golden or self.golden.path, mine or self.mine.path]
        return " ".join(map(_word, [*words, *self.result.options, *more]))

    def _anew(self, what: str, sides: Sequence[DumpFacts], *more: str, **settings: str) -> str:
        """Captures ``sides`` again and compares them, with ``more``. what, settings: as DumpFacts.capture's."""
        compare = self._compare(*more, **{s.name: s.again(what) for s in sides})
        return "\n".join([*(s.capture(what, **settings) for s in sides), compare])


def _word(text: str) -> str:
    """A word of a command line, quoted where that is needed. A name comes from a dump: a line break in it would end a
    comment, or look like another command; `?` stands for it, as in a glob."""
    return shlex.quote("".join(c if c.isprintable() else "?" for c in text))
