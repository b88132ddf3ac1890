"""One script that computes the same thing in two ways: the reference ("pta") and the accelerator's ("acl").

    python examples/label_pairs.py OUT && accprobe labels OUT

``gen_id`` gives a pair its name. The second pair's second side is 2 % too large: ``accprobe labels`` says so.
"""

from __future__ import annotations

import os
import sys

import torch

from vllm_accprobe import gen_id, set_label, set_task_id


def main(out: str) -> None:
    os.environ["VLLM_ACCPROBE_DIR"] = out
    set_task_id()  # from here on labels are recorded
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for name, factor in (("softmax", 1.0), ("scaled", 1.02)):
        pair = gen_id(name)
        set_label("pta", pair, torch.softmax(x, -1))
        set_label("acl", pair, torch.softmax(x.double(), -1).float() * factor)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "example-out")
