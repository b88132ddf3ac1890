"""Prompts as token ids, so that tests know every row without asking a tokenizer."""

import random

FIRST_PLAIN_ID = 8
"""Smaller ids are special tokens, see scripts/tiny_tokenizer.py."""


def prompt(length: int, seed: int, vocab: int = 512) -> list[int]:
    """``length`` plain token ids, the same for the same arguments."""
    source = random.Random(1000 * seed + length)
    return [source.randrange(FIRST_PLAIN_ID, vocab) for _ in range(length)]


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    return [prompt(n, seed + i) for i, n in enumerate(lengths)]


def repetitive(length: int, period: int, seed: int) -> list[int]:
    """A prompt that repeats itself: what n-gram speculation guesses from."""
    unit = prompt(period, seed)
    return (unit * (length // period + 1))[:length]
