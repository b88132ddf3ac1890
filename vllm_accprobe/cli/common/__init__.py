"""What several commands share: options, where they may write, how a result is said."""
