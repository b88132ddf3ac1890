"""What belongs to what: requests, rows, names and ranks of two dumps, each as a plan that can be printed."""
