"""What a dig ends with, from a comparison's json and the answers that came while it was captured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_folders import folder

from vllm_accprobe.gate.localize import (
    EAGER,
    Localization,
    Localized,
    LocalizePlan,
    LocalizeTarget,
    Window,
    commands,
    dug,
)
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.report import servers

ORIGIN = {
    "module": "model.layers.2.mlp.down_proj", "class": "RowParallelLinear", "role": "output.0", "request": "p2.pass1",
    "position": 63, "phase": "decode", "created": 0.05, "propagated": 0.0, "floor": 0.004, "evidence": "jump",
    "tier": "beyond chance", "times": 12.5, "shape": "only decode, scale 1.05",
}  # fmt: skip
PLAN = LocalizePlan(LocalizeTarget("p1", 3, 42, 0.4, 1), (Window(1, ("p1", "p2"), 0, 3, (40, 60)),), ("one", "all"))


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def of(origins: list[Any], wrong: float = 0.4, verdict: str = "fail", graphs: bool = False) -> Localized:
        dig = Localization(tmp_path / "dig", {}, PLAN)
        golden = replies.read(folder(dig.sent("golden"), 1, noise=0.0, forced="accprobe"))
        folder(dig.sent("mine"), 2, noise=0.0, forced="accprobe", fault=lambda length, k, i: wrong if k == 3 else 0.0)
        for side in ("golden", "mine"):
            dig.dump(side).mkdir()
        (dig.sent("mine") / "engine-0.log").write_text("" if graphs else f"WARNING accprobe: {EAGER.decode()} so that")
        (dig.root / "compare").mkdir()
        said = {"schema": 1, "verdict": verdict, "origins": origins}
        (dig.root / "compare" / "compare.json").write_text(json.dumps(said))
        return dug(dig, dig.root / "compare", golden)

    return of


def test_the_culprit_and_its_token(made: Any) -> None:
    """Position 63 of a prompt of 60: the forward of its fourth generated token."""
    found = made([ORIGIN, ORIGIN | {"module": "model.norm"}])
    assert found.token == ("p2", 1, 4)
    assert (found.shows, found.others, found.verdict) == (True, 1, "fail")
    lines = servers.localize_lines(found)
    assert lines[0].startswith("  the token's gap: 0.4 nats in the gate, 0.")
    assert lines[1:4] == [
        "culprit: model.layers.2.mlp.down_proj (RowParallelLinear), layer 2, token 4 of p2 (position 63, pass 1)",
        "  beyond chance: 12 times its floor; created error 0.05, rounding alone 0.004; only decode, scale 1.05",
        "  1 other independent origin, in the comparison's report",
    ]
    assert lines[4] == "look further:"
    assert [line.split()[1] for line in lines[5:]] == ["compare", "opcheck", "gentest"]
    said = json.loads(json.dumps(found.to_json()))
    assert said["token"] == {"prompt": "p2", "pass": 1, "ordinal": 4}
    assert said["culprit"]["module"] == "model.layers.2.mlp.down_proj"


@pytest.mark.parametrize(("request_id", "position", "token"), [
    ("p2", 10, ("p2", 0, 0)), ("p2.pass1", 59, ("p2", 1, 0)), ("p2", 60, ("p2", 0, 1)), ("other", 3, None),
    ("p2.pass7", 3, None), ("p2", None, None),
])  # fmt: skip
def test_whose_token(request_id: str, position: int | None, token: Any, made: Any) -> None:
    assert made([ORIGIN | {"request": request_id, "position": position}]).token == token


def test_a_fault_that_did_not_show_is_said(made: Any) -> None:
    found = made([], wrong=0.0, verdict="pass")
    assert (found.gap, found.shows) == (0.0, False)
    assert servers.localize_lines(found)[:3] == [
        "  the token's gap: 0.4 nats in the gate, 0 while captured",
        "  THE DIFFERENCE DID NOT SHOW while captured: the engine was made eager for it; where the fault is one of "
        "compiled code or captured graphs, put VLLM_ACCPROBE_GRAPHS=1 in front of both commands",
        "no culprit: in the captured rows every module is the same within rounding",
    ]


def test_as_configured_there_is_another_reason(made: Any) -> None:
    lines = servers.localize_lines(made([], wrong=0.0, verdict="fail", graphs=True))
    assert lines[1].endswith("while captured: it needs a batch or a moment that did not come again")
    assert lines[2].startswith("no culprit: the captured rows differ, and no module is beyond its floor")


def test_commands_bear_any_path() -> None:
    assert commands(Path("a b/golden"), Path("a b/mine"), Path("a b"))[0] == (
        "accprobe compare 'a b/golden' 'a b/mine' --out 'a b/compare' --verbose"
    )
