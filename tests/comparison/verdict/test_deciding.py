"""What would decide: the commands, whole, for each thing that may be missing; and none where nothing is."""

import shlex
from typing import Any

import pytest
from report.report_examples import ORIGIN, comparison, pair

from vllm_accprobe.align.tokens import AFTER_FLIP
from vllm_accprobe.cli import build
from vllm_accprobe.comparison.result import PARTLY, WHOLE, Foreign
from vllm_accprobe.judge.near_ties import ROWS_AFTER, UNKNOWN
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, PROVED, SIBLING_OUTLIER

TAP = ORIGIN["module"]
ODD = ORIGIN | {"tier": SIBLING_OUTLIER, "times": 4.0, "chance": 5e-4}


def run(dtype: str = "bfloat16", tp: int = 1, runner: str = "vllm.v1.worker.gpu_model_runner.R", **probe: Any) -> dict:
    return {
        "tool": "accprobe",
        "model": {"path": "/models/tiny qwen", "dtype": dtype},
        "parallel": {"tp": [0, tp]},
        "engine": {"runner": runner},
        "probe": {"task": "tensor", "parts": [], "modules": [], "graphs": False} | probe,
    }


def failed(**changes: Any) -> Any:
    """A failure that nobody is blamed for, of 500 rows, replayed, against a floor and a float32 golden: nothing that we
    know of is missing."""
    pairs = [pair(status="fail", order=5, max_abs_err=0.1), pair(order=1, max_abs_err=0.1)]
    values = {"verdict": "fail", "pairs": pairs, "coverage": {"rows_compared": 500, "skipped": {}},
              "golden_path": "golden", "mine_path": "mine", "golden_run": run("float32"), "mine_run": run(),
              "standard": {"name": "accprobe", "floor": "second golden run"}, "replayed": WHOLE}  # fmt: skip
    return comparison(**(values | changes))


def passed(**changes: Any) -> Any:
    return failed(**({"verdict": "pass", "pairs": [pair(max_abs_err=0.0)]} | changes))


def asked(result: Any) -> list[tuple[str, list[str]]]:
    return [(step["why"], step["command"].splitlines()) for step in result.would_decide]


def test_nothing_where_the_answer_is_closed():
    assert asked(passed()) == asked(failed()) == []
    bare = {"replayed": "", "standard": {"name": "accprobe"}, "coverage": {"rows_compared": 3}, "golden_run": run()}
    for tier in ({}, {"tier": PROVED, "chance": 0.0}, {"tier": BEYOND_CHANCE, "chance": 1e-4}):
        assert asked(failed(origins=[ORIGIN | tier], **bare)) == []
    weights = ODD | {"role": "param.weight"}
    assert asked(failed(origins=[weights], **bare)) == []
    # A few rows that pass are no open question, nor is a verdict by another tool's threshold.
    assert asked(passed(**bare)) == []
    assert asked(failed(foreign=Foreign("xray", (), []), **bare)) == []


SERVE = "vllm serve '/models/tiny qwen'"
REPLAY = "a replay tells which operator is wrong for its own inputs"
OUTPUTS = {"golden_run": run("float32", parts=["output"]), "mine_run": run(parts=["output"])}
ONLY_INPUTS = f"VLLM_ACCPROBE_PARTS=input,output,params VLLM_ACCPROBE_MODULES={TAP}"
FEW = {"rows_compared": 31, "skipped": {}}
STATISTICS = [pair(max_abs_err=0.0), pair(role="param.w", max_abs_err=None)]
HOLES = {"rows_compared": 100, "skipped": {ROWS_AFTER: 45, AFTER_FLIP: 20}}
ALONE = {"rows_compared": 100, "taps_only_mine": ["model.extra", "model.more"]}
UNJUDGED = [{"request": "a", "ordinal": 1, "why": UNKNOWN}, {"request": "a", "ordinal": 2, "why": "near tie"}]
UPSTREAM = [pair(status="fail", order=5, max_abs_err=0.1), pair(order=1, identical=True, max_abs_err=0.0)]


def anew(what: str, golden: str = "", mine: str = "") -> list[str]:
    """Both sides captured again with settings, and compared."""
    return [f"VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=golden-{what}{golden} {SERVE} --dtype float32",
            f"VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=mine-{what}{mine or golden} {SERVE}",
            f"accprobe compare golden-{what} mine-{what}"]  # fmt: skip


def mine_anew(what: str, settings: str = "") -> list[str]:
    line = f"VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=mine-{what}{settings} {SERVE}"
    return [line, f"accprobe compare golden mine-{what}"]


