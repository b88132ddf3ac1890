"""What a rank of errcheck may have found."""

from vllm_accprobe.dump.findings import GOOD_BAD, FirstBad, RankReport

ROW = {"request": "r1", "position": 45, "phase": "decode", "row": 3}
FOUND = FirstBad(
    step=7, order=12, time=100.0, tap="model.layers.3.mlp", cls="MLP", role="output.0", call=0, kind="NaN", nan=2,
    inf=0, saturated=0, verdict=GOOD_BAD, rows=(ROW,), bad_rows=1, all_rows=8,
    inputs=({"role": "input.x", "state": "good", "nan": 0, "inf": 0, "saturated": 0},), tensors="kept in d",
)  # fmt: skip


def report(rank: int, first: FirstBad | None = FOUND, **more: object) -> RankReport:
    return RankReport(rank=rank, state="closed", kinds=("nan",), taps=50, steps=20, first=first, **more)  # type: ignore[arg-type]
