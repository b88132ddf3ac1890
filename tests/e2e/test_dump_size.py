"""What scripts/dump_size.py says before a capture is what the capture stores."""

from __future__ import annotations

import json
import math

import pytest
from dump_size import per_token
from support.captures import Engines
from support.engine import Ask
from support.prompts import prompt

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", ["qwen2", "deepseek-v2"])
def test_bytes_of_a_token(model: str, engines: Engines) -> None:
    """One prompt in one step, so that each distinct payload is 40 rows; the sampler's few numbers are left out."""
    run = engines.run(f"dump-size-{model}", model=model, asks=[Ask(prompt(40, 1), 1, id="one")])
    assert run.dump is not None
    dump = open_dump(run.dump)
    seen, rows, other = set(), 0, 0
    for record in dump.records:
        if record.payload is None or record.step is None or record.tap == "sampler":
            continue
        key = (record.rank, str(record.payload))
        nbytes = math.prod(record.shape) * DTYPES[record.dtype].itemsize
        if key not in seen and record.shape[:1] == (40,):
            rows += nbytes
        elif key not in seen and record.tap == "lm_head":
            other += nbytes
        seen.add(key)
    token, logits = per_token(json.loads((engines.model(model) / "config.json").read_text()))
    assert (rows, other) == (40 * token, logits)
