"""How long after a step its tensors can be read from disk, when nobody closes and the process may be killed any time.

The problem: `ray.kill` and SIGKILL leave no time, so what is lost is what the writer still holds. The idea: one
tensor at a time into an idle writer, which is the longest wait (nothing fills the block); a reader in the same process
looks at the journal until the line is there. Printed: milliseconds, and the age at which the writer gives up a block.
Not here: what a busy writer does (a full block goes at once), the test that a killed one loses nothing
(tests/dump/test_trouble.py).

    python scripts/flush_delay.py [TENSORS] [BYTES]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from dump.dumps import put_event

from vllm_accprobe.dump import writer as flushed
from vllm_accprobe.dump.schema import JOURNAL, rank_dir
from vllm_accprobe.dump.stats import warm_up
from vllm_accprobe.dump.writer import RankWriter


def main(tensors: int = 40, nbytes: int = 65536) -> None:
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    waited = []
    with tempfile.TemporaryDirectory() as scratch:
        warm_up()  # as a capture does when it begins
        writer = RankWriter(Path(scratch), 0, {}, budget_bytes=1 << 30)
        journal = Path(scratch) / rank_dir(0) / JOURNAL
        for i in range(tensors):
            event = {"event": "tensor", "step": i, "tap": f"tap{i}.", "class": "Linear", "role": "output.0", "call": 0,
                     "seq": i, "dtype": "uint8", "shape": [nbytes]}  # fmt: skip
            put_event(writer, data, event)
            begin, mark = time.perf_counter(), f'"tap{i}."'.encode()
            while mark not in journal.read_bytes():
                time.sleep(0.001)
            waited.append((time.perf_counter() - begin) * 1e3)
            data[i % nbytes] ^= 255  # other bytes, which are stored anew
        writer.close("done", {})
    first, *rest = waited  # the first one makes the segment
    print(f"{tensors} tensors of {nbytes} bytes, each alone; the writer's timer is {flushed._PAYLOAD_AGE * 1e3:.0f} ms")
    print(f"readable after: first {first:.0f}, then median {statistics.median(rest):.0f}, most {max(rest):.0f} ms")


if __name__ == "__main__":
    main(*(int(value) for value in sys.argv[1:3]))