BLAMED = [[], [ODD]]
OPEN = {
    "no replay": [(failed(replayed="", origins=o), f"nothing was replayed; {REPLAY}",
                   ["accprobe compare golden mine --replay"]) for o in BLAMED],
    "part of a replay": [(failed(replayed=PARTLY, origins=o, options=("--taps", "model.*")),
                          f"only what was suspected was replayed; {REPLAY}",
                          ["accprobe compare golden mine --taps 'model.*' --replay"]) for o in BLAMED],
    "no inputs to replay with": [(
        failed(replayed="", origins=[ODD], **OUTPUTS),
        "inputs were not captured, so nothing can be replayed; with them, a replay tells whether this operator is "
        "wrong for its own",
        [line + " --replay" * line.startswith("accprobe") for line in anew("inputs", f" {ONLY_INPUTS}")])],
    "golden is as coarse, and differs from the start": [(
        failed(golden_run=run()),
        "golden is bfloat16 as mine is, and what comes before the error differs too: of a float32 golden, all "
        "differences are mine's",
        [f"VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=golden-float32 {SERVE} --dtype float32",
         "accprobe compare golden-float32 mine"])],
    "few rows": [(failed(coverage=FEW, origins=o), "31 rows compared, too few to tell a habit from an accident: send "
                  "both sides more and longer requests", anew("more")) for o in BLAMED],
    "statistics only": [(make(pairs=[pair(status=status, max_abs_err=None), *STATISTICS], mine_run=run(task="stats"),
                              replayed=""),
                         "mine holds statistics only, which show less than values do: 1 pair was judged by them",
                         mine_anew("tensors", " VLLM_ACCPROBE_TASK=tensor"))
                        for make, status in ((failed, "fail"), (passed, "pass"))],
    "graphs hid modules": [(failed(mine_run=run(graphs=True)),
                            "mine ran as graphs, in which nothing is seen: eager, each module is",
                            mine_anew("eager", " VLLM_ACCPROBE_GRAPHS=0"))],
    "modules were left out": [(failed(mine_run=run(modules=["attention", "mlp"])),
                               "mine kept only some modules (attention, mlp): the error may come from one that was "
                               "not captured", mine_anew("whole"))],
    "a flip could not be judged": [(make(tokens={"compared": 9, "flipped": UNJUDGED}),
                                    "1 flipped token may be near ties: the logits, which tell, were not captured",
                                    anew("logits", " VLLM_ACCPROBE_MODULES=logits")) for make in (failed, passed)],
    "a pass most of whose rows were not judged": [(
        passed(coverage=HOLES), "65 of 120 rows are not judged, for they come after a near tie or a flipped token: "
        "send both sides more requests, and shorter ones", anew("more"))],
    "a pass with modules that golden does not have": [(
        passed(coverage=ALONE, replayed=""), "2 modules of mine have no partner in golden, first model.extra; run "
        "again from their own inputs they need none", ["accprobe opcheck mine"])],
}  # fmt: skip


@pytest.mark.parametrize(("result", "why", "commands"), [row for rows in OPEN.values() for row in rows])
def test_what_is_missing_and_how_to_get_it(result, why, commands):
    assert asked(result) == [(why, commands)]


@pytest.mark.parametrize("result", [
    failed(golden_run=run("float16")),
    failed(golden_run=run(), pairs=UPSTREAM),  # what comes before the error is equal
    *(failed(coverage=FEW | {"rows_compared": 32}, origins=o) for o in BLAMED),
    passed(pairs=[pair(max_abs_err=0.0, identical=True)], mine_run=run(task="stats"), replayed=""),
    passed(coverage=HOLES | {"skipped": {ROWS_AFTER: 40, AFTER_FLIP: 20}}),
    passed(coverage=ALONE),  # a replay has run them
])  # fmt: skip
def test_what_is_not_missing(result):
    assert asked(result) == []


def test_a_second_golden_run_if_there_is_no_floor():
    result = failed(standard={"name": "accprobe"}, golden_path="/runs/gpu a/", golden_run=run(tp=2), options=("-x",))
    assert asked(result)[0] == (
        "a second run of golden's side, batched in another way, shows what correct runs differ by",
        [
            "VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR='/runs/gpu a-again' vllm serve '/models/tiny qwen' "
            "--tensor-parallel-size 2",
            "accprobe compare '/runs/gpu a/' '/runs/gpu a-again' --calibrate '/runs/gpu a-floor'",
            "accprobe compare '/runs/gpu a/' mine -x --floor '/runs/gpu a-floor'",
        ],
    )


def test_what_no_command_of_ours_can_make_is_said_in_words():
    """Another tool's dump, or a model outside of vLLM: nobody knows how it was started."""
    for golden in ({"tool": "msprobe"}, run(runner="accprobe.Probe")):
        result = failed(standard={"name": "accprobe"}, golden_run=golden)
        assert asked(result)[0][1][0] == "# what made golden again, into golden-again"


def test_a_tap_cannot_add_a_command():
    evil = "x\nrm -rf ~; $(touch y) #'"
    for runner in ("vllm.R", "accprobe.Probe"):
        made = {"parts": ["output"], "runner": runner}
        result = failed(origins=[ODD | {"module": evil}], replayed="", golden_run=run(**made), mine_run=run(**made))
        (inputs,) = (lines for why, lines in asked(result) if "inputs were not captured" in why)
        assert len(inputs) == 3
        assert all(line.isprintable() for line in inputs)
        if runner == "vllm.R":
            assert shlex.split(inputs[0])[3] == "VLLM_ACCPROBE_MODULES=" + evil.replace("\n", "?")
        else:
            assert inputs[0].startswith("# ")


def test_the_commands_have_options_that_exist():
    """Each accprobe line, held against the command line that there is."""
    from typer.main import get_command

    root: Any = get_command(build())
    results = [
        failed(replayed="", golden_run=run(), standard={}, coverage={"rows_compared": 3}),
        passed(replayed="", coverage={"rows_compared": 3, "taps_only_mine": ["x"]}),
    ]
    seen = set()
    for _, lines in (step for result in results for step in asked(result)):
        for words in (shlex.split(line) for line in lines if line.startswith("accprobe ")):
            known = {o for p in root.commands[words[1]].params for o in p.opts}
            assert {w for w in words if w.startswith("-")} <= known
            seen.add(words[1])
    assert seen == {"compare", "opcheck"}
