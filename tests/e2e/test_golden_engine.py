"""``accprobe golden make`` and ``check`` with two real servers: a pack that is reproduced to the bit, and a planted
fault that is found with nothing but the pack."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.captures import Engines
from support.engine import Ask
from support.prompts import prompt
from tiny_model import make
from vllm_server import ENV, SMALL

from vllm_accprobe.cli import main
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.formats.io.pack_file import begins_as_pack
from vllm_accprobe.golden import make as golden
from vllm_accprobe.golden.estimated import ESTIMATED, compared_sides
from vllm_accprobe.golden.pack import pack

pytestmark = pytest.mark.engine
FAULTS = Path(__file__).resolve().parents[2] / "lab" / "planted"
FAULT = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.05}
OPTIONS = [*SMALL, "--max-num-batched-tokens=64", "--enforce-eager"]


def test_a_fault_is_found_with_a_pack_alone(preloaded_vllm, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    search = os.pathsep.join([str(preloaded_vllm), os.environ["PATH"]])
    for name, value in (ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": search}).items():
        monkeypatch.setenv(name, value)
    model = make("qwen2", tmp_path / "model")
    lines: list[dict[str, Any]] = [{"id": "text", "prompt": "one two three four"}]
    lines += [{"id": f"ids{n}", "token_ids": [7 + i * n % 400 for i in range(n)]} for n in (5, 30, 90)]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["golden", "make", str(model), "--out", "x.golden", "--prompts", "prompts.jsonl", "--keep", "golden"]
    monkeypatch.setattr(golden, "_WHOLE", 1e6)
    assert main([*words, "--", *OPTIONS]) == 0, capfd.readouterr().err
    said = capfd.readouterr()
    assert said.out.startswith("reproduced to the bit: ")
    assert "4 prompts" in said.out
    with open("x.golden", "rb") as file:
        assert begins_as_pack(file.read(64))
    dump = open_dump(Path("golden/dump"))
    rows = {dump.requests[rank, s.req].id: 0 for (rank, _, _), space in dump.rows.items() for s in space.segments}
    for (rank, _, name), space in dump.rows.items():
        for s in space.segments if name == "tokens" else ():
            rows[dump.requests[rank, s.req].id] += s.n
    assert rows["ids5"] == rows["ids5.again"] == 5 + 7  # whole: the last of eight tokens is not computed
    assert 0 < rows["ids90"] == rows["ids90.again"] < 40  # the rows of a pack alone
    monkeypatch.setenv("ACCPROBE_FAULT", json.dumps(FAULT))
    code = main(["golden", "check", "x.golden", "--keep", "mine", "--", "vllm", "serve", str(model), *OPTIONS])
    said = capfd.readouterr()
    assert code == 1, said.err
    assert said.out.startswith("answers: log-probabilities of ")
    found = json.loads(Path("mine/report/compare.json").read_text())
    assert found["origins"][0]["module"] == FAULT["module"]
    assert found["origins"][0]["evidence"] == "replay"


PICTURES = [Ask([*prompt(12, 1), 4, 6, 5, *prompt(9, 2)], 4, images=((112, 112, 5),)),
            Ask([*prompt(5, 4), 4, 6, 5, *prompt(9, 2)], 4, images=((84, 140, 7),))]  # fmt: skip
ROTARY, DOWN = "visual.blocks.1.attn.apply_rotary_emb", "visual.blocks.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("fault", "named"),
    [(None, []), ({"module": ROTARY, "factor": 1.2}, [ROTARY]),
     pytest.param({"module": DOWN, "factor": 1.2, "rows": "patch>=30"}, [DOWN],
                  marks=pytest.mark.extra("a tower's fault: the one before"))],
)  # fmt: skip
def test_a_fault_in_a_vision_tower(engines: Engines, tmp_path: Path, fault: Any, named: list[str]) -> None:
    """A pack in which the tower's inner calls have sketches alone, of golden's images one by one, mine's together."""
    first = engines.run("pictures-golden", "qwen2.5-vl", PICTURES, how="serial")
    name = f"pictures-{fault['module'] if fault else 'clean'}"
    mine = engines.run(name, "qwen2.5-vl", PICTURES, fault={"kind": "scale", **fault} if fault else None)
    assert first.dump is not None
    assert mine.dump is not None
    pack(first.dump, tmp_path / "x.golden", max_bytes=110_000)
    with compared_sides(tmp_path / "x.golden", mine.dump) as sides:
        found = sides.judged(compare(sides.golden, sides.mine))
    assert [o["module"] for o in found.origins][:1] == named
    assert found.verdict == ("fail" if named else "pass")
    seen = {p.tap for p in found.pairs if p.tap.startswith("visual.blocks.") and p.message.startswith(ESTIMATED)}
    assert ROTARY in seen
