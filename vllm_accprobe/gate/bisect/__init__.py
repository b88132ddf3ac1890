"""Which settings of a command make its numbers wrong: the smallest set, found by delta debugging over whole servers."""
