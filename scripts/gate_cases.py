"""Sends to each pair of lab/gate_pairs.py, judges it as `accprobe gate` does, and prints a table.

    python scripts/gate_cases.py --keep DIR                 # what lies there already is not run again
    python scripts/gate_cases.py --keep DIR --only '*chunk*'  # a glob over titles
    python scripts/gate_cases.py --keep DIR --half held-out
    python scripts/gate_cases.py --list

Exit codes: 0 when every clean pair passes and every fault fails, 1 when not, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from lab.gate_lab import EngineError, GateBench, GateOutcome  # noqa: E402
from lab.gate_pairs import CLEAN, FAULTS, WAYS, GateCase  # noqa: E402

_HEADER = ("", "half", "case", "verdict", "p", "× floor", "without a floor", "condition")


def main() -> int:
    """Runs and judges what was asked for."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--keep", type=Path, help="where the folders lie, and go on from")
    asked.add_argument("--only", default="*", help="glob over titles")
    asked.add_argument("--half", choices=("tuned", "held-out"))
    asked.add_argument("--host", default="*", help="glob over hosts of mine: v1, v2, tp2, ...")
    asked.add_argument("--list", action="store_true")
    args = asked.parse_args()
    cases = [case for case in [*FAULTS, *CLEAN] if _wanted(case, args)]
    if not cases:
        print(f"error: nothing matches --only {args.only!r}; --list shows what there is", file=sys.stderr)
        return 2
    if args.list:
        for case in cases:
            print(f"{case.half:8} {case.title:36} {case.model:10} {case.golden} → {case.mine}, floor {case.floor}")
        return 0
    bench = GateBench(args.keep or Path(tempfile.mkdtemp(prefix="gatecases-")))
    done: list[GateOutcome] = []
    print(_line(_HEADER), _line(["---"] * len(_HEADER)), sep="\n", flush=True)
    try:
        for case in sorted(cases, key=lambda case: WAYS[case.mine].host):
            try:
                outcome = bench.judged(case)
                alone = bench.judged(case, floors=False)
            except EngineError as error:
                print(_line(("error", case.half, case.title, str(error)[:80], "", "", "", "")), flush=True)
                continue
            done.append(outcome)
            print(_line(_row(outcome, alone)), flush=True)
    finally:
        bench.close()
    for half in ("tuned", "held-out"):
        print(_total(half, [o for o in done if o.case.half == half]))
    return 0 if done and len(done) == len(cases) and all(o.right for o in done) else 1


def _wanted(case: GateCase, args: argparse.Namespace) -> bool:
    hosted = fnmatch.fnmatch(WAYS[case.mine].host, args.host)
    return hosted and fnmatch.fnmatch(case.title, args.only) and args.half in (None, case.half)


def _row(o: GateOutcome, alone: GateOutcome) -> list[str]:
    gate, said = o.gate, o.gate.condition
    sentence = "; ".join(c.sentence for c in (said, *said.also)) if said else ""
    if gate.differs is not None:
        sentence = "(differs: " + "; ".join(c.sentence for c in (gate.differs, *gate.differs.also)) + ")"
    everywhere = said is None or (said.axis, said.at) == ("position", 1)  # a single token has nothing to attend to
    ok = o.right and o.named is not False and (o.case.axis is not None or everywhere)
    times = "–" if gate.times is None else f"{gate.times:.3g}"
    return ["ok" if ok else "**no**", o.case.half, o.case.title, str(gate.verdict), f"{gate.p or 0:.2g}", times,
            str(alone.gate.verdict), sentence]  # fmt: skip


def _total(half: str, done: list[GateOutcome]) -> str:
    clean, faults = [o for o in done if o.case.fault is None], [o for o in done if o.case.fault is not None]
    conditional = [o for o in faults if o.case.axis is not None]
    return (
        f"{half}: {sum(not o.right for o in clean)} false alarms of {len(clean)}; "
        f"faults that fail {sum(o.right for o in faults)} of {len(faults)}; "
        f"condition named {sum(bool(o.named) for o in conditional)} of {len(conditional)}, "
        f"as the first {sum(bool(o.first) for o in conditional)}"
    )


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
