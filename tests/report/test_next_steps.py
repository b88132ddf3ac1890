"""Each printed command is typed in on the dumps that it was printed for, and does what it is printed for."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from opcheck.opcheck_dumps import Maker
from report_examples import ORIGIN, comparison, pair, realistic
from support.peer_dumps import unpack
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main
from vllm_accprobe.report import markdown, notebook, terminal
from vllm_accprobe.report.facts import glob_of
from vllm_accprobe.report.follow_ups import MOST, next_steps
from vllm_accprobe.report.html import sections

DOWN = "model.layers.1.mlp.down_proj"
ODD = "it's *one*, [2]"
"""A module's name that a shell and a list of globs would take apart."""
ONE = {"prompts": {"a b*": [3, 14, 15, 9, 2], "b": [6, 5, 3]}, "tokens": 3}
PROBE = {"tool": "accprobe", "model": {"path": "", "class": "Tiny"}, "probe": {"task": "tensor"}}
RUN = {"tool": "accprobe", "model": {"path": "MODEL", "dtype": "bfloat16"}, "engine": {"runner": "vllm.R"}}


def norm(root: Path, name: str, gain: float, tap: str = ODD) -> str:
    """One RMSNorm of which one row is ``gain`` times too large."""
    torch = pytest.importorskip("torch")
    g = torch.Generator().manual_seed(5)
    x = torch.randn(24, 256, generator=g).bfloat16()
    weight = torch.rand(256, generator=g).bfloat16() + 0.5
    m = Maker(root / name, run=PROBE)
    m.module("<root>", "Tiny")
    m.module(tap, "RMSNorm", variance_epsilon=1e-6)
    m.request(0, 24)
    m.param(tap, "RMSNorm", weight=weight)
    m.step(0, [(0, 0, 24)])
    y = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    y[7] *= gain
    m.call(tap, "RMSNorm", {"x": x}, y.bfloat16())
    return str(m.close().relative_to(root))


def replayed(root: Path) -> tuple[str, str, list[str]]:
    return norm(root, "my golden", 1.0), norm(root, "-mine", 1.2), []


def not_replayed(root: Path) -> tuple[str, str, list[str]]:
    return norm(root, "golden", 1.0), norm(root, "mine", 1.2), ["--no-replay", "--out", "a report"]


def inferred(root: Path) -> tuple[str, str, list[str]]:
    write(capture(**ONE), root / "golden")
    write(capture(faults={DOWN: scaled(1.2)}, **ONE), root / "my mine")
    return "golden", "my mine", ["--taps", "model.layers.*,lm_head"]


def renamed(root: Path) -> tuple[str, str, list[str]]:
    """Golden's requests have other ids, and every server counts its steps for itself."""
    others = {f"golden-{name}": ids for name, ids in ONE["prompts"].items()}  # type: ignore[union-attr]
    write(capture(prompts=others, tokens=3), root / "golden")
    write(capture(faults={DOWN: scaled(1.2)}, **ONE), root / "mine")
    return "golden", "mine", []


def peers(name: str) -> Callable[[Path], tuple[str, str, list[str]]]:
    def made(root: Path) -> tuple[str, str, list[str]]:
        unpack(name, root)
        return f"{name}/golden", f"{name}/mine", []

    return made


KINDS = {
    "replayed": (replayed, ["gentest", "opcheck", "inspect", "inspect", "compare"]),
    "not replayed": (not_replayed, ["compare", "inspect", "inspect", "compare"]),
    "inferred": (inferred, ["inspect", "inspect", "compare"]),
    "renamed": (renamed, ["inspect", "inspect", "compare"]),
    "msprobe": (peers("a_msprobe_tensor"), ["inspect", "inspect", "compare"]),
    "h5": (peers("d_xray_h5"), ["inspect", "inspect", "compare"]),
    "atb, torch": (peers("e_atb_vs_torch"), ["inspect"]),
}


@pytest.mark.parametrize(  # extra: one more foreign dump
    "kind", [pytest.param(kind, marks=pytest.mark.extra) if kind == "h5" else kind for kind in KINDS]
)
def test_each_command_runs_as_it_is_printed(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make, wanted = KINDS[kind]
    golden, mine, more = make(tmp_path)
    mine = f"./{mine}" if mine.startswith("-") else mine
    assert main(["compare", golden, mine, *more]) == 1
    printed = capsys.readouterr().out.splitlines()
    out = Path(more[-1] if "--out" in more else "accprobe-report")
    said = json.loads((out / "compare.json").read_text())["next"]
    lines = [line for step in said for line in step["command"].splitlines()]
    assert [shlex.split(line)[1] for line in lines] == wanted
    end = [x for step in said for x in (f"  {step['why']}:", *(f"    {c}" for c in step["command"].splitlines()))]
    shown = [w for w in map(shlex.split, lines) if w[1] == "inspect"]
    asked = [w[w.index("--requests") + 1] if "--requests" in w else None for w in shown]
    if len(asked) > 1 and kind != "renamed":
        assert asked[0] == asked[1]  # the same request on both sides
    elif kind == "renamed":
        assert asked[1] == f"golden-{asked[0]}"
    named = json.loads((out / "compare.json").read_text())["origins"][0]
    if named["request"] and asked[0]:  # the row that the headline names
        positions = [w[w.index("--positions") + 1] for w in shown]
        assert (asked[0], positions) == (glob_of(named["request"]), [str(named["position"])] * len(shown))
    wrote = [line for line in printed if line.startswith("wrote ")]
    assert printed[-len(end) - 1 - len(wrote) :] == ["next:", *end, *wrote]
    for line in lines:
        code = main(shlex.split(line)[1:])
        caught = capsys.readouterr()
        words = shlex.split(line)
        # opcheck finds it wrong again, and so does compare: of its layer, or by its replay.
        assert code == {"gentest": 0, "inspect": 0, "opcheck": 1, "compare": 1}[words[1]], (line, caught.err)
        if words[1] == "inspect" and "--positions" in words:
            assert f"position {words[words.index('--positions') + 1]}" in caught.out, caught.out
        if words[1] == "compare":
            again = json.loads((Path(words[words.index("--out") + 1]) / "compare.json").read_text())
            culprit = json.loads((out / "compare.json").read_text())["origins"][0]["module"]
            assert again["origins"][0]["module"] == culprit
    if "gentest" in wanted:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "accprobe-report/gentest"], capture_output=True)
        assert b"1 passed" in done.stdout, done.stdout[-500:]


