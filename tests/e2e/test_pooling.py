"""Models that pool instead of sampling: every step is captured to its end, and nothing else is recorded into it."""

import numpy as np
import pytest
from support.captures import FIVE, Engines
from support.engine import Run

from vllm_accprobe.dump.reader import Dump, open_dump

pytestmark = pytest.mark.engine
LENGTHS = [len(ask.ids) for ask in FIVE]


@pytest.mark.parametrize("host", ["v1", pytest.param("v2", marks=pytest.mark.extra("the runner: test_clean_pairs.py"))])
def test_every_row_of_an_embedding_is_there_and_no_other(engines: Engines, host: str) -> None:
    """A replica that has nothing to do computes invented batches between the steps: they are of no request."""
    run = engines.run(f"embed-{host}", host=host, how="staggered", runner="pooling", dummies=True)
    assert run.dump is not None
    dump = open_dump(run.dump)
    assert (dump.problems, dump.errors) == ([], [])
    found: dict[int, list[int]] = {}
    for (_, _, space), rows in dump.rows.items():
        if space == "tokens":
            for s in rows.segments:
                found.setdefault(s.req, []).extend(range(s.pos, s.pos + s.n))
    assert sorted(map(len, found.values())) == sorted(LENGTHS)
    assert all(positions == list(range(len(positions))) for positions in found.values())
    roots = [r for r in dump.records if (r.tap, r.role) == ("<root>", "output.0")]
    assert sum(r.shape[0] for r in roots) == sum(LENGTHS)
    assert {r.call for r in dump.records if r.tap == "<root>"} == {0}
    assert not [skip for skip in dump.skips if "positions" in skip.reason]
    pooled(dump, run)


def pooled(dump: Dump, run: Run) -> None:
    """What the client was given is the pooler's last output, request by request."""
    given = np.array(run.vectors)
    kept = [r for r in dump.records if r.tap.startswith("pooler") and r.role == "output.0" and r.shape[-1] == 128]
    assert kept, sorted({r.tap for r in dump.records})
    rows = np.concatenate([np.atleast_2d(dump.read(r).astype(np.float32)) for r in kept])
    nearest = [np.abs(rows - vector).max(axis=1).min() for vector in given]
    assert max(nearest) < 1e-6


def test_two_runs_of_an_embedding_are_equal(engines: Engines) -> None:
    from vllm_accprobe.comparison.engine import compare

    golden = engines.run("embed-v1", host="v1", how="staggered", runner="pooling", dummies=True)
    mine = engines.run("embed-serial", how="serial", runner="pooling")
    assert golden.dump is not None
    assert mine.dump is not None
    result = compare(golden.dump, mine.dump)
    assert result.verdict == "pass"
