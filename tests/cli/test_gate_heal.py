"""What a gate does after its culprit is healed: each round, and how the search ends. Servers and dumps are invented."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_accprobe.cli import gate_heal, gate_run
from vllm_accprobe.cli.gate import GateOptions
from vllm_accprobe.cli.gate_heal import covered, heal, with_cause
from vllm_accprobe.gate.sides import SendSettings
from vllm_accprobe.heal.outcome import HealOutcome

DOWN, ATTN = "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.attn"
COMMANDS = ("serve golden", "serve mine")


def located(module: str | None, gap: Any = None) -> Any:
    origin = None if module is None else {"module": module, "class": "X", "role": "output.0", "gap": gap}
    return SimpleNamespace(origin=origin)


class Servers:
    """faults: modules; those that are healed no longer count. A gate fails while one is left."""

    def __init__(self, faults: list[str], *, unhealable: str = "", verdict: str | None = "fail", gap: Any = None):
        self.left, self.unhealable, self.verdict, self.gap = list(faults), unhealable, verdict, gap
        self.commands: list[str] = []

    def compare(self, what: GateOptions, sending: Any) -> Any:
        assert (what.golden, what.floor, what.floor_dtype, what.no_floor) == (
            "golden-folder", ["floor-folder"], "", True)  # fmt: skip
        self.commands.append(what.mine)
        words = dict(w.split("=", 1) for w in what.mine.split() if "=" in w)
        globs = words["VLLM_ACCPROBE_HEAL"].strip("'").split(",")
        outcome = HealOutcome(0)
        for one in globs:
            if one == self.unhealable:
                outcome.left[one] = "no reference for it"
            else:
                outcome.healed[one] = 7
        outcome.write(Path(words["VLLM_ACCPROBE_DIR"].strip("'")))
        self.left = [m for m in self.left if m == self.unhealable or not covered(m, globs)]
        return SimpleNamespace(golden=1, mine=2, gate=SimpleNamespace(
            numbers=self.verdict if self.left else "pass", worst=(1,)))  # fmt: skip

    def localize(self, failed: gate_run.FailedGate, out: Path, *rest: Any) -> Any:
        assert failed.commands[1].text.startswith("VLLM_ACCPROBE_HEAL=")
        assert "VLLM_ACCPROBE_DIR" not in failed.commands[1].text  # the capture's own is there
        return located(self.left[0], self.gap)


def run(servers: Servers, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[str]]:
    monkeypatch.setattr(gate_run, "compare", servers.compare)
    monkeypatch.setattr(gate_run, "localize", servers.localize)
    monkeypatch.setattr(gate_heal.servers, "headline", lambda gate: f"gate: {gate.numbers}")
    opened: Any = SimpleNamespace(golden=SimpleNamespace(path=Path("golden-folder")),
                                  floors=[SimpleNamespace(path=Path("floor-folder"))])  # fmt: skip
    said: list[str] = []
    rounds = heal(GateOptions(*COMMANDS, out=tmp_path), opened, found, SendSettings(), 1.0, said.append)
    return rounds, said


ELSEWHERE = "model.layers.0.self_attn.attn"
CASES: dict[str, tuple[Servers, Any, list[str], str]] = {
    "one cause": (Servers([DOWN]), located(DOWN), ["pass"], "with it healed the servers agree: 1 cause"),
    "two causes": (Servers([DOWN, ATTN]), located(DOWN), ["fail", "pass"],
                   "with them healed the servers agree: 2 causes"),
    "one operator in two layers": (Servers([ATTN, ELSEWHERE]), located(ATTN), ["fail", "pass"],
                                   "with it healed the servers agree: 1 cause"),
    "no reference": (Servers([DOWN], unhealable=DOWN), located(DOWN), ["fail"],
                     f"heal: {DOWN} cannot be healed, see above"),
    "it stays, the other does not": (Servers([ATTN, DOWN], unhealable=DOWN), located(ATTN), ["fail", "fail"],
                                     f"and {DOWN} is still named"),
    "undecided": (Servers([DOWN, ATTN], verdict=None), located(DOWN), [None],
                  "with it healed no difference is seen: 1 cause, as far as these prompts show"),
    "unseen": (Servers([DOWN, ATTN], gap={"before": ATTN}), located(DOWN), ["fail"],
               f"the servers still differ; heal: what is wrong lies unseen before {ATTN}"),
    "no culprit": (Servers([]), located(None), [], "heal: no culprit is named that could be healed"),
    "too many": (Servers([f"model.a{n}" for n in range(6)]), located("model.a0"), ["fail"] * 4,
                 "heal: 4 causes are healed, and more remain"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rounds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, found, verdicts, ends = CASES[name]
    rounds, said = run(servers, found, tmp_path, monkeypatch)
    assert [one["verdict"] for one in rounds] == verdicts
    last = next(line for line in reversed(said) if not line.startswith(("  ", "what they cost")))
    assert ends in last, said
    assert all(one["why"] == "" for one in rounds[:-1])
    assert ("  accprobe eval-diff HEALED-RUN MINE-RUN" in said) == (bool(verdicts) and verdicts[-1] != "fail")
    if name == "two causes":
        assert f"a second one remains: {ATTN}" in said
        assert servers.commands[1].startswith(f"VLLM_ACCPROBE_HEAL={DOWN},{ATTN} VLLM_ACCPROBE_DIR=")
        assert servers.commands[1].endswith(" serve mine")


def test_a_glob_for_each_cause() -> None:
    one = with_cause((), ATTN)
    both = with_cause((*one, DOWN), ELSEWHERE)
    assert both == ("model.layers.*.self_attn.attn", DOWN)
    assert [covered(m, both) for m in (ATTN, DOWN, "model.layers.0.mlp.down_proj")] == [True, True, False]


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    for mine, what in (("http://x:1", "a URL"), (str(tmp_path), "a folder")):
        sides: Any = GateOptions("serve it", mine, out=tmp_path), None, located(DOWN)
        assert heal(*sides, SendSettings(), 1.0, said.append) == []
        assert said.pop().startswith(f"heal: {what} cannot be started with a healed operator")
