"""Entries of series for the tests of this room."""

from dataclasses import replace

from report_examples import hostile, realistic

from vllm_accprobe.report.series.dump_entry import entry_of, not_compared


def four_days():
    """Good, bad in layer 3, one that cannot be read, and bad in lm_head too."""
    good, bad = realistic(4, 6, fail=False), realistic(4, 6)
    worse = replace(bad, origins=[*bad.origins, bad.origins[0] | {"module": "model.norm"}])
    return [
        entry_of(good, "day1", "runs/day1", "day1/compare.html"),
        entry_of(bad, "day2", "runs/day2", "day2/compare.html"),
        not_compared("day3", "runs/day3", 2, "runs/day3 does not exist"),
        entry_of(worse, "day4", "runs/day4", "day4/compare.html"),
    ]


def hostile_days():
    bad = hostile()
    evil = bad.golden_path
    return [entry_of(bad, evil, evil, f"{evil}/compare.html"), not_compared("javascript:alert(1)", evil, 2, evil)]
