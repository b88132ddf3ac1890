"""Partial sums that nobody adds up: told by the bytes that a norm reads."""

from types import SimpleNamespace

import pytest

from vllm_accprobe.comparison.plan.unit import loose, unsummed, unsummed_taps
from vllm_accprobe.dump.schema import Layout, Record

SHARE = "share"


def record(tap, cls, role, rank, digest, layout="replicated"):
    facts = dict.fromkeys(Record.__dataclass_fields__) | {
        "tap": tap, "cls": cls, "role": role, "rank": rank, "hash": f"{digest}{rank}", "step": 3, "call": 0, "seq": 1,
        "layout": Layout(layout, "tp", rank, 2) if layout == "partial" else Layout(layout),
    }  # fmt: skip
    return Record(**facts)


def dump(read, role="input.x", cls="RMSNorm", ranks=(0, 1)):
    records = []
    for rank in ranks:
        records += [
            record("l.mlp.down_proj", "RowParallelLinear", "output.0", rank, SHARE, "partial"),
            record("l.mlp", "MLP", "output.0", rank, SHARE, "partial"),
            record("norm", cls, role, rank, read),
        ]
    return SimpleNamespace(ranks=ranks, records=records)


def test_what_a_norm_reads_as_a_whole_is_no_share() -> None:
    wrong = dump(SHARE)
    found = loose(wrong)
    assert found == {(0, 3, "share0"), (1, 3, "share1")}
    assert unsummed_taps(wrong, found) == ["l.mlp.down_proj"]
    assert unsummed(wrong) == {(0, 3, 1), (1, 3, 1)}


@pytest.mark.parametrize(
    "honest",
    [
        dump("sum"),
        dump(SHARE, cls="MoERunner"),  # whoever adds up reads shares
        dump(SHARE, role="output.0"),
        dump(SHARE, ranks=(0,)),
    ],
)
def test_shares_that_somebody_may_add_up_stay_shares(honest: SimpleNamespace) -> None:
    assert loose(honest) == frozenset()
    assert unsummed_taps(honest, frozenset()) == []
    assert unsummed(honest) == frozenset()
