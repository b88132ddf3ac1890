"""Operators as they run here, N times and in other batches: races, unwritten memory, rows that mind their batch."""
