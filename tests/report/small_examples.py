"""Two small comparisons that several reports are tested on literally; the parts are of report_examples.py."""

import numpy as np
from report_examples import DIVERGENCE, ORIGIN, comparison, pair, row_table


def two_requests():
    """Two layers, an integer tap and a skipped one; seven rows of two requests, in prefill and decode."""
    pairs = [
        pair(tap="model.layers.0.mlp", step=0, order=1),
        pair(tap="model.layers.0.mlp", step=1, order=1),
        pair(tap="model.layers.0.mlp", role="input.0", step=1, order=0),
        pair(tap="model.layers.1", step=1, order=2, status="fail"),
        pair(tap="ids", step=1, order=3, dtype_golden="int64", limit=0.0),
        pair(tap="none", step=1, order=4, status="skip", limit=None),
    ]
    rows = row_table(
        [(0, "a", 0, False, 0.0, 0.0), (0, "a", 1, False, 0.016, 1.0), (1, "a", 2, True, 0.16, 10.0),
         (2, "a", 2, True, 9.0, 900.0), (3, "a", 2, True, 0.0016, 0.1), (4, "a", 2, True, 9.0, np.inf),
         (0, "b", 0, False, 0.0, 0.0)],
    )  # fmt: skip
    return comparison(pairs=pairs, rows=rows)


def failing():
    """A comparison that fails with all that a report can tell: two origins, two measures, a note, a skip, a flip."""
    return comparison(
        pairs=[
            pair(tap="c", status="fail", worst_row_rel_l2=0.21, step=4),
            pair(tap="n", status="fail", measure="row_norm_ratio", measured=1.06, allowed=0.04),
        ],
        verdict="fail",
        origins=[ORIGIN | {"shape": "one column, 7 of 64"}, ORIGIN | {"module": "lm_head", "created": None}],
        first_divergence=DIVERGENCE,
        notes=["golden is float32, mine bfloat16"],
        coverage={"pairs": 2, "rows_compared": 8, "skipped": {"no rows in common": 7}},
        tokens={
            "compared": 36,
            "flipped": [{"request": "a", "ordinal": 5, "golden": 3, "mine": 4, "golden_margin": 0.4, "mine_margin": 0}],
        },
    )
