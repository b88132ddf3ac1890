"""From the bytes of other tools' files to tensors, with bounds on everything and without running what they say."""
