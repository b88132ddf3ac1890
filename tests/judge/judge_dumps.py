"""The synthetic transformer of tests/comparison, for the tests of this room."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "comparison"))
from synthetic_model import HEAD, HEADS, VOCAB, capture, scaled

__all__ = ["HEAD", "HEADS", "VOCAB", "capture", "scaled"]
