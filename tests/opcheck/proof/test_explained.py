"""A row is explained where both sides checked it and what it read is known; an input, where it is made of such rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.comparison.plan.make_plan import make_plan
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.opcheck.proof.explained import NOT_REPLAYED, UNSEEN, UNSUMMED, WRONG, Explained, explain, place_of
from vllm_accprobe.opcheck.run.result_row import COLUMNS, PASS, CheckResult

ROWS, WIDTH = 12, 64
X = torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(4)).bfloat16()


def dump(root: Path, steps: list[tuple[int, int]]) -> Dump:
    """A projection, of which four modules read the output, a half of it, its sum with itself shifted, and its square
    root, which no module computed."""
    m = Maker(root)
    m.module("<root>", "Tiny")
    for tap in ("proj", "whole", "half", "sum", "root"):
        m.module(tap, "Linear")
    m.request(0, ROWS)
    for step, (start, n) in enumerate(steps):
        x = X[start : start + n]
        m.step(step, [(0, start, n)])
        m.call("proj", "Linear", {"x": x}, y := (x.float() * 3 + 1).bfloat16())
        m.call("whole", "Linear", {"x": y}, y + 1)
        m.call("half", "Linear", {"x": y[:, :WIDTH].contiguous()}, y[:, :WIDTH] + 2)
        m.call("sum", "Linear", {"x": y + (y + 1)}, y + 3)
        m.call("root", "Linear", {"x": y.float().abs().sqrt().bfloat16()}, y + 4)
    return open_dump(m.close())


def checked(of: Dump, tap: str, left: tuple[int, ...] = (), status: str = PASS, steps: tuple[int, ...] = (0, 1)):
    """The lines of a replay about the outputs of a tap."""
    blank = dict.fromkeys(COLUMNS) | {"status": status, "left": left, "unchecked_because": "no history" if left else "",
                                      "message": "why"}  # fmt: skip
    for r in of.records:
        if r.tap == tap and r.role.startswith("output") and r.step in steps:
            place = {"rank": r.rank, "step": r.step, "call": r.call, "seq": r.seq}
            yield CheckResult(**blank | place | {"tap": tap, "role": r.role})


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dump, Dump]:
    root = tmp_path_factory.mktemp("explained")
    return dump(root / "golden", [(0, ROWS)]), dump(root / "mine", [(0, 5), (5, 7)])


INPUTS = ("whole", "half", "sum", "root")
PLACES = [place_of("proj", "output.0", 0), *(place_of(tap, "input.x", 0) for tap in INPUTS)]
PROJ, WHOLE, HALF, SUM, ROOT = PLACES


def found(sides: tuple[Dump, Dump], golden: list[CheckResult], mine: list[CheckResult]) -> Explained:
    result = explain(*sides, (golden, mine), PLACES, (), lambda: make_plan(*sides))
    assert Explained.of_plain(result.plain()) == result
    return result


def test_rows_that_both_sides_checked_and_what_is_made_of_them(sides: tuple[Dump, Dump]) -> None:
    golden, mine = sides
    both = [[c for tap in ("proj", "whole") for c in checked(side, tap)] for side in sides]
    result = found(sides, *both)
    assert result.rows[PROJ] == result.rows[WHOLE] == result.rows[HALF] == result.rows[SUM] == {"r0": [(0, ROWS)]}
    assert (result.rows[ROOT], result.why) == ({}, {ROOT: UNSEEN})  # nothing that was captured computed it
    assert result.holds(WHOLE, "r0", ROWS - 1)
    assert not result.holds(WHOLE, "r0", ROWS)
    assert not result.holds(ROOT, "r0", 0)
    # Of one of two summands nobody knows whether it is right.
    alone = found(sides, list(checked(golden, "proj")), list(checked(mine, "proj")))
    assert (alone.rows[HALF], alone.rows[SUM]) == ({"r0": [(0, ROWS)]}, {})


def test_a_row_that_one_side_did_not_check_is_not_explained_and_says_why(sides: tuple[Dump, Dump]) -> None:
    golden, mine = (list(checked(side, "proj")) for side in sides)
    some = found(sides, golden, list(checked(sides[1], "proj", left=(2,))))
    assert some.rows[PROJ] == some.rows[WHOLE] == {"r0": [(0, 2), (3, 7), (8, ROWS)]}
    assert some.why[PROJ] == "no history"
    assert found(sides, list(checked(sides[0], "proj", left=(3,))), mine).why[PROJ] == "golden: no history"
    later = found(sides, golden, list(checked(sides[1], "proj", steps=(1,))))
    assert (later.rows[PROJ], later.why[PROJ]) == ({"r0": [(5, ROWS)]}, NOT_REPLAYED)
    nobody = found(sides, [], mine)
    assert (nobody.rows[PROJ], nobody.why[PROJ]) == ({}, f"golden: {NOT_REPLAYED}")


def test_what_is_wrong_in_one_call_or_in_all_together_explains_nothing(sides: tuple[Dump, Dump]) -> None:
    golden, mine = (list(checked(side, "proj")) for side in sides)
    wrong = found(sides, golden, [replace(mine[0], status="fail"), mine[1]])
    assert (wrong.rows[WHOLE], wrong.why[WHOLE]) == ({"r0": [(5, ROWS)]}, WRONG)
    together = found(sides, golden, [*mine, replace(mine[0], status="fail")])  # a line about all calls comes last
    assert (together.rows[PROJ], together.why[PROJ]) == ({}, WRONG)


def test_everything_inside_of_a_module_is_explained_where_that_is_asked(sides: tuple[Dump, Dump]) -> None:
    both = [list(checked(side, "proj")) for side in sides]
    inside = explain(*sides, tuple(both), (), ("proj",), lambda: make_plan(*sides))
    assert inside.rows.keys() == {PROJ, place_of("proj", "input.x", 0)}
    assert explain(*sides, tuple(both), (), (), lambda: make_plan(*sides)) == Explained()


def test_what_golden_computes_otherwise_is_not_explained(sides: tuple[Dump, Dump]) -> None:
    both = tuple(list(checked(side, "proj")) for side in sides)
    other = explain(*sides, both, PLACES, (), lambda: make_plan(*sides), {"proj": "its scale is 2, golden's is 3"})
    assert (other.rows[PROJ], other.rows[WHOLE]) == ({}, {})
    assert other.why[PROJ] == "its scale is 2, golden's is 3"


def test_a_share_that_nobody_adds_up_is_not_explained(sides, monkeypatch):
    golden, mine = sides
    shares = {(r.rank, r.step, r.seq) for r in mine.records if (r.tap, r.role) == ("proj", "output.0")}
    name = "vllm_accprobe.opcheck.proof.explained.unsummed"
    monkeypatch.setattr(name, lambda d: shares if d is mine else frozenset())
    result = found(sides, list(checked(golden, "proj")), list(checked(mine, "proj")))
    assert (result.rows[PROJ], result.why[PROJ]) == ({}, UNSUMMED)
    assert (result.rows[WHOLE], result.why[WHOLE]) == ({}, UNSUMMED)


def test_an_output_is_explained_where_what_its_call_read_is_compared_or_explained(tmp_path: Path) -> None:
    """Golden has no such input: mine's, which no captured module computed, may be wrong, and no pair would show it."""
    sides = []
    for name in ("golden", "mine"):
        m = Maker(tmp_path / name)
        taps = ("proj", "made", "unseen")
        for tap in ("<root>", *taps):
            m.module(tap, "Linear")
        m.request(0, ROWS)
        m.step(0, [(0, 0, ROWS)])
        m.call("proj", "Linear", {"x": X}, X + 1)
        m.call("made", "Linear", {"x": X + 1} if name == "mine" else {}, X + 2)
        m.call("unseen", "Linear", {"x": X.float().sin().bfloat16()} if name == "mine" else {}, X + 3)
        sides.append(open_dump(m.close()))
    right = [[c for tap in taps for c in checked(side, tap)] for side in sides]
    places = [place_of(tap, "output.0", 0) for tap in taps]
    result = explain(sides[0], sides[1], (right[0], right[1]), places, (), lambda: make_plan(*sides))
    assert [bool(result.rows[place]) for place in places] == [True, True, False]
    assert result.why == {places[2]: UNSEEN}
