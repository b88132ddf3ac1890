"""Dumps of records written by hand, for the tests of this room."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.align.mapping import parse_mapping
from vllm_accprobe.dump.schema import REPLICATED, Payload, Record, Stats


@dataclass
class Dump:
    """Records with their arrays, as a dump is read."""

    records: list = field(default_factory=list)
    arrays: dict = field(default_factory=dict)
    run: dict = field(default_factory=dict)
    modules: dict = field(default_factory=dict)

    def put(self, tap, role, array, *, step=0, rank=0, call=0, layout=REPLICATED, dtype=None, cls="M"):
        array = np.asarray(array)
        finite = array.astype(np.float64)
        stats = Stats(array.size, finite.min(), finite.max(), finite.mean(), float(np.sqrt((finite**2).sum())), 0, 0)
        rows = None if role.startswith("param.") else "tokens"
        record = Record(
            rank, None if rows is None else step, tap, cls, role, call, len(self.records), dtype or str(array.dtype),
            array.shape, rows, 0, stats, hashlib.md5(array.tobytes()).hexdigest(), layout, Payload(0, 0, array.nbytes),
        )  # fmt: skip
        self.records.append(record)
        self.arrays[id(record)] = array
        return record

    def read(self, record, out=None):
        return self.arrays[id(record)]

    def read_rows(self, record, rows, out=None):
        return self.read(record)[rows]


def by_name(dump):
    return {(r.tap, r.role): r for r in dump.records}


def f32(*rows):
    return np.array(rows, np.float32)


def rules(data):
    return parse_mapping(data, "test")


FUSE = rules({"**.qkv_proj": ["**.q_proj", "{1}.k_proj", "{1}.v_proj"]})


def attention(weights=True):
    """golden with three projections of two rows, mine with one that FUSE makes of them."""
    golden, mine = Dump(), Dump()
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        if weights:
            golden.put(f"a.{name}", "param.weight", f32([i, i + 1]))
        golden.put(f"a.{name}", "input.input", f32([1, 2], [3, 4]))
        golden.put(f"a.{name}", "output.0", f32([10 * i, 10 * i + 1], [10 * i + 2, 10 * i + 3]))
    mine.put("a.qkv_proj", "param.weight", np.zeros((3, 2), np.float32))
    mine.put("a.qkv_proj", "input.input_", f32([1, 2], [3, 4]))
    mine.put("a.qkv_proj", "output.0", np.zeros((2, 6), np.float32))
    return golden, mine
