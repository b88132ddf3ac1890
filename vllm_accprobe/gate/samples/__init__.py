"""Two runs of an evaluation, question by question: readers, pairs, statistics, and the questions that flipped."""
