"""What the scheduler's process reads, and that it travels with the step as it is."""

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmSelection
from vllm_accprobe.capture import arming
from vllm_accprobe.capture.arming import WORDS, ControlFile, patch


class Out:
    """As a SchedulerOutput: an object with attributes that travels pickled."""


class Scheduler:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def schedule(self, throttle: bool = False) -> Out:
        self.asked.append(throttle)
        return Out()


class Core:
    """vLLM 0.32's EngineCore, as far as it steps (v1/engine/core.py: 657, 698)."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()

    def step(self) -> Out:
        return self.scheduler.schedule(True)

    def step_with_batch_queue(self) -> Out:
        return self.scheduler.schedule()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(arming, "say", lines.append)
    return lines


def words(control: ControlFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(control.current_words())
    return found


def test_each_change_is_read_once(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = arm_file.read

    def counted(path: Path) -> ArmSelection:
        read.append(path)
        return real(path)

    monkeypatch.setattr(arm_file, "read", counted)
    control = ControlFile(tmp_path / "arm.json")
    assert [words(control) for _ in range(3)] == [{"serial": 0, "selection": None, "refused": None}] * 3
    assert read == []
    arm_file.write(tmp_path, ArmSelection(requests=("a",)))
    armed = {"serial": 1, "selection": {"on": True, "requests": ["a"]}, "refused": None}
    assert [words(control) for _ in range(3)] == [armed] * 3
    assert len(read) == 1
    assert control.current_words() is control.current_words()
    arm_file.write(tmp_path, ArmSelection(requests=("a",)))  # the same again is a new window
    assert words(control) == armed | {"serial": 2}
    (tmp_path / "arm.json").unlink()
    assert words(control) == {"serial": 3, "selection": None, "refused": None}
    assert said == []


@pytest.mark.parametrize(("harm", "why"), [
    (lambda p: p.write_text("{"), "it is no json"),
    (lambda p: (p.unlink(), p.symlink_to("/etc/passwd")), "it is a link"),
    (lambda p: (p.unlink(), os.mkfifo(p, 0o600)), "it is no plain file"),
])  # fmt: skip
def test_what_is_refused_leaves_what_held(harm: Any, why: str, tmp_path: Path, said: list[str]) -> None:
    control = ControlFile(tmp_path / "arm.json")
    path = arm_file.write(tmp_path, ArmSelection(tokens=((0, 4),)))
    before = words(control)
    harm(path)
    after = [words(control) for _ in range(3)]
    assert after[0]["selection"] == before["selection"]
    assert why in after[0]["refused"]
    assert after == [after[0]] * 3
    assert len(said) == 1
    assert why in said[0]
    if path.is_symlink() or path.is_fifo():
        path.unlink()
    arm_file.write(tmp_path, ArmSelection(False))
    assert words(control) == {"serial": after[0]["serial"] + 1, "selection": {"on": False}, "refused": None}


@pytest.mark.parametrize("method", ["step", "step_with_batch_queue"])
def test_the_words_travel_with_the_step(method: str, tmp_path: Path) -> None:
    class Mine(Core):
        pass

    assert patch(Mine, lambda: tmp_path / "arm.json")
    core = Mine()
    arm_file.write(tmp_path, ArmSelection(steps=((0, 2),)))
    out = getattr(core, method)()
    assert json.loads(getattr(pickle.loads(pickle.dumps(out)), WORDS))["selection"] == {"on": True, "steps": "0-2"}
    assert core.scheduler.asked == [method == "step"]
    getattr(core, method)()
    assert len(core.scheduler.asked) == 2  # looked at once, whatever the number of steps


def test_nothing_that_a_file_does_to_its_reader_ends_the_engine(tmp_path, said, monkeypatch):
    def broken(path: Path) -> ArmSelection:
        raise RecursionError("too deep")

    monkeypatch.setattr(arm_file, "read", broken)
    (tmp_path / "arm.json").write_text("{}")
    assert ControlFile(tmp_path / "arm.json").current_words()
    assert len(said) == 1
    assert "too deep: refused; the earlier selection goes on" in said[0]


def test_an_engine_that_cannot_be_armed_serves(tmp_path: Path, said: list[str]) -> None:
    class Slotted:
        __slots__ = ()

    class Mine(Core):
        pass

    def nowhere() -> Path:
        raise OSError("no such place")

    assert not patch(object(), lambda: tmp_path)
    patch(Mine, nowhere)
    assert isinstance(Mine().step(), Out)
    assert said == ["this engine cannot be armed (OSError: no such place); it captures as it was started"]
    scheduler = Scheduler()
    scheduler.schedule = Slotted  # type: ignore[method-assign,assignment]
    arming.attach_control_file(scheduler, ControlFile(tmp_path / "arm.json"))
    assert isinstance(scheduler.schedule(), Slotted)


def test_salts_of_new_requests_travel_as_hashes() -> None:
    scheduler = SimpleNamespace(requests={"a": SimpleNamespace(cache_salt="secret"), "b": SimpleNamespace()})
    new = [SimpleNamespace(req_id=name) for name in ("a", "b", "c")]
    found = arming.salts_of(scheduler, SimpleNamespace(scheduled_new_reqs=new))
    assert list(found) == ["a"]
    assert len(found["a"]) == 16
    assert "secret" not in found["a"]
