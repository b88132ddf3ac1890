"""Windows of a capture on a runner by hand: which requests, rows and modules each of them leaves in the dump."""

import json
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from fake_runners import Output, captured, without_vllm
from test_runner_steps import Runner

from vllm_accprobe.capture.arming import NOT_CARRIED, WORDS
from vllm_accprobe.capture.vllm import capturing
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import Dump, open_dump

PROMPT = 3


class Served:
    """An engine's rank that is told what the control file says with each step."""

    def __init__(self, root: Path, **settings: Any):
        self.runner = Runner(pools=False)
        self.probe, _ = captured(self.runner, ProbeConfig(enabled=True, dir=str(root), **settings))
        self.words: bytes | None = b'{"serial": 0, "selection": null, "refused": null}'
        self.serial = 0
        self.known: dict[str, int] = {}

    def arm(self, selection: dict[str, Any] | None, refused: str | None = None) -> None:
        self.serial += 1
        self.words = json.dumps({"serial": self.serial, "selection": selection, "refused": refused}).encode()

    def step(self, *names: str) -> None:
        """One step of these requests: the prompt of one that is new, one token of the others."""
        fresh = [n for n in names if n not in self.known]
        counts = {n: PROMPT if n in fresh else 1 for n in names}
        old = [n for n in names if n not in fresh]
        requests = [
            Plain(req_id=n, num_computed_tokens=0, prompt_token_ids=[ord(n[0]) % 32] * PROMPT, mm_features=[])
            for n in fresh
        ]
        cached = Plain(req_ids=old, num_computed_tokens=[self.known[n] for n in old])
        out = Output(requests, cached, counts)
        if self.words is not None:
            setattr(out, WORDS, self.words)
        self.runner.positions = torch.cat([torch.arange(counts[n]) + self.known.get(n, 0) for n in names])
        self.runner.positions = torch.nn.functional.pad(self.runner.positions, (0, 32))
        self.runner.execute_model(out)
        self.runner.sample_tokens()
        for n in names:
            self.known[n] = self.known.get(n, 0) + counts[n]

    def closed(self) -> Dump:
        self.probe.close("test")
        return open_dump(self.probe.root)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(capturing, "say", lines.append)
    without_vllm(monkeypatch)
    return lines


def rows(dump: Dump) -> list[tuple[int, str, int, int]]:
    """(step, request, first position, rows) of the token rows."""
    return [
        (step, dump.requests[rank, s.req].id, s.pos, s.n)
        for (rank, step, space), found in dump.rows.items() if space == "tokens" for s in found.segments
    ]  # fmt: skip


def test_it_begins_disarmed_and_takes_what_each_window_names(tmp_path: Path, said: list[str]) -> None:
    served = Served(tmp_path / "dump", armed=False)
    served.step("a", "b")
    served.arm({"on": True, "requests": ["b*"], "tokens": "1-9"})
    served.step("a", "b")  # b's second step: its first generated token
    served.step("a", "b", "b2")  # of b2 the prompt, which no token range names
    served.arm({"on": False})
    served.step("a", "b")
    served.arm({"on": True, "requests": ["a"]})
    served.step("a", "b")
    served.arm(None)  # the file is gone: as the server was started
    served.step("a", "b")
    dump = served.closed()
    assert rows(dump) == [(1, "b", 3, 1), (2, "b", 4, 1), (4, "a", 6, 1)]
    assert sorted({r.step for r in dump.records if r.step is not None}) == [1, 2, 4]
    assert {r.id for r in dump.requests.values()} == {"a", "b", "b2"}  # b2 was chosen, and had no row
    assert [(w.step, w.on) for _, w in dump.armed] == [(1, 1), (3, 0), (4, 1), (5, 0)]
    assert dump.armed[0][1].selection == {"on": True, "requests": ["b*"], "tokens": "1-9"}
    assert dump.errors == []
    assert not any("NOTHING" in line for line in said)


def test_only_the_named_positions_of_a_request_reach_the_disk(tmp_path: Path, said: list[str]) -> None:
    served = Served(tmp_path / "dump", armed=False)
    served.arm({"on": True, "rows": {"a": "1,4"}})
    for _ in range(3):
        served.step("a", "b")
    dump = served.closed()
    assert rows(dump) == [(0, "a", 1, 1), (0, "b", 0, 3), (1, "b", 3, 1), (2, "a", 4, 1), (2, "b", 4, 1)]


def test_who_is_not_chosen_leaves_no_trace(tmp_path: Path, said: list[str]) -> None:
    """A request that a window chose, and that window took no step of: not even the hash of its prompt."""
    served = Served(tmp_path / "dump", armed=False)
    served.arm({"on": True, "requests": ["secret"], "steps": "5"})
    served.step("secret", "a")
    served.arm({"on": True, "requests": ["a"]})
    served.step("secret", "a")
    dump = served.closed()
    assert {r.id for r in dump.requests.values()} == {"a"}
    assert b"secret" not in (dump.path / "rank0000" / "journal.jsonl").read_bytes().replace(b'["secret"]', b"")
    assert "armed from step 0 on, for 1 step: NOTHING was captured; check arm.json" in said


def test_steps_are_counted_from_the_window_on(tmp_path: Path, said: list[str]) -> None:
    served = Served(tmp_path / "dump")
    for _ in range(2):
        served.step("a")
    served.arm({"on": True, "steps": "1-2"})
    for _ in range(5):
        served.step("a")
    dump = served.closed()
    assert sorted({step for _, step in dump.steps}) == [0, 1, 3, 4]


def test_modules_are_of_those_that_are_tapped(tmp_path: Path, said: list[str]) -> None:
    served = Served(tmp_path / "dump", modules=("embed", "<root>"))
    served.step("a")
    served.arm({"on": True, "modules": ["embed", "pooler"]})
    served.step("a")
    served.arm({"on": True})
    served.step("a")
    dump = served.closed()
    taps = {step: {r.tap for r in dump.records if r.step == step} for step in range(3)}
    assert taps == {0: {"embed", "<root>"}, 1: {"embed"}, 2: {"embed", "<root>"}}
    assert not any(s.reason.startswith("never") for s in dump.skips)


def test_what_is_refused_is_one_line_in_the_journal(tmp_path: Path, said: list[str]) -> None:
    served = Served(tmp_path / "dump")
    served.step("a")
    served.arm({"on": False}, refused="arm.json is refused: it is a link; the earlier selection goes on")
    for _ in range(3):
        served.step("a")
    dump = served.closed()
    assert [(e["where"], e["message"]) for e in dump.errors] == [
        ("arming", "arm.json is refused: it is a link; the earlier selection goes on")
    ]
    assert len(dump.steps) == 4
    assert dump.armed == []


@pytest.mark.parametrize("armed", [True, False])
def test_a_scheduler_that_carries_nothing(armed: bool, tmp_path: Path, said: list[str]) -> None:
    served = Served(tmp_path / "dump", armed=armed)
    served.words = None
    for _ in range(3):
        served.step("a")
    dump = served.closed()
    assert len(dump.steps) == (3 if armed else 0)
    assert [e["message"] for e in dump.errors] == ([] if armed else [NOT_CARRIED])
    assert (NOT_CARRIED in said) == (not armed)
    nothing = [line for line in said if line.startswith("NOTHING")]
    assert [f"`accprobe arm {dump.path}`" in line for line in nothing] == ([] if armed else [True])
