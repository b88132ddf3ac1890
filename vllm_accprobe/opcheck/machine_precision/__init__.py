"""How a machine computes, decided over all rows of a replay."""