def test_what_was_not_captured_is_captured_and_replayed(tmp_path, monkeypatch, capsys):
    """Whatever serves the model is played by a capture of the same synthetic model into the folder that is named."""
    monkeypatch.chdir(tmp_path)
    sides = {"golden": capture(**ONE), "mine": capture(faults={DOWN: scaled(1.2)}, **ONE)}
    for name, dump in sides.items():
        dump.run = RUN | {"probe": {"task": "stats"}}
        write(dump, tmp_path / name, payloads=False)
    assert main(["compare", "golden", "mine"]) == 1
    said = json.loads(Path("accprobe-report/compare.json").read_text())["next"]
    assert "was not captured" in said[0]["why"]
    ran = []
    for line in said[0]["command"].splitlines():
        words = shlex.split(line)
        if words[0] == "accprobe":
            assert main(words[1:]) == 1, capsys.readouterr().err
        else:
            settings = dict(word.split("=", 1) for word in words[: words.index("vllm")])
            assert settings["VLLM_ACCPROBE_MODULES"] == DOWN
            assert settings["VLLM_ACCPROBE_TASK"] == "tensor"
            side = "golden" if "golden" in settings["VLLM_ACCPROBE_DIR"] else "mine"
            sides[side].run = RUN | {"probe": {"task": "tensor"}}
            write(sides[side], tmp_path / settings["VLLM_ACCPROBE_DIR"])
        ran.append(words[0].partition("=")[0])
    assert ran == ["VLLM_ACCPROBE", "VLLM_ACCPROBE", "accprobe"]
    found = json.loads(Path("accprobe-report/replayed/compare.json").read_text())
    assert (found["origins"][0]["module"], found["origins"][0]["evidence"]) == (DOWN, "replay")


def test_all_reports_show_the_same_lines() -> None:
    result = replace(realistic(), out="o")
    lines = [line for step in next_steps(result) for line in step["command"].splitlines()]
    assert 2 < len(lines) <= 2 * MOST
    assert [line.strip() for line in terminal.next_commands(result) if line.startswith("    ")] == lines
    assert [line.strip() for line in markdown.markdown_lines(result) if line.startswith("    accprobe")] == lines
    for text in (sections.next_commands(result), notebook.repr_html(result)):
        plain = unescape(re.sub(r"<[^>]+>", "", text))  # the page marks the words of a line
        assert all(line in plain for line in lines)


def test_a_name_that_cannot_be_typed_is_not_offered() -> None:
    name = "a\nb"
    result = comparison(pairs=[pair(tap=name, status="fail", golden=name, mine=name)], verdict="fail",
                        origins=[ORIGIN | {"module": name}])  # fmt: skip
    assert [s["command"] for s in next_steps(result)] == ["accprobe compare golden mine --taps 'a?b,a?b.*'"]
    assert next_steps(replace(result, mine_path="m\nine")) == []


def test_a_module_named_like_a_preset_is_captured_by_its_name() -> None:
    run = {"tool": "accprobe", "probe": {"task": "stats"}, "engine": {"runner": "vllm.R"}, "model": {"path": "M"}}
    result = comparison(
        pairs=[pair(tap="mlp", status="fail")], verdict="fail", origins=[ORIGIN | {"module": "mlp", "tier": "proved"}],
        golden_run=run, mine_run=run,
    )  # fmt: skip
    assert "VLLM_ACCPROBE_MODULES='[m]lp'" in next_steps(result)[0]["command"]


def test_presets_are_those_of_the_probe() -> None:
    from vllm_accprobe.config import _MODULE_PRESETS
    from vllm_accprobe.report.follow_ups import _PRESETS

    assert set(_MODULE_PRESETS) == _PRESETS


def test_a_ledgers_finding_is_shown_before_any_kernel_is_tested() -> None:
    found = {"mine": {"count": 1, "findings": [{"sentence": "a block was read that nobody wrote"}]}}
    result = comparison(pairs=[pair(tap="a", status="fail")], states=found, origins=[ORIGIN | {"module": "a"}])
    assert result.verdict == "fail"
    words = [shlex.split(s["command"].splitlines()[0])[1:] for s in next_steps(result)]
    assert words[0] == ["inspect", "mine", "states"]
    assert not {"gentest", "opcheck"} & {w[0] for w in words}
