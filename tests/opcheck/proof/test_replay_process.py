"""When `compare` replays without being asked, what it does with the outcome, and what happens where it cannot."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.opcheck_dumps import Maker
from support.forked_children import anew

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.proof import replay_process as replay
from vllm_accprobe.opcheck.proof.apply_proof import NAME, ReplayFinding, ReplayResult

ROWS, WIDTH, GAIN = 24, 256, 1.006
PROBE = {"tool": "accprobe", "model": {"path": "", "class": "Tiny"}, "probe": {"task": "tensor"}}


def dump(root: Path, gain: float = 1.0, noise: float = 0.004, run: dict | None = None) -> Path:
    """Two norms one after the other; one row of the second is ``gain`` times too large, which drowns in the
    ``noise`` of the first's inputs for whoever only compares."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, WIDTH, generator=g)
    other = torch.Generator().manual_seed(6)
    x = (x + noise * (x.abs() + 1) * torch.randn(ROWS, WIDTH, generator=other)).bfloat16()
    weight = torch.rand(WIDTH, generator=g).bfloat16() + 0.5
    m = Maker(root, run=PROBE if run is None else run)
    m.module("<root>", "Tiny")
    for tap in ("first", "second"):
        m.module(tap, "RMSNorm", variance_epsilon=1e-6)
    m.request(0, ROWS)
    for tap in ("first", "second"):
        m.param(tap, "RMSNorm", weight=weight)
    m.step(0, [(0, 0, ROWS)])
    for tap in ("first", "second"):
        wide = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        wide[7] *= gain if tap == "second" else 1.0
        y = wide.bfloat16()
        m.call(tap, "RMSNorm", {"x": x}, y)
        x = y
    return m.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("replaying")
    return str(dump(root / "golden", noise=0)), str(dump(root / "mine", GAIN))


def compared(pair: tuple[str, str], out: Path, *more: str) -> tuple[int, dict]:
    code = main(["compare", *pair, "--out", str(out), "-q", *more])
    return code, json.loads((out / "compare.json").read_text())


def test_a_proof_is_left_out_where_no_replay_is_to_be(pair, tmp_path, capsys):
    """With it, and judged again with it: tests/freeze, ``replay``."""
    assert compared(pair, tmp_path / "out")[0] == 1
    assert main(["compare", "--rejudge", str(tmp_path / "out"), "--no-replay", "-o", str(tmp_path / "left"), "-q"]) == 0
    assert f"({NAME}) was left out (--no-replay)" in capsys.readouterr().err
    code, said = compared(pair, tmp_path / "without", "--no-replay")
    assert (code, said["origins"]) == (0, [])
    assert not (tmp_path / "without" / NAME).exists()


def test_a_blame_that_is_likelier_by_chance_than_allowed_is_none() -> None:
    @dataclass(frozen=True)
    class Judged(ReplayFinding):
        chance: float | None = None

    def blame(tap: str, chance: float | None) -> Judged:
        return Judged(tap, "RMSNorm", "output.0", 0, None, None, 0.1, None, 2.0, 4, "", chance=chance)

    blames = [blame("proved", 0.0), blame("unknown", None), blame("often", 1e-4), blame("more", 1e-2)]
    proof = ReplayResult(tuple(blames), (), (), frozenset(), 4)
    kept, notes = replay.allowed(proof, 1e-4)
    assert [b.tap for b in kept.blamed] == ["proved", "unknown", "often"]
    assert notes == [
        "replay: what is seen at more is likelier by chance than --false-alarm-rate 0.0001 allows: not blamed"
    ]
    kept, notes = replay.allowed(proof, 1e-6)
    assert [b.tap for b in kept.blamed] == ["proved", "unknown"]
    assert notes == [
        "replay: what is seen at often and 1 more is likelier by chance than --false-alarm-rate 1e-06 allows: "
        "not blamed"
    ]
    assert replay.allowed(proof, 0.5) == (proof, [])


def test_a_comparison_knows_how_much_of_it_was_replayed(pair: tuple, tmp_path: Path) -> None:
    """So that nobody is told to replay what was."""
    from vllm_accprobe.comparison.engine import compare

    result = compare(*pair)
    asked = replay.ReplayRequest(Path(pair[0]), Path(pair[1]), True, None, None)
    assert result.replayed == ""
    for ops, said in (("", "whole"), ("second", "partly")):
        some = replace(asked, taps=ops or None)
        assert replay.replayed(result, some, None, tmp_path / said).replayed == said
        assert replay.remembered(result, tmp_path / said).replayed == said


def test_no_time_is_no_replay(pair: tuple, tmp_path: Path) -> None:
    assert compared(pair, tmp_path / "one", "--replay-seconds", "0")[0] == 0
    assert not (tmp_path / "one" / NAME).exists()


def test_where_the_time_is_over_what_was_left_out_is_counted(tmp_path: Path) -> None:
    pair = str(dump(tmp_path / "golden", noise=0)), str(dump(tmp_path / "worse", 1.2))
    code, said = compared(pair, tmp_path / "two", "--replay-seconds", "1e-6")
    assert (code, said["origins"][0]["module"], said["origins"][0]["evidence"]) == (1, "second", "jump")
    proof = ReplayResult.from_json((tmp_path / "two" / NAME).read_text())
    assert (proof.partly, proof.checked, proof.right) == (True, 0, frozenset())
    said = next(n for n in said["notes"] if "calls were replayed" in n)
    assert said == (
        "replay: 0 of 4 calls were replayed in 0 s (--replay-seconds 1e-06); the others are compared, not checked: "
        "--replay checks all"
    )


