"""Which taps made an error rather than passing one on, and what the error looks like."""
