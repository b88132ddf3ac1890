"""msprobe's pre-check (acc_check, run_ut, api_precision_compare) in its own words: its config, names and csv files."""
