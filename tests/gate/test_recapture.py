"""A side once more, with a server by hand: when what is armed, what is kept, and what is gone on with."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dumps import put, writer
from forcible_server import Machine
from made_folders import folder

from vllm_accprobe import arm_file
from vllm_accprobe.gate import localize
from vllm_accprobe.gate.localize import (
    MEASURED,
    PLAN,
    KeptServers,
    Localization,
    LocalizeError,
    LocalizePlan,
    LocalizeTarget,
    Recapturing,
    Window,
    environment,
)
from vllm_accprobe.gate.sending import client, replies
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.progress import USUAL

PLAN_OF_TWO = LocalizePlan(
    LocalizeTarget("p1", 2, 40, 0.5, 1),
    (Window(0, ("p0",), 0, 0, (20,)), Window(1, ("p1", "p2"), 0, 2, (40, 60))),
    ("one", "all"),
)
KEY = {"golden": "a", "mine": "b", "gigabytes": 1}


def wrote(dump: Path, empty: bool = False) -> None:
    """A dump in which the row of four tokens takes 4000 bytes."""
    rank = writer(dump)
    if not empty:
        put(rank, "head", np.zeros(4000, np.uint8), "uint8")
        put(rank, "norm", np.ones(500, np.uint8), "uint8", event="param", step=None)
    rank.close("test", {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(wrote)
    monkeypatch.setattr(localize, "served", found.served)
    return found


@pytest.fixture
def golden(tmp_path: Path) -> Sent:
    path = folder(tmp_path / "sent", 1, prompts=3, tokens=4, change=lambda i, r: r)
    lines = [{"id": f"p{i}", "token_ids": list(range(20 * (i + 1)))} for i in range(3)]
    (path / replies.PROMPTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = replies.read_about(path)
    replies.write_about(path, about | {"settings": {"concurrency": 1, "top": 5}})
    return replies.read(path)


def how(gigabytes: float = 1.0) -> Recapturing:
    environ = {
        "PATH": "/bin",
        "VLLM_ACCPROBE_REQUESTS": "x",
        "VLLM_ACCPROBE_MODULES": "layers",
        "VLLM_PLUGINS": "theirs",
    }
    return Recapturing(gigabytes, 10, 10, "", environ, lambda what, total: nullcontext(lambda done: None))


def test_each_pass_is_armed_while_the_server_is_idle(machine: Machine, golden: Sent, tmp_path: Path) -> None:
    dig = Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    for side in ("golden", "mine"):
        machine.asked.clear()
        dig.capture(side, "vllm serve M", golden, how())
        off = {"on": False}
        first = {"on": True, "requests": ["p0"], "tokens": "0"}
        second = {"on": True, "requests": ["p1.pass1", "p2.pass1"], "tokens": "0-2"}
        sent = [(name, said) for name, said in machine.asked if name not in (MEASURED, client.PROBE.name)]
        assert sent == [*((f"p{i}", first) for i in range(3)), *((f"p{i}.pass1", second) for i in range(3))]
        measured = [said for name, said in machine.asked if name == MEASURED]
        assert measured == ([{"on": True, "requests": [MEASURED], "tokens": "0"}] if side == "golden" else [])
        assert arm_file.read(dig.dump(side) / arm_file.NAME).to_json() == off
        answered = dig.replies(side).passes
        assert [sorted(p) for p in answered] == [["p0", "p1", "p2"]] * 2
        assert answered[1]["p1"].token_ids == golden.passes[0]["p1"].token_ids  # forced
    _, environ = machine.starts[0]
    assert environ["VLLM_ACCPROBE_DIR"] == str(tmp_path / "dig" / "golden")
    assert environ["VLLM_ACCPROBE_ARMED"] == "0"
    assert environ["VLLM_ACCPROBE_MODULES"] == "layers"
    assert environ["VLLM_PLUGINS"] == "theirs,accprobe"
    assert "VLLM_ACCPROBE_REQUESTS" not in environ
    for path in (tmp_path / "dig", dig.dump("mine"), dig.sent("mine")):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "dig" / PLAN).stat().st_mode & 0o777 == 0o600


def test_a_server_that_has_answered_the_gate_is_asked_again(machine: Machine, golden: Sent, tmp_path: Path) -> None:
    """One start for each side. What it has cached is not found, and the gate's steps stay those of its answers."""
    root, steps = tmp_path / "dig", tmp_path / "steps-0" / "steps-rank0.jsonl"
    steps.parent.mkdir()
    kept = KeptServers(("golden", "mine"), root, 1.0)
    environ = {**how().environ, "VLLM_ACCPROBE_DIR": str(tmp_path / "own")}
    for side in ("golden", "mine", "floor 0"):
        with kept.serve(side, "vllm serve M", environ, tmp_path, 10, USUAL):
            steps.write_text("of the gate\n")
    assert [e.get("VLLM_ACCPROBE_ARMED") for _, e in machine.starts] == ["0", "0", None]
    dig = Localization(root, KEY, PLAN_OF_TWO)
    machine.asked.clear()
    machine.salts.clear()
    dig.capture("golden", "vllm serve M", golden, replace(how(), kept=kept))
    with kept.taken("mine"):
        steps.write_text("of the gate\nand of the capture\n")
    assert (len(machine.starts), dig.done, steps.read_text()) == (3, ["golden"], "of the gate\n")
    named = [name for name, _ in machine.asked if name not in (MEASURED, client.PROBE.name)]
    assert named == ["p0", "p1", "p2", "p0.pass1", "p1.pass1", "p2.pass1"]
    assert {salt for salt, (name, _) in zip(machine.salts, machine.asked, strict=True) if name in named} == {
        "accprobe-dig "
    }
    assert (dig.dump("golden") / "run.json").exists()


