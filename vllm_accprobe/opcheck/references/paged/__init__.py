"""References of operators that read or write a paged cache, of which the dump has the blocks that they touch."""
