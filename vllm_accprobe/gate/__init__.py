"""Two servers, or two evaluations, before any tensor: are they the same beyond chance, and on which requests not?"""
