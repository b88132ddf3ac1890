"""Two runs of an evaluation: what is paired, what is beyond chance, what flipped."""

from pathlib import Path

import pytest
from made_evaluations import choice, right, sample, write_samples

from vllm_accprobe.gate import evaluations
from vllm_accprobe.gate.evaluations import Evaluation


def both(tmp_path: Path, golden: list, mine: list, name: str = "s.jsonl") -> tuple[evaluations.Side, evaluations.Side]:
    return (
        evaluations.open_side(write_samples(tmp_path / "golden" / name, golden)),
        evaluations.open_side(write_samples(tmp_path / "mine" / name, mine)),
    )


def run(tmp_path: Path, golden: list, mine: list) -> Evaluation:
    return evaluations.evaluate(evaluations.match(*both(tmp_path, golden, mine)))


def test_the_order_of_the_lines_says_nothing(tmp_path: Path) -> None:
    golden, mine = right(30, [3, 4]), right(30, [3, 4])
    mine.reverse()
    for i, line in enumerate(mine):  # a sharded run counts its questions anew
        line["doc_id"] = i
    e = run(tmp_path, golden, mine)
    assert (len(e.matched.pairs), e.flips, e.matched.other_responses) == (30, (), 0)


def test_a_drop_beyond_chance_fails(tmp_path: Path) -> None:
    e = run(tmp_path, right(60, []), right(60, range(15)))
    assert (e.verdict, e.contrasts[0].beyond, e.contrasts[0].lost) == ("fail", True, 15)
    assert e.contrasts[0].high < 0


def test_what_only_one_side_has_is_counted(tmp_path: Path) -> None:
    golden, mine = right(20, [], way="strict"), right(25, [], way="strict")
    golden += right(20, [], way="flexible")
    mine[7]["target_hash"] = "another"
    mine[8]["prompt_hash"] = "another"
    mine[9]["resps"] = [["something else"]]
    m = run(tmp_path, golden, mine).matched
    assert (len(m.pairs), m.left_out, m.other_prompts, m.other_responses) == (19, {evaluations.OTHER_TARGET: 1}, 1, 1)
    assert (m.only_golden, m.only_mine) == ({("", "flexible"): 20}, {("", "strict"): 5})


def test_a_question_that_stands_twice_has_two_partners(tmp_path: Path) -> None:
    same = {"question": "again?"}
    lines = [sample(i, {"acc": float(i % 2)}, doc=same) for i in range(4)]
    for line in lines:
        line["target_hash"] = "x"
    e = run(tmp_path, lines, lines[::-1][:3])
    assert (len(e.matched.pairs), e.flips, sum(e.matched.only_golden.values())) == (3, (), 1)


def test_scores_are_tested_by_flipping_signs(tmp_path: Path) -> None:
    golden = [sample(i, {"rouge": 0.5 + 0.01 * i, "bleu": [1, 2]}) for i in range(40)]
    mine = [sample(i, {"rouge": 0.5 + 0.01 * i - 0.02 * (i % 3), "bleu": [1, 2]}) for i in range(40)]
    e = run(tmp_path, golden, mine)
    (c,) = e.contrasts
    assert (c.binary, c.beyond, c.lost, c.won) == (False, True, 26, 0)
    assert c.p < 1e-4
    assert c.difference == pytest.approx(-0.02 * sum(i % 3 for i in range(40)) / 40)
    assert e.no_numbers == (("bleu (none)", 40),)
    assert len(e.flips) == 26
    assert e.flips[0].size == pytest.approx(0.04)


def test_many_metrics_share_one_rate(tmp_path: Path) -> None:
    """A p of 0.03 is beyond chance alone, and not among ten."""
    lost, n = range(6), 40  # six of six flips one way: p = 2 / 64
    assert run(tmp_path / "one", right(n, []), right(n, lost)).verdict == "fail"
    golden = [sample(i, {f"m{k}": 1.0 for k in range(10)}) for i in range(n)]
    mine = [sample(i, {f"m{k}": float(k > 0 or i not in lost) for k in range(10)}) for i in range(n)]
    assert run(tmp_path / "ten", golden, mine).verdict == "pass"


def test_a_drop_spread_over_tasks_shows_in_all_of_them(tmp_path: Path) -> None:
    for side, wrong in (("golden", []), ("mine", [0, 1, 2])):
        for k in range(6):
            lines = [sample(100 * k + i, {"acc": float(i not in wrong)}) for i in range(30)]
            write_samples(tmp_path / side / f"samples_t{k}_2026-01-01T00.jsonl", lines)
    e = evaluations.evaluate(evaluations.match(*(evaluations.open_side(tmp_path / s) for s in ("golden", "mine"))))
    assert [(c.task, c.n) for c in e.contrasts if c.beyond] == [("all 6 tasks", 180)]
    assert len(e.contrasts) == 7


def test_the_flipped_as_prompts(tmp_path: Path) -> None:
    golden = [choice(i, {"acc": 1.0, "acc_norm": 1.0}) for i in range(3)] + right(5, [])[3:]
    mine = [choice(i, {"acc": float(i == 0), "acc_norm": 0.0}) for i in range(3)] + right(5, [4])[3:]
    left, right_ = both(tmp_path, golden, mine, "samples_é t_2026.jsonl")
    e = evaluations.evaluate(evaluations.match(left, right_))
    lines, without = evaluations.prompts(e.flips)
    assert without == 0
    assert [line["id"] for line in lines] == ["__t-0-0", "__t-0-1", "__t-1-0", "__t-1-1", "__t-2-0", "__t-2-1", "__t-4"]
    assert lines[0]["prompt"] == "0 is odd"
    assert lines[-1]["max_tokens"] == 64
