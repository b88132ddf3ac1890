"""Numbers that say how far two arrays are apart: their definition and a fast way to get them."""