def test_the_first_interrupt_ends_the_replay_and_the_second_all() -> None:
    class Ended:
        """A process that is interrupted twice while it is waited for."""

        def __init__(self) -> None:
            self.answers: list[Any] = [KeyboardInterrupt, {"done": 1}, KeyboardInterrupt]
            self.lines: list[str] = []

        def heard(self) -> Any:
            answer = self.answers.pop(0)
            if isinstance(answer, dict):
                return answer
            raise answer

        def tell(self, line: str) -> None:
            self.lines.append(line)

    running = replay.Replay.__new__(replay.Replay)
    running._process, running._stopped = Ended(), False  # type: ignore[assignment]
    assert running._message() == {"done": 1}
    assert running._process.lines == ["stop"]  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        running._message()


def test_a_replay_that_is_stopped_uses_what_it_has(pair: tuple, tmp_path: Path) -> None:
    """Here before it has done anything, and however long it may take."""
    running = replay.Replay(replay.ReplayRequest(Path(pair[0]), Path(pair[1]), True, None, None))
    try:
        running._process.tell("stop")
        proof = ReplayResult.from_json(running.result({})[0])
    finally:
        running.close()
    assert (proof.partly, proof.checked, proof.right) == (True, 0, frozenset())
    assert proof.notes[0].startswith("0 of 4 calls were replayed in 0 s (interrupted)")


def test_what_the_comparison_found_is_handed_on_the_worst_first(pair: tuple, tmp_path: Path) -> None:
    from vllm_accprobe.comparison.engine import compare

    result = compare(pair[0], dump(tmp_path / "worse", 1.2))
    places = {"places": ["second/output.0#0"], "taps": ["second"]}
    assert replay._wishes(result) == {"suspects": ["second"], "failed": [("second", 0, 0)], **places}


def test_dumps_that_are_no_capture_of_a_model_are_not_replayed(tmp_path: Path) -> None:
    plain = {"model": {"path": "", "class": "Tiny"}}
    pair = str(dump(tmp_path / "g", noise=0, run=plain)), str(dump(tmp_path / "m", GAIN, run=plain))
    assert compared(pair, tmp_path / "out")[0] == 0
    assert compared(pair, tmp_path / "asked", "--replay")[0] == 1


def test_a_replay_that_dies_leaves_the_comparison_and_says_so(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    code, said = compared(pair, tmp_path / "out")
    assert code == 0
    assert "replay: failed and decides nothing: its process ended with 1" in said["notes"]
    assert main(["compare", *pair, "--out", str(tmp_path / "asked"), "--replay"]) == 2
    assert "accprobe: --replay: its process ended with 1" in capsys.readouterr().err


def test_without_torch_asking_is_an_error_and_not_asking_is_none(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replay, "_torch", lambda: False)
    assert compared(pair, tmp_path / "out")[0] == 0
    assert main(["compare", *pair, "--out", str(tmp_path / "asked"), "--replay"]) == 2
    assert "--replay needs torch" in capsys.readouterr().err


def test_a_proof_that_is_none_is_refused(pair: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    compared(pair, tmp_path / "out", "--no-replay")
    for text in ("", "[]", "{}", '{"schema": 1, "blamed": [{}]}', '{"schema": 1, "blamed": 3}'):
        (tmp_path / "out" / NAME).write_text(text)
        assert main(["compare", "--rejudge", str(tmp_path / "out"), "-q"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_verdict_before_the_replay_is_not_said_to_programs(pair, tmp_path, capsys):
    assert main(["compare", *pair, "--out", str(tmp_path / "out"), "--format", "json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"] == "fail"
    assert "before replay" not in said.err
    assert main(["compare", *pair, "--out", str(tmp_path / "out"), "--no-replay"]) == 0
    assert "before replay" not in capsys.readouterr().err


def test_a_small_pairs_replay_begins_beside_the_comparison_and_ends_with_it(pair, tmp_path, monkeypatch, capsys):
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.comparison.result import NothingCompared

    begun: list[replay.Replay] = []
    plain = replay.Replay.__init__
    monkeypatch.setattr(replay.Replay, "__init__", lambda self, *a: (begun.append(self), plain(self, *a))[1])

    def nothing(*given: object, **more: object) -> None:
        assert [r._process.poll() for r in begun] == [None]
        raise NothingCompared("nothing in common")

    monkeypatch.setattr(engine, "compare", nothing)
    assert main(["compare", *pair, "--out", str(tmp_path / "out")]) == 3
    assert begun[0]._process.returncode == -9
    assert capsys.readouterr().err == "accprobe: nothing in common\n"
    assert not (tmp_path / "out").exists()


def test_a_replay_computes_with_one_thread(pair: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are processors wait for one another in a loop: ten times the processor time."""
    seen = []
    plain = replay.Replay.result

    def result(self: replay.Replay, wishes: dict) -> tuple[str, str]:
        environ = Path(f"/proc/{self._process.pid}/environ").read_bytes().decode().split("\0")
        seen.append({x for x in environ if x.endswith("_THREADS=1")})
        return plain(self, wishes)

    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(replay.Replay, "result", result)
    with anew():
        compared(pair, tmp_path / "out")
    assert len(seen) == 1
    names = ("OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "NUMBA_NUM")
    assert {f"{name}_THREADS=1" for name in names} <= seen[0]
