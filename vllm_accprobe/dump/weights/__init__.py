"""The words of weights over their life, and how their lines are read."""
