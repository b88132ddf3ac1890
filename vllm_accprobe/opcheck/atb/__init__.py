"""What ait's opcheck says and asks for, in its own words: which operators are meant, its table of results."""
