"""What fingerprints of weights mean: within one run, and between golden's and mine's."""
