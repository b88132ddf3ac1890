"""Two versions of a torch model, outside vLLM: which module creates the difference?

    python examples/plain_torch.py OUT

The second version's normalisation forgets the square root. Its output is wrong everywhere behind it; ``compare`` names
the normalisation, not what only received its error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from vllm_accprobe import Probe, compare


class Norm(nn.Module):
    """RMSNorm of the last dimension; ``wrong`` divides by the mean square and not by its root."""

    def __init__(self, size: int, wrong: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.pow(2).mean(-1, keepdim=True) + 1e-6
        return self.weight * (x / square if self.wrong else x / square.sqrt())


class Block(nn.Module):
    def __init__(self, size: int, wrong: bool = False):
        super().__init__()
        self.norm = Norm(size, wrong)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


WRONG = 2
"""The block that is wrong in mine."""


def model(wrong_layer: int | None = None) -> nn.Sequential:
    """Four blocks with the same weights each time; one of them wrong, or none."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64, wrong=i == wrong_layer) for i in range(4))).eval()


def main(out: Path) -> int:
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    for side, wrong_layer in (("golden", None), ("mine", WRONG)):
        made = model(wrong_layer)
        with torch.no_grad(), Probe(made, dir=str(out / side)):
            made(x)
    found = compare(out / "golden", out / "mine")
    first = found.origins[0] if found.origins else {"module": "nothing", "tier": "-"}
    print(f"{found.verdict.upper()}: {first['module']} ({first['tier']})")
    return 0 if first["module"] == f"{WRONG}.norm" else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "example-out")))
