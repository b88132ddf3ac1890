"""What a model is made of and which tensor feeds which, as a dump or a library's own json shows it."""
