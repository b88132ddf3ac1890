"""Measured units outside of memory: on disk while a comparison goes on, and as the file that is judged again."""
