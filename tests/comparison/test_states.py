"""The ledgers' findings in a comparison: first in every report, and the verdict whatever the tensors say."""

import json
from dataclasses import replace
from pathlib import Path

from vllm_accprobe.comparison.runner_inputs import cache_notes, cache_origin, findings, notes, states_of, watched
from vllm_accprobe.dump.journal import StateFinding, StateTotals, sentence
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Module

FOUND = StateFinding(
    7, "freed", "kv", 0, "", 4, 9, "a", "it was given away", None, 0, 31, "b", 3, 0, 69, ("reuse in step 6",)
)  # fmt: skip


def dump(found: tuple[StateFinding, ...] = (), kept: bool = True) -> Dump:
    made = Dump(Path("somewhere"), {})
    made.states = [(0, one) for one in found]
    if kept:
        made.state_totals = {0: StateTotals("sample", 4, 8, 10, 20, 30, len(found))}
    return made


def test_findings_are_plain_values_with_their_sentence() -> None:
    states = states_of((dump(), dump((FOUND,))))
    assert states["golden"]["count"] == 0
    assert states["golden"]["watched"]["0"]["mode"] == "sample"
    (one,) = findings(states, "mine")
    assert one["sentence"] == sentence(FOUND)
    assert json.loads(json.dumps(states)) == json.loads(json.dumps(states))
    assert notes(states) == []


def test_a_golden_with_a_wrong_cache_is_none() -> None:
    (note,) = notes(states_of((dump((FOUND,)), dump())))
    assert note.startswith("GOLDEN'S OWN CACHE WAS WRONG: a block freed while it is still read: step 7")


def test_caches_of_other_formats_are_said_before_all_numbers() -> None:
    sides = []
    for kind in ("auto", "fp8_e5m2"):
        made = dump(kept=False)
        made.modules = {0: [Module("attn", "Attention", 0, {"impl.kv_cache_dtype": kind})]}
        sides.append(made)
    (note,) = cache_notes((sides[0], sides[1]))
    assert "golden's cache is auto, mine's fp8_e5m2" in note
    assert "rounds by up to 2**-3" in note
    assert cache_notes((sides[1], sides[1])) == []
    assert cache_notes((sides[0], dump())) == []


def test_a_finding_fails_what_the_tensors_pass() -> None:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report import facts, markdown, terminal
    from vllm_accprobe.report.html import page

    passed = Comparison("g", "m", {}, {}, [], {}, None, [], {}, "pass", [], [], {})
    assert passed.verdict == "pass"
    assert "states" not in passed.to_json()
    wrong = replace(passed, states=states_of((dump(), dump((FOUND, replace(FOUND, block=10))))))
    assert wrong.verdict == "fail"
    assert replace(wrong, verdict="pass").verdict == "fail"  # whoever says otherwise later
    assert facts.headline(wrong).startswith("FAIL: the cache, not the kernel: a block freed while it is still read")
    assert terminal.lines(wrong)[0] == facts.headline(wrong)
    assert any("block 10" in line for line in terminal.lines(wrong)[1:])
    assert markdown.github_lines(wrong)[0].startswith("::error title=accprobe::FAIL: the cache, not the kernel")
    html = page(wrong)
    assert "the cache, not the kernel" in html.lower().split("</h1>")[0]
    assert "Further findings of the ledger of states" in html
    assert wrong.to_json()["states"]["mine"]["count"] == 2


def test_what_both_runs_do_is_no_difference() -> None:
    golden, mine = replace(FOUND, block=3, step=9), FOUND
    states = states_of((dump((golden,)), dump((mine,))))
    assert findings(states, "mine") == findings(states, "golden") == []
    assert cache_origin(states) is None
    assert states["mine"]["count"] == 0
    (note,) = notes(states)
    assert note.startswith("in both runs, and so no difference between them: the cache: a block freed")
    other = states_of((dump((replace(golden, request="c"),)), dump((mine,))))
    assert len(findings(other, "mine")) == 1


def test_a_finding_is_the_first_origin_whatever_a_replay_makes_of_the_others() -> None:
    from vllm_accprobe.comparison.result import Comparison

    states = states_of((dump(), dump((replace(FOUND, first="layers.0.attn"),))))
    made = Comparison("g", "m", {}, {}, [], {}, None, [{"module": "layers.0.attn", "role": "output.0"}],
                      {"compared": 0, "flipped": []}, "pass", [], [], {}, states=states)  # fmt: skip
    again = replace(made, verdict="pass", origins=[{"module": "x", "role": "output.0"}, *made.origins[:1]])
    for result in (made, again):
        assert result.verdict == "fail"
        assert [o["role"] for o in result.origins] == ["cache", "output.0"]
    assert (made.origins[0]["module"], made.origins[0]["class"]) == ("layers.0.attn", "KV cache")
    assert made.origins[0]["evidence"] == "values"


def test_the_ledger_that_every_capture_has_is_no_comparison() -> None:
    made = dump()
    made.state_totals = {0: StateTotals("owners", 4, 8, 0, 0, 30, 0)}
    assert watched(states_of((dump(), made)), "mine") == {}
    assert list(watched(states_of((dump(), dump())), "mine")) == ["0"]
