"""Measured units, made up, and how two of them are told apart."""

import numpy as np

from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part


def unit(tap="a", **more):
    keys = np.arange(3)
    table = np.array([[np.inf, -0.0, 1 / 3]])
    part = {"golden": "g", "mine": "m", "step": 0, "rank": None, "moment": (0, 1), "dtype_golden": None,
            "dtype_mine": "bfloat16", "call": 0, "feature": (4,), "rows": RowSet(keys), "table": table,
            "worst": (0, 1, float("nan"), 2.5)}  # fmt: skip
    made = MeasuredUnit((tap, "output.0", 0), "C", "exact", 1, 0, False, False, [Part(**part | more)] * 2)
    return made


def said(units):
    names = Part.__dataclass_fields__
    return repr([(u.key, u.columns, [[getattr(p, n) for n in names] for p in u.parts]) for u in units])
