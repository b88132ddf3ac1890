"""``!`` excludes, in every command that takes globs; and gradients of API calls that msprobe recorded."""

from collections import Counter
from pathlib import Path

import pytest
from cli.cli_dumps import make
from opcheck.layer_dumps import build
from support.csv_rows import csv_rows as rows

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import Selection
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import wanted


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("chosen") / "d")


CHOICES = [
    (["!RMSNorm", "!*Linear"], {"Attention", "NobodyKnows"}),
    (["*", "!*attn*"], {"RMSNorm", "NobodyKnows"}),
    (["!*", "Attention"], {"Attention"}),
    (["layers.0.*", "!*.odd", "!*_proj"], {"RMSNorm", "Attention"}),
]


@pytest.mark.parametrize(("globs", "classes"), CHOICES)
def test_opcheck_and_gentest_leave_out_what_is_excluded(dump, tmp_path, globs, classes):
    asked = [x for g in globs for x in ("--ops", g)]
    assert main(["opcheck", str(dump), *asked, "-j", "0", "--out", str(tmp_path / "o")]) == 0
    assert {r["class"] for r in rows(tmp_path / "o/opcheck.csv")} - {"TinyForCausalLM"} == classes
    assert main(["gentest", str(dump), *asked, "--out", str(tmp_path / "t")]) == 0
    cases = {p.name.split("-")[1] for p in (tmp_path / "t/cases").glob("*.json")}
    assert cases - {"TinyForCausalLM"} == classes


def test_an_operator_is_named_with_and_without_its_overload() -> None:
    tap = ("model.norm::aten.mul.Tensor", "aten.mul.Tensor")
    assert wanted(["aten.mul*"], *tap)
    assert not wanted(["!aten.mul*"], *tap)
    plain = ("model.up::aten.mm.default", "aten.mm.default")
    assert wanted(["aten.mm"], *plain)
    assert not wanted(["*", "!aten.mm"], *plain)
    assert wanted(["model.up::aten.mm"], *plain)


def test_requests_and_roles_are_excluded(tmp_path: Path) -> None:
    opened = open_dump(make(tmp_path / "d"))
    hashed = next(iter(opened.requests.values())).prompt

    def steps(*requests: str) -> int:
        return len(Selection(requests=requests).apply(opened))

    alone = {glob: steps(glob) for glob in ("chat-1", "chat-2", "chat-*")}
    assert alone["chat-1"] > 0
    assert steps("!chat-2") == alone["chat-1"]
    assert steps("chat-*", "!chat-1") == alone["chat-2"]
    assert steps(f"!{hashed[:8]}") == alone["chat-2"]
    roles = Counter(r.role.partition(".")[0] for _, r in Selection(roles=("!input.*",)).apply(opened))
    assert "input" not in roles
    assert roles["output"] > 0
