"""Train against rollout, as lines and json. Not here: the measures (gate/trainer/ratios.py)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import count, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.gate.trainer.ratios import Ratios, Span

MAX_WORST = 5
_HEADER = ("", "tokens", "mean |dlogp|", "max", "k1", "k3", "ESS", "outside 1/2..2", "outside 0.8..1.2")


def lines(found: Ratios) -> list[str]:
    """The verdict, the table by position, ratios of tokens and sequences, the worst tokens, what was left out."""
    from vllm_accprobe.gate.trainer.ratios import LIMIT

    tokens = sum(s.n for s in found.spans[:1])
    beyond = "above" if found.mult > LIMIT else "within"
    said = f"{found.verdict.upper()}: mean exp|dlogp| {num(found.mult, 4)}, {beyond} {LIMIT}"
    if found.nonfinite:
        said = f"FAIL: {count(found.nonfinite, 'token')} without a finite log-probability; {said.partition(': ')[2]}"
    out = [f"{said} ({count(tokens, 'token')} of {count(found.sequences, 'sequence')}; server: {found.how})", ""]
    rows = [_HEADER, *(_row(s) for s in found.spans)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))]
        out.append("  " + "  ".join(cells).rstrip())
    if found.quantiles:
        out += ["", f"ratio of a token, trainer / server, at 0.1, 1, 50, 99 and 99.9%: {_listed(found.quantiles)}"]
        out += [
            f"of a sequence: geometric mean {_listed(found.geometric)}; log of the product {_listed(found.product)}"
        ]
        whole = found.sequence_ess * found.sequences
        out += [f"effective sample size of the sequences: {num(whole)} of {found.sequences:,}"]
        out += [f"probabilities |p - q|: mean {num(found.prob_mean)}, max {num(found.prob_worst)}"]
        apart = [one for one in found.worst if one[2] != one[3]]
        out += ["furthest apart:"] if apart else []
        for name, ordinal, p, q in apart[:MAX_WORST]:
            out.append(f"  {safe(name)}, answer's token {ordinal}: trainer {num(p, 4)}, server {num(q, 4)}")
    return out + [f"not compared: {n:,} {why}" for why, n in found.left_out.items()]


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(num(v) for v in values)


def _row(s: Span) -> tuple[str, ...]:
    shares = [f"{v:.2%}" for v in (s.beyond, s.clipped)]
    return (s.where, f"{s.n:,}", num(s.mean), num(s.worst), num(s.k1), num(s.k3), num(s.ess, 4), *shares)


def to_json(found: Ratios) -> dict[str, Any]:
    """For programs."""
    from vllm_accprobe.gate.trainer.ratios import LIMIT, QUANTILES

    value = asdict(found)
    worst = [dict(zip(("name", "token", "trainer", "server"), w, strict=True)) for w in value.pop("worst")]
    head = {"schema": 1, "verdict": found.verdict, "limit": LIMIT, "quantiles_at": list(QUANTILES)}
    return head | value | {"worst": worst}
