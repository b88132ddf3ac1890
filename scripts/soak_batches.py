"""An offline engine that computes the plan of scripts/soak.py in batches, with the probe or without: a child process.

The problem: what a served request is computed with depends on what arrives at the same time, so two servers cannot be
compared to the bit under load. The idea: the same batches, one after the other, in one process: each step computes the
same rows in both runs, and tokens and log-probabilities must be equal to the bit. Before every second batch the
selection changes, as `accprobe arm` would write it. A line of JSON per batch goes to a file: answers, live memory (what
malloc has not got back; free parts of its heap change by 7 MB, and the writer takes up to six blocks of 4 MB when the
disk is slow), threads, open files. PYTHONMALLOC=malloc is set for it.

    python scripts/soak_batches.py MODEL OUT SEED COUNT SECONDS     # the dump is VLLM_ACCPROBE_DIR's
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path

import psutil
import soak

from vllm_accprobe import arm_file

BATCH = 40
_ALLOCATOR = ctypes.CDLL(None)


class MallInfo(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(4)] + [
        (name, ctypes.c_size_t) for name in ("mapped", "_5", "_6", "used", "_8", "_9")
    ]


_ALLOCATOR.mallinfo2.restype = MallInfo


def main() -> None:
    model, out, seed, count, seconds = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    from vllm import LLM, SamplingParams

    dump = Path(os.environ["VLLM_ACCPROBE_DIR"]) if os.environ.get("VLLM_ACCPROBE") == "1" else None
    llm = LLM(
        model, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=BATCH, seed=0,
        enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, disable_log_stats=True,
    )  # fmt: skip
    process, until = psutil.Process(), time.monotonic() + seconds
    with out.open("w") as lines:
        for number, at in enumerate(range(0, count, BATCH)):
            if time.monotonic() > until:
                break
            if dump is not None and number % 2 == 0:
                words = soak.SELECTIONS[number // 2 % len(soak.SELECTIONS)]
                chosen = {} if not words else {words[0][2:]: words[1]}
                arm_file.write(dump, arm_file.parse_selection({"on": words is not None, **chosen}))
            asks = soak.plan(seed, at, min(BATCH, count - at), aborted=False)
            ways = [SamplingParams(temperature=0, max_tokens=a.tokens, ignore_eos=True, logprobs=2) for a in asks]
            done = llm.generate([{"prompt_token_ids": list(a.prompt)} for a in asks], ways, use_tqdm=False)
            answers = [
                [list(o.outputs[0].token_ids),
                 [{str(t): v.logprob.hex() for t, v in top.items()} for top in o.outputs[0].logprobs or []]]
                for o in done
            ]  # fmt: skip
            del done
            gc.collect()  # vLLM's answers are circles, and Python waits for a quarter of a million objects more
            info = _ALLOCATOR.mallinfo2()
            sample = [at + len(asks), info.used + info.mapped, process.num_threads(), process.num_fds()]
            lines.write(json.dumps({"sample": sample, "answers": answers}) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
