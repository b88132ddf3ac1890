"""Numbers that say how far two arrays are apart: their definition, their catalogue and a fast way to get them."""
