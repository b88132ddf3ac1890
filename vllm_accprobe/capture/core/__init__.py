"""What every capture shares: the session, the sink, rows and layouts, whoever's model it is."""
