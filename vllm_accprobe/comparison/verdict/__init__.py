"""From plain numbers to a Comparison: who is to blame, what is excused, what is reported."""
