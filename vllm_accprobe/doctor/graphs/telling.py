"""What a proof says: a table and sentences for people, one object for programs.

Not here: what is true (proof.py); printing and exit codes (cli/doctor.py).
"""

from __future__ import annotations

from typing import Any

from vllm_accprobe.doctor.graphs.proof import CHANGED, SAME, Culprit, Ran, TapProof, differs, number
from vllm_accprobe.doctor.graphs.same_bits import Tally

_HEAD = ("run", "taps", "tokens", "top logits", "logits", "root", "root rel_l2", "key", "time")
DISTRUST = "a bug of memory that is used again too early can hide while taps stand: docs/capture.md, When to distrust"


def lines(proof: TapProof) -> list[str]:
    """The table, what differs first, the verdict last."""
    out = _table(proof.runs)
    if any(ran.outcome is not None and ran.outcome.behind for ran in proof.runs):
        out.append("rows behind a token that differs have other inputs, and are not compared")
    for ran in proof.runs:
        if ran.outcome is not None and not ran.outcome.batches:
            out.append(f"{ran.name}: other batches than off: bits may differ for that alone")
        if ran.same_answers is False:
            out.append(f"{ran.name}: the server's answers differ from off's")
        if ran.parting is not None:
            one = ran.parting
            out.append(
                f"{ran.name}: first other value than on's at {one.tap} {one.role}"
                f" ({one.spot.differing} of {one.spot.rows} rows, rel_l2 {_figure(one.spot.rel_l2)})"
            )
    out += proof.notes
    out += [_blame(one) for one in proof.culprits]
    return [*out, verdict(proof)]


def verdict(proof: TapProof) -> str:
    """The last line."""
    if proof.verdict == SAME:
        full = next((ran for ran in proof.runs if ran.name == "full"), None)
        said = "looking changed nothing: tokens, logits and the model's output are the same bits, with taps and without"
        if full is not None and full.same is False and full.outcome is not None:
            said += f"; the full set does change them (root rel_l2 {_figure(full.outcome.root.rel_l2)})"
        return f"{said}\n({DISTRUST})"
    if proof.verdict == CHANGED:
        wrong = [ran.name for ran in proof.runs if ran.name in ("on", "selected") and ran.same is False]
        return f"LOOKING CHANGED THE RESULT: {' and '.join(wrong)} against off"
    return f"nothing could be proved: {proof.why}"


def to_json(proof: TapProof) -> dict[str, Any]:
    """What ``--json`` prints. Figures are of each run against the first one without taps; null where there are none."""
    return {
        "schema": 1, "verdict": proof.verdict, "why": proof.why or None, "repeats": proof.repeats,
        "runs": [_run(ran) for ran in proof.runs],
        "culprits": [
            {"run": one.run, "module": one.module or None, "before": one.before, "runs": one.ran,
             "root_rel_l2": number(one.root_rel_l2)} for one in proof.culprits
        ],
        "notes": list(proof.notes),
    }  # fmt: skip


def _run(ran: Ran) -> dict[str, Any]:
    said, parting = ran.outcome, ran.parting
    figures = None if said is None else {
        "tokens": differs(said.tokens.same), "top_logits": differs(said.top_logits.same),
        "logits": differs(said.logits.same), "root": differs(said.root.same),
        "root_rel_l2": number(said.root.rel_l2), "answers": differs(ran.same_answers),
        "rows": said.root.rows, "rows_behind_a_token": said.behind, "same_batches": said.batches,
    }  # fmt: skip
    return {
        "name": ran.name, "dump": ran.place, "seconds": round(ran.seconds, 1), "set": ran.graphs.get("set"),
        "taps": ran.taps, "chosen": ran.graphs.get("chosen", 0), "key": ran.graphs.get("key") or None,
        "same": ran.same, "changed": figures,
        "first_parting": None if parting is None else {
            "tap": parting.tap, "role": parting.role, "rank": parting.rank, "rows": parting.spot.rows,
            "differing": parting.spot.differing, "rel_l2": number(parting.spot.rel_l2),
        },
    }  # fmt: skip


def _table(runs: tuple[Ran, ...]) -> list[str]:
    rows = [list(_HEAD)]
    for ran in runs:
        said = ran.outcome
        spots = ["-"] * 5 if said is None else [
            *map(_cell, (said.tokens, said.top_logits, said.logits, said.root)), _figure(said.root.rel_l2),
        ]  # fmt: skip
        taps = str(ran.taps) + (f" ({ran.graphs.get('set')})" if ran.taps else "")
        rows.append([ran.name, taps, *spots, str(ran.graphs.get("key") or "-")[:8], f"{ran.seconds:.0f} s"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(spot: Tally) -> str:
    if not spot.rows:
        return "-"
    return f"{spot.differing} of {spot.rows}" if spot.differing else f"same ({spot.rows})"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _blame(one: Culprit) -> str:
    if not one.module:
        return (
            f"{one.run}: taps at all {one.before} modules change nothing as long as none is chosen: what changes the "
            "result is what is chosen, or another setting"
        )
    alone = (
        "no tap in front of it" if not one.before else f"taps at the {one.before} modules in front of it change no bit"
    )
    return f"{one.run}: first module whose compiled code changed: {one.module} ({alone}; {one.ran} runs)"
