"""Run by tests in a process of its own: real dumps of msprobe with gradients. Arguments: task, dump path, and again."""

import json
import os
import sys

import torch
from msprobe.pytorch import PrecisionDebugger


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.up(x))
        h = torch.nn.functional.layer_norm(h, (32,))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return torch.softmax(self.down(h), -1)


def main(task: str, path: str) -> None:
    choice = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"task": task, "dump_path": path, "rank": [], "step": [], "level": "L1", task: choice}
    with open(path + ".config.json", "w") as f:
        json.dump(config, f)
    torch.manual_seed(0)
    model = Model()
    debugger = PrecisionDebugger(config_path=path + ".config.json")
    debugger.start(model=model)
    x = torch.randn(4, 16, requires_grad=True)
    (model(x) * torch.arange(8.0)).sum().backward()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    for task, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if not (child := os.fork()):  # msprobe has one debugger a process, and takes seconds to import
            main(task, path)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
