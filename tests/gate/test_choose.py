"""What a dig captures: of which requests, in which pass, and what a disk budget leaves of it."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_folders import folder

from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.decode import decode
from vllm_accprobe.gate.localize import (
    EAGER,
    Localization,
    Localized,
    LocalizePlan,
    LocalizeTarget,
    RowSizes,
    Window,
    choose,
    commands,
    dug,
    lines,
    narrowed,
    settings,
)
from vllm_accprobe.gate.measure.gating import WorstToken
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.replies import Reply, Sent
from vllm_accprobe.report import servers


def sent(
    path: Path, arrive: tuple[str, ...] = ("one", "all"), cached: dict[str, int] | None = None, **how: Any
) -> Sent:
    """Prompts p0, p1, ... of 20, 40, ... tokens, each the beginning of the next; those that came from the cache."""
    known = cached or {}

    def change(i: int, reply: Reply) -> Reply:
        return replace(reply, cached=known.get(reply.name, 0) if cached is not None else None)

    return replies.read(folder(path, 1, arrive=arrive, change=change, prompts=4, **how))


def worst(name: str, ordinal: int, pass_index: int, gap: float = 0.5) -> WorstToken:
    return WorstToken(name, ordinal, 19 + ordinal, gap, 0.01, pass_index)


@pytest.fixture
def golden(tmp_path: Path) -> Sent:
    return sent(tmp_path / "golden", cached={})


def test_the_request_whole_up_to_the_token(golden: Sent) -> None:
    plan = choose(golden, golden, [worst("p1", 4, 0)])
    assert plan.target == LocalizeTarget("p1", 4, 23, 0.5, 0)
    assert plan.windows == (Window(0, ("p1",), 0, 4, (40,)),)
    assert plan.words == ("one",)  # what comes after it need not be sent
    own = plan.windows[0]
    assert (own.rows, own.sampled, own.requests) == (44, 5, ("p1",))
    assert decode(LocalizePlan, json.loads(json.dumps(plan.to_json()))) == plan


def test_three_requests_of_the_same_pass(golden: Sent) -> None:
    """As far as the furthest of their own worst tokens; what is in another pass is another story."""
    found = [
        worst("p1", 2, 1),
        worst("p1", 9, 1),
        worst("p0", 1, 0),
        worst("p2", 5, 1),
        worst("p3", 0, 1),
        worst("p0", 8, 1),
    ]
    plan = choose(golden, golden, found)
    assert [(w.pass_index, w.names, w.first, w.last) for w in plan.windows] == [(1, ("p1", "p2", "p3"), 0, 5)]
    assert plan.windows[0].requests == ("p1.pass1", "p2.pass1", "p3.pass1")
    assert plan.words == ("one", "all")


def test_who_filled_the_prefix_cache(tmp_path: Path, golden: Sent) -> None:
    """Of p2's 60 tokens 32 came from the cache: the first that had them is p1 of the first pass."""
    mine = sent(tmp_path / "mine", cached={"p2": 32})
    assert [(w.pass_index, w.names, w.first, w.last) for w in choose(golden, mine, [worst("p2", 3, 1)]).windows] == [
        (0, ("p1",), 0, 0), (1, ("p2",), 0, 3),
    ]  # fmt: skip
    # In the pass in which one came after the other, it is an earlier prompt of that pass.
    assert choose(golden, mine, [worst("p2", 3, 0)]).windows == (Window(0, ("p2", "p1"), 0, 3, (60, 40)),)


def test_a_server_that_does_not_tell(tmp_path: Path) -> None:
    """In a second pass a prompt is taken to be in the cache, since its first pass; in the first pass it is not."""
    silent = sent(tmp_path / "silent")
    assert [w.names for w in choose(silent, silent, [worst("p2", 3, 1)]).windows] == [("p2",), ("p2",)]
    assert len(choose(silent, silent, [worst("p2", 3, 0)]).windows) == 1


def test_the_engines_own_steps_tell_better(tmp_path: Path) -> None:
    silent = sent(tmp_path / "silent")
    told = sent(tmp_path / "told", steps=lambda index, i, length: [(i, 16 * index, length - 16 * index, 1)])
    source, own = choose(silent, told, [worst("p3", 1, 1)]).windows
    assert (source.names, own.names) == (("p0",), ("p3",))  # 16 tokens: p0 is the first that begins with them
    assert len(choose(silent, told, [worst("p3", 1, 0)]).windows) == 1


def test_a_scored_pass_only_where_nothing_else_is_wrong(tmp_path: Path) -> None:
    golden = sent(tmp_path / "golden", ("one", "all", "score"), cached={})
    scored = WorstToken("p1", 0, 30, 0.9, 0.01, 2)
    assert choose(golden, golden, [scored, worst("p2", 3, 0)]).words == ("one",)
    plan = choose(golden, golden, [scored])
    assert plan.words == ("one", "all", "score")
    assert [(w.pass_index, w.names) for w in plan.windows] == [(2, ("p1",))]


PLAN = LocalizePlan(
    LocalizeTarget("a", 6, 70, 0.5, 1),
    (Window(0, ("s",), 0, 0, (50,)), Window(1, ("a", "b", "c"), 0, 6, (100, 100, 100))),
    ("one", "all"),
)


