"""What the page's script gets to know of an origin's neighbours."""

import json
import math

from report_examples import ORIGIN, comparison

from vllm_accprobe.comparison.verdict.neighbours import Edge, OriginNeighbours
from vllm_accprobe.report.html.data import neighbours_json


def test_an_entry_for_each_origin_that_has_neighbours_and_pairs_by_their_number_on_the_page():
    edges = (
        Edge("a", "output.0", "input.x", 0.0, 0.0, "identical", "both", 7),
        Edge("b\x00", "param.w", "param.w", math.inf, math.inf, "fail", "own", 8),
    )
    result = comparison(origins=[ORIGIN, ORIGIN | {"module": "other"}], verdict="fail")
    object.__setattr__(result, "neighbours", [None, OriginNeighbours("child", "input.x", edges, (), (1, 0))])
    (entry,) = json.loads(json.dumps(neighbours_json(result, {7: 3}), allow_nan=False))
    assert (entry["module"], entry["tap"], entry["role"], entry["left_out"]) == ("other", "child", "input.x", [1, 0])
    assert entry["feeds"] == []
    first, second = entry["fed_by"]
    assert first == {"tap": "a", "role": "output.0", "in": "input.x", "by": "both", "status": "identical", "over": 0.0,
                     "said": "a/output.0: identical", "pair": 3}  # fmt: skip
    assert (second["tap"], second["over"], second["pair"]) == ("b\\x00", "Inf", None)
