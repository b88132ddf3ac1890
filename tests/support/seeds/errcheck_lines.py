"""The line of document 004's errcheck, and its options, on a script that makes an Inf."""

import sys
from pathlib import Path

from support.seeds.line import Line

SCRIPT = """
import torch


class Divides(torch.nn.Module):
    def forward(self, x):
        return x / 0


model = torch.nn.Sequential(torch.nn.Linear(4, 4), Divides())
print(model(torch.ones(2, 4)).shape)
print("went on")
"""
SAYS = "ait llm errcheck --exec xxx"


def prepare(home: Path) -> None:
    """errcheck.py, a script whose second module overflows, and a shell script around it."""
    (home / "errcheck.py").write_text(SCRIPT)
    (home / "good.py").write_text("import torch\ntorch.nn.Linear(4, 4)(torch.ones(2, 4))\n")
    (home / "errcheck.sh").write_text(f"{sys.executable} errcheck.py\n")


def _stopped(home: Path, said: str) -> None:
    assert (home / "errcheck-exit/errcheck-rank0000.json").is_file()
    assert (home / "errcheck-exit/rank0000/journal.jsonl").is_file()


def _nothing(home: Path, said: str) -> None:
    assert not (home / "errcheck-good").exists()


def _line(says: str, *options: str, command: str = "bash errcheck.sh", **more: object) -> Line:
    return Line(187, f"{SAYS} {says}".strip(), ("errcheck", "--exec", command, *options), **more)  # type: ignore[arg-type]


FOUND = "first: Inf in 1 output.0 [Divides], step 0: good in, bad out (8 Inf)"
LINES: list[Line] = [
    _line("", "-o", "errcheck-plain", code=1, prints=(FOUND,)),
    _line("--type overflow", "--type", "overflow", "--output", "errcheck-type", code=1, prints=(FOUND,)),
    _line("--exit --output xx/xxx", "--exit", "--output", "errcheck-exit", code=1, prints=(FOUND,), check=_stopped),
    _line("# nothing bad", "-o", "errcheck-good", command=f"{sys.executable} good.py", prints=("nothing bad in 1 s",),
          check=_nothing),
]
