"""scripts/card.sh: which parts there are, what becomes of one that fails or hangs, and what is concluded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import card
import card_found
import card_page
import card_parts
import pytest
from card_parts import FAULTY, Asked, Part
from support.processes import gone

ROOT = Path(__file__).parents[2]
WAYS = {
    "eager": {"mode": "NONE", "graphs": "NONE"}, "compiled": {"mode": "VLLM_COMPILE", "graphs": "NONE"},
    "captured": {"mode": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE"},
    "piecewise": {"mode": "VLLM_COMPILE", "graphs": "PIECEWISE"}, "full": {"error": "ValueError: not on this platform"},
}  # fmt: skip


def machine(ways: dict[str, Any], **more: Any) -> dict[str, Any]:
    facts = {
        "ways": ways, "device_type": "cuda", "devices": ["cuda:0 Some card"], "vllm": "0.32.0", "platform": "Platform",
        "torch": "2.13", "python": "3.11", "system": "Linux", "cores": 8, "packages": {"torch": "2.13"},
        "accprobe": {"version": "0.1.0", "source": "abc"}, "settings": {},
    }  # fmt: skip
    return {"status": "done", "s": 10.0, "cpu_s": 5.0, "found": facts | more}


# --- which parts -----------------------------------------------------------------------------------------------------


def test_what_accprobe_needs_is_looked_for() -> None:
    from card_engine import NEEDED

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("dependencies = [")[2].partition("]")[0]
    assert set(NEEDED) == set(re.findall(r'"(\w+)[^"]*"', text)) - {"tomli", "python_version"}


def test_the_environment_lets_vllm_load_both_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    monkeypatch.setenv("VLLM_ACCPROBE_STEPS", "7")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    env = card_parts.environment(Asked(tmp_path, {}), Part("x", "x", env={"VLLM_ACCPROBE": "1"}))
    assert env["VLLM_PLUGINS"] == "ascend,accprobe,accprobe_faults"
    assert "VLLM_ACCPROBE_STEPS" not in env
    assert (env["VLLM_ACCPROBE"], env["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("1", "1")
    assert env["VLLM_CACHE_ROOT"] == str(tmp_path / "caches" / "x")


# --- running them ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runner(tmp_path: Path) -> card.Card:
    for folder in ("jobs", "results", "logs", "dumps", "plugin", "torch"):
        (tmp_path / folder).mkdir()
    return card.Card(Asked(tmp_path, {}), "*", "", 20.0)


def script(name: str, code: str, **more: Any) -> Part:
    return Part(name, name, command=("-c", code), **more)


def test_a_part_that_fails_says_why_and_the_next_one_runs(runner: card.Card) -> None:
    runner.do(script("bad", "print('loading'); raise MemoryError('no room on the card')"), "1")
    runner.do(script("good", "pass"), "2")
    runner.do(script("later", "pass", needs=("bad",)), "3")
    runner.do(script("once more", "pass", doubt="eager"), "4")
    assert "once more" not in runner.results, "no bit changed"
    assert runner.results["bad"]["status"] == card.FAILED
    assert runner.results["bad"]["why"] == "exit code 1: MemoryError: no room on the card"
    assert runner.results["good"]["status"] == card.DONE
    assert runner.results["later"]["why"] == "needs bad"
    page = runner.page().parent / "card.md"
    assert "MemoryError: no room on the card" in page.read_text(encoding="utf-8")


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(runner: card.Card, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    runner.limit = 3.0
    runner.do(script("hangs", code), "1")
    assert runner.results["hangs"]["why"] == "stopped: it took longer than 3 s"
    assert gone(int(pid.read_text()))


def test_what_is_done_is_not_done_again(runner: card.Card, tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    again = card.Card(runner.asked, "*", "mine", 20.0)
    for one in (runner, runner, again):
        one.do(script("mine", code), "1")
    assert count.read_text() == "xx"
    runner.do(script("mine", code + "  # other questions"), "1")
    assert count.read_text() == "xxx"
    assert json.loads((tmp_path / "results" / "mine.json").read_text())["status"] == card.DONE


def test_without_an_installation_the_checkout_becomes_a_plugin(tmp_path: Path) -> None:
    """In a Python that has nothing of ours but the checkout on its path."""
    code = "import card, sys, pathlib; card.make_plugin(pathlib.Path(sys.argv[1])); "
    look = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.general_plugins')])"
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}:{tmp_path}", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", code + look, str(tmp_path)]  # -S: no site-packages
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['vllm_accprobe.plugin:register']"


# --- what it means ---------------------------------------------------------------------------------------------------


def served(top: str = "0x1p-1", hash_: str = "a", inside: int = 20, **more: Any) -> dict[str, Any]:
    dump = {
        "inside": inside, "replayed": {"PIECEWISE": 30}, "skips": {}, "errors": [], "outside": {"0/1/logits": hash_},
    }  # fmt: skip
    answers = {"card-0": {"tokens": [1, 2], "top": [{"1": top}]}}
    return {"status": "done", "s": 1.0, "found": {"answers": answers, "how": WAYS["captured"], "dump": dump | more}}


def compared(verdict: str, first: str = "") -> dict[str, Any]:
    found = {"verdict": verdict, "origins": [{"module": first}] if first else []}
    return {"status": "done", "s": 1.0, "found": found}


def results() -> dict[str, Any]:
    made: dict[str, Any] = {"machine": machine({"eager": WAYS["eager"], "captured": WAYS["captured"]})}
    for way in ("eager", "captured"):
        made |= {f"{way}-{variant}": served() for variant in ("bare", "on", "selected", "fault")}
        made[f"compare-{way}-fault"] = compared("fail", FAULTY)
    return made | {"compare-captured-on": compared("pass")}


def way(made: dict[str, Any], name: str = "captured") -> card_found.WayFound:
    return next(one for one in card_found.conclusions(made) if one.way == name)


def test_a_good_run_passes() -> None:
    found = way(results())
    assert found.problems == []
    assert (found.passed, found.verdict, found.culprit, found.taps) == (True, "pass", FAULTY, 20)
    assert found.bits == {"on": True, "selected": True}
    assert card_found.all_good(results())
    assert "**Everything passed.**" in card_page.page(results(), {})


@pytest.mark.parametrize(("part", "instead", "says"), [
    ("captured-on", served(top="0x1p-2"), "bits of the top log-probabilities of 1 of 1 answers differ"),
    ("captured-selected", served(hash_="b"), "1 of 1 records outside the graphs differ"),
    ("captured-on", served(inside=0), "nothing inside the model was captured"),
    ("captured-on", served(errors=["taps: broken"]), "the probe failed: taps: broken"),
    ("compare-captured-on", compared("fail", "model.norm"), "clean against eager: fail, first model.norm"),
    ("compare-captured-fault", compared("pass"), "was not named first, but nothing"),
    ("captured-bare", {"status": "failed", "why": "exit code 1: no room", "s": 1.0}, "exit code 1: no room"),
])  # fmt: skip
def test_whatever_is_wrong_is_said(part: str, instead: dict[str, Any], says: str) -> None:
    made = results() | {part: instead}
    assert any(says in problem for problem in way(made).problems)
    assert way(made).passed is False
    assert not card_found.all_good(made)
    assert way(made, "eager").passed, "the other way is as it was"


def test_a_machine_that_changes_bits_by_itself_is_not_held_against_the_taps() -> None:
    made = results() | {"captured-on": served(top="0x1p-2"), "captured-again": served(top="0x1p-3")}
    assert card_found.changed_bits(made, "captured")
    assert not card_found.changed_bits(made, "eager")
    found = way(made)
    assert (found.repeatable, found.bits["on"], found.problems) == (False, False, [])
    steady = way(made | {"captured-again": served()})
    assert (steady.repeatable, steady.passed) == (True, False)


# --- an engine -------------------------------------------------------------------------------------------------------


def test_what_was_not_run_has_not_passed() -> None:
    made = results() | {"captured-off": {"status": "not yet", "s": 0.0}}
    assert (way(made).passed, way(made).rest) == (None, ["captured-off"])
    page = card_page.page(made, {})
    assert "**What was run passed; 1 parts were not run.**" in page
    assert "| unfinished |" in page
    assert f"- {len(made) - 1} of {len(made)} parts, " in page
