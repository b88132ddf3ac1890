"""The built-in table of vLLM's places and transformers'."""

from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.align.bridge import bridge
from vllm_accprobe.dump.schema import REPLICATED, Payload, Record, Stats


@dataclass
class Dump:
    """Records with their arrays, as a dump is read."""

    records: list = field(default_factory=list)
    arrays: dict = field(default_factory=dict)
    run: dict = field(default_factory=dict)

    def put(self, tap, role, array, *, step=0, rank=0, call=0, layout=REPLICATED, dtype=None, cls="M"):
        array = np.asarray(array)
        finite = array.astype(np.float64)
        stats = Stats(array.size, finite.min(), finite.max(), finite.mean(), float(np.sqrt((finite**2).sum())), 0, 0)
        rows = None if role.startswith("param.") else "tokens"
        record = Record(
            rank, None if rows is None else step, tap, cls, role, call, len(self.records), dtype or str(array.dtype),
            array.shape, rows, 0, stats, f"{len(self.records):032x}", layout, Payload(0, 0, array.nbytes),
        )  # fmt: skip
        self.records.append(record)
        self.arrays[id(record)] = array
        return record

    def read(self, record, out=None):
        return self.arrays[id(record)]


def f32(*rows):
    return np.array(rows, np.float32)


TRANSFORMERS = {"engine": {"runner": "accprobe.Probe"}, "versions": {"transformers": "5"}}
VLLM = {"versions": {"vllm": "0.32"}}


def test_built_in_rules_whichever_side_vllm_is():
    golden, mine = Dump(run=TRANSFORMERS), Dump(run=VLLM)
    golden.put("model.layers.1", "input.hidden_states", f32([3, 5]))
    golden.put("model.layers.1", "output.0", f32([7, 9]))
    golden.put("<root>", "output.logits", f32([1, 1]))
    for role, v in (
        ("input.hidden_states", [1, 2]),
        ("input.residual", [2, 3]),
        ("output.0", [3, 4]),
        ("output.1", [4, 5]),
    ):
        mine.put("model.layers.1", role, f32(v))
    mine.put("<root>", "output.0", f32([2, 2]))
    for sides in ((golden, mine), (mine, golden)):
        b = bridge(*sides)
        assert b.foreign
        names = [{(r.tap, r.role) for r in d.records} for d in (b.golden, b.mine)]
        assert names[0] & names[1] == {
            ("model.layers.1", "input.hidden_states+residual"),
            ("model.layers.1", "output.0+1"),
        }
