"""Several dumps against one golden: `accprobe compare GOLDEN DAY1 DAY2 …` as lines, JSON and one page over time."""
