"""Run by test_msprobe.py in a process of its own: a real dump of msprobe, with two steps that see the same input, the
second with another weight. Arguments: task, level, summary mode, dump path."""

import json
import sys

import torch
from msprobe.pytorch import PrecisionDebugger


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks = torch.nn.Embedding(50, 16), torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(task: str, level: str, summary: str, path: str) -> None:
    choice = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"task": task, "dump_path": path, "rank": [], "step": [], "level": level, "async_dump": False,
              "statistics": {**choice, "summary_mode": summary}, "tensor": choice}  # fmt: skip
    with open(path + ".config.json", "w") as f:
        json.dump(config, f)
    torch.manual_seed(0)
    model = Model()
    debugger = PrecisionDebugger(config_path=path + ".config.json")
    for step in range(2):
        if step:
            with torch.no_grad():
                model.blocks[1].up.weight[3] *= 1.5
        debugger.start(model=model)
        model(torch.arange(6)[None]).square().mean().backward()
        debugger.stop()
        debugger.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
