"""One server against itself: alone and in batches, whole and in chunks, hit and fresh, decode and scoring."""
