"""A full disk, in every command that writes: one line with path and bytes, exit code 2, nothing left of the file, and
the verdict before that."""

from __future__ import annotations

import contextlib
import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.cli_dumps import make

from vllm_accprobe.cli import main

HEADER = "op,class,tap,call,role,step,rank,dtype,shape,max_abs_err,ulp_share,ulp_mean,ulp_max\n"
ROW = "matmul,Tensor.matmul,a,{},output.0,0,0,float32,[2],0.0,0.0,0.0,0.0\n"
ONE = "inspect {golden} model.embed_tokens --role output.0 --step 0 --save {out}/"

COMMANDS = {
    "compare": ("compare {golden} {mine} --no-replay --out {out}", 400, "PASS"),
    "compare --json": ("compare {golden} {mine} --no-replay --json --out {out}", 400, '"verdict": "pass"'),
    "compare, measured.npz": ("compare {golden} {mine} --no-replay --out {out}", 90_000, "PASS"),
    "tables": ("compare {tables}/1.csv {tables}/2.csv --out {out}", 400, "pass"),
    "tables --json": ("compare {tables}/1.csv {tables}/2.csv --json --out {out}", 400, '"exit_code": 2'),
    "calibrate": ("compare {golden} {mine} --calibrate {out}", 10, ""),
    "inspect --csv": ("inspect {golden} --csv {out}/x.csv", 400, ""),
    "inspect FILE": ("inspect {golden} {out}/x.txt", 400, ""),
    "inspect --save npy": (ONE + "x.npy", 40, ""),
    "inspect --save": (ONE + "x.safetensors", 40, ""),
    "convert h5": ("convert {golden} {out}/x.h5", 400, ""),
    "convert npz": ("convert {golden} {out}/x.npz", 400, ""),
    "convert safetensors": ("convert {golden} {out}/x.safetensors", 400, ""),
    "opcheck": ("opcheck {calls} -j 0 --out {out}", 1000, "1 of 1"),
    "opcheck, at once": ("opcheck {calls} -j 0 --out {out}", 100, ""),
    "gentest": ("gentest {calls} --ops * --out {out}/new", 400, ""),
    "eval-diff": ("eval-diff {samples}/a.jsonl {samples}/b.jsonl --csv {out}/x.csv", 100, "PASS"),
}  # fmt: skip
"""The command, the largest file that it may write, and what stdout has of the result."""


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def words(command: str, root: Path) -> list[str]:
    if "{calls}" in command:
        import torch
        from opcheck.opcheck_dumps import Maker

        maker = Maker(root / "calls")
        maker.module("act", "SiluAndMul")
        maker.request(0, 3)
        maker.step(0, [(0, 0, 3)])
        x = torch.linspace(-2, 2, 24).reshape(3, 8)
        maker.call("act", "SiluAndMul", {"0": x}, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
        maker.close()
    for name in ("golden", "mine"):
        make(root / name)
    for name in ("1.csv", "2.csv"):
        rows = "".join(ROW.format(call) for call in range(40))
        (root / name).write_text(HEADER + rows)
    for name in ("a.jsonl", "b.jsonl"):
        lines = [{"doc_id": i, "doc": {}, "target": "x", "resps": [["x"]], "filtered_resps": ["x"], "acc": 1.0,
                  "metrics": ["acc"], "filter": "none", "arguments": {}} for i in range(30)]  # fmt: skip
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "out").mkdir()
    places = {name: root / name for name in ("golden", "mine", "calls", "out")}
    return [word.format(**places, tables=root, samples=root) for word in command.split()]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_loses_the_file_and_not_the_verdict(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, most, verdict = COMMANDS[name]
    typed = words(command, tmp_path)
    with largest_file(most):
        code = main(typed)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("accprobe: ")]
    assert (code, len(lines)) == (2, 1), (out, err)
    line = lines[0]
    assert line.startswith(f"accprobe: {tmp_path}/out"), line
    needed = r"(more than )?[\d,]+ bytes are needed, " if "--csv" in command or "compare " in command else ""
    assert re.search(needed + r"[\d,]+ are allowed, [\d,]+ bytes are free\): it was not written; ", line), line
    assert verdict in out, out
    assert not [p for p in (tmp_path / "out").rglob("*") if p.name.endswith("part") or p.stat().st_size == most]