def test_a_kept_server_of_which_nothing_is_captured_leaves_nothing(machine, tmp_path):
    kept = KeptServers(("mine",), tmp_path / "dig", 1.0)
    with kept.serve("mine", "vllm serve M", how().environ, tmp_path, 10, USUAL) as run:
        assert (tmp_path / "dig" / "mine" / "run.json").exists()
    assert kept.runs("mine")
    kept.close()
    assert not kept.runs("mine")
    assert not (tmp_path / "dig").exists()
    assert not Sender(run.command.url, timeout=2).healthy()


def test_a_pass_of_which_nothing_is_wanted_is_disarmed(machine: Machine, golden: Sent, tmp_path: Path) -> None:
    dig = Localization(tmp_path / "dig", KEY, replace(PLAN_OF_TWO, windows=PLAN_OF_TWO.windows[1:]))
    dig.capture("mine", "vllm serve M", golden, how())
    assert [said for name, said in machine.asked if name == "p2"] == [{"on": False}]


def test_the_budget_is_measured_on_goldens_side(machine: Machine, golden: Sent, tmp_path: Path) -> None:
    """1000 bytes a row: 0.95 of 130 kB, less 500 of a parameter and the 4000 measured, do not hold 124 rows."""
    dig = Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    dig.capture("golden", "vllm serve M", golden, how(0.00013))
    assert dig.plan.windows == (PLAN_OF_TWO.windows[0], Window(1, ("p1",), 0, 2, (40,)))
    assert dig.plan.left == ("1 of 2 requests",)
    again = Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    assert again.plan == dig.plan  # mine is captured as golden was
    assert again.done == ["golden"]
    machine.asked.clear()
    again.capture("golden", "vllm serve M", golden, how(0.00013))
    assert machine.asked == []


def test_what_was_begun_is_made_again_and_what_is_done_is_not(machine: Machine, golden: Sent, tmp_path: Path) -> None:
    dig = Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    dig.capture("golden", "vllm serve M", golden, how())
    machine.breaks = True
    with pytest.raises(SendError):
        dig.capture("mine", "vllm serve M", golden, how())
    machine.breaks = False
    kept = (dig.dump("golden") / "run.json").stat().st_ino
    again = Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    for side in ("golden", "mine"):
        again.capture(side, "vllm serve M", golden, how())
    assert Localization(tmp_path / "dig", KEY, PLAN_OF_TWO).done == ["golden", "mine"]
    assert (dig.dump("golden") / "run.json").stat().st_ino == kept
    other = Localization(tmp_path / "dig", KEY | {"mine": "another command"}, PLAN_OF_TWO)
    assert other.done == []


def test_nothing_captured_is_an_error(machine, golden, tmp_path, monkeypatch):
    monkeypatch.setattr(localize, "_SEEN_S", 0.5)  # how long a server may take to write its first line
    machine.write = partial(wrote, empty=True)
    dig = Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    with pytest.raises(LocalizeError, match=r"nothing was captured; read .*sent-mine/engine-0\.log"):
        dig.capture("mine", "vllm serve M", golden, how())
    assert Localization(tmp_path / "dig", KEY, PLAN_OF_TWO).done == []


@pytest.mark.parametrize("text", ["{", "[]", '{"key": {}}', '{"key": {}, "plan": {"target": 3}, "done": []}'])
def test_somebody_elses_folder(text: str, tmp_path: Path) -> None:
    (tmp_path / "dig").mkdir()
    (tmp_path / "dig" / PLAN).write_text(text)
    with pytest.raises(LocalizeError, match="is not of a dig"):
        Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    (tmp_path / "dig" / PLAN).unlink()
    (tmp_path / "dig" / "thesis.tex").write_text("x")
    with pytest.raises(LocalizeError, match="has other files"):
        Localization(tmp_path / "dig", KEY, PLAN_OF_TWO)
    assert (tmp_path / "dig" / "thesis.tex").read_text() == "x"


def test_the_environment_keeps_what_is_the_users() -> None:
    found = environment({"A": "1", "VLLM_ACCPROBE_GRAPHS": "1", "VLLM_ACCPROBE_TOKENS": "3"}, Path("/x"), 2.5)
    assert found == {
        "A": "1", "VLLM_ACCPROBE_GRAPHS": "1", "VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": "/x",
        "VLLM_ACCPROBE_ARMED": "0", "VLLM_ACCPROBE_MAX_GB": "2.5",
    }  # fmt: skip
