"""What to type next, after a comparison that failed: next_steps.py chooses, command_words.py spells."""
