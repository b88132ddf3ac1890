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


def prepare(home: Path) -> None:
    """errcheck.py, a script whose second module overflows, and a shell script around it."""
    (home / "errcheck.py").write_text(SCRIPT)
    (home / "errcheck.sh").write_text(f"{sys.executable} errcheck.py\n")


def _stopped(home: Path, said: str) -> None:
    assert (home / "errcheck-exit/errcheck-rank0000.json").is_file()
    assert (home / "errcheck-exit/rank0000/journal.jsonl").is_file()


LINES: list[Line] = [
    Line(187, "ait llm errcheck --exec xxx --type overflow --exit --output xx/xxx",
         ("errcheck", "--exec", "bash errcheck.sh", "--type", "overflow", "--exit", "--output", "errcheck-exit"), 1,
         ("first: Inf in 1 output.0 [Divides], step 0: good in, bad out (8 Inf)",), check=_stopped),
]  # fmt: skip
"""Each option alone: tests/capture/errcheck/test_script_watch.py."""
