"""vLLM's LLM in a script, captured, and the dump read in Python: which row is which token of which request.

VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=OUT python examples/your_vllm.py MODEL
python examples/your_vllm.py --read OUT
"""

from __future__ import annotations

import sys

from vllm_accprobe import open_dump
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import row_space


def generate(model: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, max_model_len=256)
    prompt = {"prompt_token_ids": list(range(20, 40))}
    for answer in llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4)):
        print(answer.request_id, answer.outputs[0].token_ids)


def read(path: str) -> None:
    dump = open_dump(path)
    outputs = [r for r in dump.records if r.role.startswith("output")]
    print(f"{len(outputs)} outputs at {len({r.tap for r in outputs})} taps")
    for record in outputs[:3]:
        values = widen(dump.read(record), record.dtype, as_float=True)  # bfloat16 lies there as its 16 bits
        print(f"step {record.step}: {record.name} {list(record.shape)} {record.dtype}: {values.ravel()[:3]}")
        rows = row_space(dump, record)
        for part in rows.segments if rows else ():
            print(f"  {part.n} rows of request {part.req}, from position {part.pos} on ({part.phase})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2])
    else:
        generate(sys.argv[1])
