"""Rows cut into runs of about one stretch."""

import numpy as np

from vllm_accprobe.comparison.measure import read


def test_runs_of_whole_rows(monkeypatch):
    monkeypatch.setattr(read, "STRETCH", 100)
    places = np.array([3, 5, 8, 9, 11])
    assert [s.tolist() for s in read.stretches(places, 40)] == [[3, 5], [8, 9], [11]]
    assert [s.tolist() for s in read.stretches(places, 101)] == [[3], [5], [8], [9], [11]]
    assert [s.tolist() for s in read.stretches(places, 0)] == [[3, 5, 8, 9, 11]]
    assert list(read.stretches(places[:0], 40)) == []
