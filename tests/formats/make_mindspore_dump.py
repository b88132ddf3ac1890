"""Made data/mindspore.tar.xz, with msprobe 26.2 and MindSpore 2.7.1 on a CPU (which has no place in the suite: 2.5 GB).

Arguments: dump path, task, level. Without stack.json, dump_data_dir shortened, the process's directory called rank0.
The last API, ``mint.mul`` with a number, has no kernel on a CPU: its record has no output, as after any crash.
"""

import json
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_device("CPU")
# msprobe's statistics want a norm that the CPU build has no kernel for.
mint.norm = lambda x: Tensor(np.float32(np.linalg.norm(x.asnumpy().astype(np.float64))))

from msprobe.mindspore import PrecisionDebugger  # noqa: E402


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        weight = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
        self.w = ms.Parameter(Tensor(weight), name="w")

    def construct(self, x: Tensor) -> Tensor:
        y = mint.nn.functional.silu(mint.add(mint.nn.functional.linear(x, self.w), 1.5, alpha=2))
        mint.softmax(mint.matmul(y, mint.transpose(y, 0, 1)), dim=-1)
        u = mint.tanh(y)
        mint.max(mint.cat([u, u * 2], dim=1), dim=1)
        return mint.mul(u, 2)


def main(path: str, task: str, level: str) -> None:
    choice = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"task": task, "dump_path": path, "rank": [], "step": [], "level": level, "tensor": choice,
              "statistics": {**choice, "summary_mode": "statistics"}}  # fmt: skip
    with open(path + ".config.json", "w") as f:
        json.dump(config, f)
    debugger = PrecisionDebugger(config_path=path + ".config.json")
    net = Net()
    debugger.start(net)
    try:
        net(Tensor(np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)))
    finally:
        debugger.stop()
        debugger.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
