"""How words that are typed are understood: other tools' options, and refusals."""
