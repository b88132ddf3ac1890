"""From numbers to words: what is too far apart, and which operator made it so."""
