"""What a gate says of one server, and of a server and a trainer, as lines and json."""