@pytest.mark.parametrize(("left", "windows", "says"), [
    (10_000, [("s", 0, 0), ("abc", 0, 6)], []),
    (3700, [("s", 0, 0), ("abc", 0, 6)], []),  # 50 + 300 + 18 rows of 10 bytes, 22 sampled ones of 0.5
    (3690, [("s", 0, 0), ("ab", 0, 6)], ["1 of 3 requests"]),
    (1600, [("s", 0, 0), ("a", 0, 6)], ["2 of 3 requests"]),
    (1100, [("a", 0, 6)], ["2 of 3", "filled the prefix cache"]),
    (100, [("a", 1, 6)], ["2 of 3", "filled the prefix cache", "the 100 rows of the prompt"]),
    (25, [("a", 5, 6)], ["2 of 3", "filled", "100 rows of the prompt", "the tokens before token 5"]),
    (1, [("a", 6, 6)], ["2 of 3", "filled", "rows of the prompt", "before token 6",
                         "GB a rank are needed (--localize-gb)"]),
])  # fmt: skip
def test_what_a_budget_leaves(left: float, windows: list[Any], says: list[str]) -> None:
    plan = narrowed(PLAN, RowSizes(10.0, 0.5, left))
    assert [("".join(w.names), w.first, w.last) for w in plan.windows] == windows
    assert len(plan.left) == len(says)
    for said, wanted in zip(plan.left, says, strict=True):
        assert wanted in said
    assert (RowSizes(10.0, 0.5, left).of(plan) <= left) == (not any("--localize-gb" in s for s in plan.left))
    assert plan.target == PLAN.target


def test_a_prompts_last_row_is_kept_whatever_it_takes() -> None:
    plan = LocalizePlan(LocalizeTarget("a", 0, 99, 0.5, 0), (Window(0, ("a",), 0, 0, (100,)),), ("one",))
    found = narrowed(plan, RowSizes(1e6, 0, 1e6))
    assert found.windows == plan.windows
    assert found.left == ("what the budget ends before: 0.1 GB a rank are needed (--localize-gb)",)


# --- the commands of a dig that a person does, literally ---


BY_HAND = LocalizePlan(
    LocalizeTarget("a*b", 3, 70, 0.5, 1),
    (Window(0, ("s",), 0, 0, (50,)), Window(1, ("a*b", "it's,c"), 0, 3, (40, 50))),
    ("one", "all"),
)


def test_the_commands() -> None:
    requests = """'s,a[*]b.pass1,it'"'"'s?c.pass1'"""
    front = "VLLM_ACCPROBE=1 VLLM_ACCPROBE_FORCE=1 VLLM_ACCPROBE_DIR={}-dump VLLM_ACCPROBE_MAX_GB=20 "
    front += f"VLLM_ACCPROBE_REQUESTS={requests} VLLM_ACCPROBE_TOKENS=0-3 COMMAND"
    end = "on its machine (COMMAND: what serves it there; end it with SIGTERM or Ctrl-C when all is sent):"
    assert lines(BY_HAND, Path("out/golden"), 20) == [
        f"golden, {end}",
        f"  {front.format('golden')}",
        "  accprobe send --teacher-force out/golden --url URL --out golden-dig",
        f"mine, {end}",
        f"  {front.format('mine')}",
        "  accprobe send --teacher-force out/golden --url URL --out mine-dig",
        "anywhere:",
        "  accprobe compare golden-dump mine-dump --out compare",
    ]


def test_a_shell_and_a_server_understand_the_settings() -> None:
    """As the server reads them: these requests in these passes, and no others."""
    words = dict(word.split("=", 1) for word in shlex.split(settings(BY_HAND, "mine", 0.5)))
    config = ProbeConfig.from_env({k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | words)
    assert (config.enabled, config.force, config.dir, config.max_gb) == (True, "1", "mine-dump", 0.5)
    assert config.tokens == ((0, 3),)
    for name, wanted in (("s", 1), ("a*b.pass1", 1), ("it's,c.pass1", 1), ("a*b", 0), ("axb.pass1", 0), ("s.pass1", 0)):
        assert config.wants_request(name) == bool(wanted), name


# --- what a dig ends with, from a comparison's json and the answers that came while it was captured ---


ORIGIN = {
    "module": "model.layers.2.mlp.down_proj", "class": "RowParallelLinear", "role": "output.0", "request": "p2.pass1",
    "position": 63, "phase": "decode", "created": 0.05, "propagated": 0.0, "floor": 0.004, "evidence": "jump",
    "tier": "beyond chance", "times": 12.5, "shape": "only decode, scale 1.05",
}  # fmt: skip
DUG = LocalizePlan(LocalizeTarget("p1", 3, 42, 0.4, 1), (Window(1, ("p1", "p2"), 0, 3, (40, 60)),), ("one", "all"))


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def of(origins: list[Any], wrong: float = 0.4, verdict: str = "fail", graphs: bool = False) -> Localized:
        dig = Localization(tmp_path / "dig", {}, DUG)
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


@pytest.mark.parametrize(
    ("cause", "says"), [(None, "differs"), ({"text": "is golden's times 1.3"}, "is golden's times 1.3")]
)
def test_a_weight_is_named(cause: Any, says: str, made: Any) -> None:
    weight = {"role": "param.weight", "request": None, "position": None, "evidence": "values", "cause": cause}
    (line,) = [x for x in servers.localize_lines(made([ORIGIN | weight])) if x.startswith("culprit")]
    assert line == f"culprit: model.layers.2.mlp.down_proj (RowParallelLinear), layer 2: its param.weight {says}"


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
