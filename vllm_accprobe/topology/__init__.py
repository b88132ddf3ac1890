"""What a model is built from and which tensor feeds which, as a dump or a library's own json shows it."""
