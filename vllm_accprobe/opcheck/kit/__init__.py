"""A folder of tests that reproduces captured calls where accprobe is not installed."""
