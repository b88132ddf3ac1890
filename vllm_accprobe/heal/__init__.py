"""A live server whose operators' outputs are replaced by their references, to see what an operator costs."""
