"""The synthetic transformer of tests/comparison, for the tests of this room."""


from synthetic_model import HEAD, HEADS, VOCAB, capture, scaled

__all__ = ["HEAD", "HEADS", "VOCAB", "capture", "scaled"]
