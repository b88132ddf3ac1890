"""Sampler faults planted in real engines, and clean ones: what compare and opcheck say of each.

The problem: a verdict about samplers is worth what it finds in engines that mix greedy and random requests, seeds,
filters, penalties and lists in one batch, and what it leaves alone where only the batches differ. The idea: one golden
engine, then one engine for each fault of lab/sampler_faults.py and for each clean variation, of the same
requests, in this process; each dump is compared with golden's without a replay, and its sampler's calls are checked
alone, with no golden. A case is right when both fail and name the sampler, or the logits processor that was spoilt, or
when both pass where nothing was planted.

    python scripts/sampler_cases.py --out DIR [--only GLOB] [--page FILE]

Exit code 1 where a case is wrong. Not here: the faults, the engines (lab/state_lab.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT)]

from lab import state_lab as lab  # noqa: E402
from lab.state_lab import Ask, prompt  # noqa: E402

_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repeat": {"repetition_penalty": 1.6},
    "frequent": {"frequency_penalty": 0.9, "presence_penalty": 0.6},
    "nucleus": {"temperature": 0.9, "top_p": 0.6, "seed": 11},
    "topk": {"temperature": 1.4, "top_k": 6, "seed": 12},
    "minp": {"temperature": 1.6, "min_p": 0.12, "seed": 13, "repetition_penalty": 1.3},
    "hot": {"temperature": 1.9, "seed": 14, "presence_penalty": 0.4},
    "bias": {"logit_bias": {40: 6.0, 41: 5.0, 300: -8.0}},
    "allowed": {"allowed_token_ids": list(range(60, 160))},
    "words": {"bad_word_ids": [[token] for token in range(2, 512, 3)]},
    "least": {"min_tokens": 8, "stop_token_ids": list(range(3, 512, 3))},
}
"""What each request asks for. A third of the vocabulary is forbidden where words are, so that some are wanted."""
ASKS = [Ask(name, prompt(9 + 4 * i, i), 12, sampling=own) for i, (name, own) in enumerate(_SETTINGS.items())]


@dataclass(frozen=True)
class Case:
    """One engine. fault: of sampler_faults.py, "" for none. order: of the requests; args: of the engine."""

    name: str
    what: str
    fault: str = ""
    order: Callable[[list[Ask]], list[Ask]] = list
    args: dict[str, Any] = field(default_factory=dict)


def _late(found: list[Ask]) -> list[Ask]:
    return [replace(ask, after=i) for i, ask in enumerate(found)]


CLEAN = (
    Case("clean-again", "the same requests again"),
    Case("clean-reversed", "the other way round", order=lambda found: found[::-1]),
    Case("clean-three", "three requests at a time", args={"max_num_seqs": 3}),
    Case("clean-late", "each request one step later than the one before, the last first",
         order=lambda found: _late(found[::-1])),
)  # fmt: skip


def cases() -> list[Case]:
    """All of them, clean ones first."""
    from lab.sampler_faults import FAULTS

    return [*CLEAN, *(Case(name, kind.what, name) for name, kind in FAULTS.items())]


def answer(model: Path, out: Path | None, found: Sequence[Ask], plant: lab.Plant | None = None,
           env: dict[str, str] | None = None, **args: Any) -> dict[str, list[int]]:  # fmt: skip
    """One engine's answers; its dump is ``out``."""
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_MODULES": "logits,*.embed_tokens"} | (env or {})
    with lab.engine(model, out, "", env, **{"max_num_seqs": 16} | args) as llm:
        if plant is not None:
            plant(llm)
        return lab.serve(llm, found)


def told(golden: Path, mine: Path) -> tuple[str, str, str, str]:
    """(compare's verdict, what it names, opcheck's verdict, what it names) of two dumps, without a replay."""
    from vllm_accprobe.comparison.engine import compare

    result = compare(golden, mine)
    named = "; ".join(f"{o['module']} {o['role']}: {o['class']}: {o['shape']}" for o in result.origins)
    verdict, alone = alone_told(mine)
    return result.verdict, named, verdict, alone


def alone_told(mine: Path) -> tuple[str, str]:
    """(PASS, FAIL, or SKIP where nothing was checked; what is wrong) of the sampler's calls of one dump."""
    from support.opchecked import check

    from vllm_accprobe.dump.reader import open_dump
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, SKIP

    rows = list(check(Calls(open_dump(mine), None), default_references(), ops=["sampler"]))
    wrong = [r for r in rows if r.status in (FAIL, ERROR)]
    if wrong:
        return "FAIL", "; ".join(dict.fromkeys(f"{r.role}: {r.message}" for r in wrong[:3]))
    short = [r for r in rows if (r.status == SKIP or r.checked < r.rows) and r.role != "output.top_ids"]
    unchecked = dict.fromkeys(f"{r.role}: {r.unchecked_because or r.message}" for r in short)
    checked = any(r.role == "output.token" and r.checked for r in rows)
    return "PASS" if checked else "SKIP", "; ".join(list(unchecked)[:3])


def right(case: Case, said: tuple[str, str, str, str]) -> bool:
    """Whether both commands say what they should."""
    from lab.sampler_faults import FAULTS

    compared, named, checked, alone = said
    if not case.fault:
        return compared == "pass" and checked == "PASS"
    word = FAULTS[case.fault].names
    kind = f"logits processor: {word}" in named or (word == "sampler" and "logits processor" not in named)
    by_opcheck = word in alone or word == "sampler"
    return compared == "fail" and "sampler" in named and kind and checked == "FAIL" and by_opcheck


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    lab.prepare()
    from tiny_model import make

    from lab.sampler_faults import FAULTS

    model = make("qwen2", given.out / "models" / "qwen2", num_hidden_layers=2)
    answer(model, given.out / "golden", ASKS)
    rows = []
    for case in cases():
        if not any(fnmatchcase(case.name, glob) for glob in given.only.split(",")):
            continue
        begin = time.monotonic()
        plant = FAULTS[case.fault].plant if case.fault else None
        try:
            answer(model, given.out / case.name, case.order(ASKS), plant, **case.args)
            said = told(given.out / "golden", given.out / case.name)
            good = right(case, said)
        except Exception as error:
            said, good = (f"failed: {type(error).__name__}: {str(error)[:300]}", "", "", ""), False
        rows.append((case, good, said))
        print(f"{'ok ' if good else 'BAD'} {case.name} ({time.monotonic() - begin:.0f} s): {said[0]}: {said[1]}\n"
              f"      opcheck: {said[2]}: {said[3]}", flush=True)  # fmt: skip
    planted = [good for case, good, _ in rows if case.fault]
    clean = [good for case, good, _ in rows if not case.fault]
    missed = sum(said[0] == "pass" or said[2] == "PASS" for case, _, said in rows if case.fault)
    print(f"{sum(planted)} of {len(planted)} faults named, {missed} passed by a command; "
          f"{len(clean) - sum(clean)} alarms of {len(clean)} clean engines")  # fmt: skip
    if given.page:
        given.page.write_text(page(rows), encoding="utf-8")
    return 0 if all(good for _, good, _ in rows) else 1


def page(rows: Sequence[tuple[Case, bool, tuple[str, str, str, str]]]) -> str:
    """A table of all cases."""
    out = ["| case | compare | opcheck | right |", "| --- | --- | --- | --- |"]
    for case, good, (compared, named, checked, alone) in rows:
        both = (compared, named), (checked, alone)
        cells = [": ".join(filter(None, one)).replace("|", "/")[:200] for one in both]
        out.append(f"| {case.what} | {cells[0]} | {cells[1]} | {'yes' if good else 'NO'} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
