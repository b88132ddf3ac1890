"""The set of prompts that ships with us: 24, made by us, of 5 to about 8,000 tokens.

The problem: most errors need something special to show: a length beyond a chunk or a window, a prefix that is already
in the cache, digits, a script of many tokens for each word. The idea: a few short prompts written by hand, and long
ones composed of small lists with a fixed seed, so that they are the same everywhere and take no room here. Lengths are
about those of a BPE of 100,000 tokens or more, 4 characters of English for each.
Not here: how a line is read (prompts.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NAME = "default"
LENGTHS = (64, 250, 510, 1030, 2050, 4100, 8000)
"""Chosen: tokens, about; around the powers of two at which chunks, blocks and windows end."""
_SHORT = {
    "five": "The capital of France is",
    "count": "One, two, three, four, five, six,",
    "numbers": "3.14159 * 2.71828 = 8.5397; 1234567 + 7654321 = 8888888; 2**31 - 1 = 2147483647; 0.1 + 0.2 =",
    "table": "| n | n squared | n cubed |\n|---|---|---|\n| 1 | 1 | 1 |\n| 2 | 4 | 8 |\n| 3 | 9 | 27 |\n| 4 |",
    "code-python": 'def merge(left, right):\n    """Merges two sorted lists."""\n    out, i, j = [], 0, 0\n    while',
    "code-c": "#include <stdint.h>\n\n/* Adds n bfloat16 numbers in float32. */\nvoid add(const uint16_t *a,",
    "json": '{"name": "probe", "version": 3, "layers": [{"index": 0, "norm": 1.25}, {"index": 1, "norm":',
    "chinese": "请用三句话说明，为什么同一个模型在两种加速卡上会给出不同的结果：",
    "chinese-poem": "春江潮水连海平，海上明月共潮生。滟滟随波千万里，",
    "mixed": "GPU 上的结果是 0.4271，NPU 上的结果是 0.4268。The difference is",
    "repeat": "again and again " * 40 + "and",
    "symbols": "∑ α² ≤ ∫ f(x) dx, ∀ x ∈ ℝ; 🙂 → ☂ → ❄; naïve café; ﬁ ",
}
_SUBJECTS = ("the kernel", "a router", "the cache", "one head", "the sampler", "an expert", "the driver", "a block")
_VERBS = ("reads", "writes", "rotates", "projects", "drops", "keeps", "splits", "adds", "scales", "forgets")
_OBJECTS = ("a page", "every token", "the residual", "two numbers", "its mask", "the prefix", "a key", "the last row")
_WHEN = ("at once", "in the morning", "after the first chunk", "without a word", "twice", "by chance", "as before")


def lines() -> Iterator[dict[str, Any]]:
    """Objects as a user's jsonl has them."""
    for name, text in _SHORT.items():
        yield {"id": name, "prompt": text}
    for tokens in LENGTHS:
        yield {"id": f"long-{tokens}", "prompt": _story(tokens, seed=tokens)}
    shared = _story(600, seed=1)  # longer than one block of any cache
    for k, end in enumerate(("The first to fail was", "What nobody noticed was", "那一天最先出错的是")):
        yield {"id": f"prefix-{k}", "prompt": f"{shared} {end}"}
    yield {"id": "long-code", "prompt": _table(700)}
    yield {
        "id": "long-chinese",
        "prompt": "第一章。" + "夜里下着雨，机房里只有一盏灯亮着，他又看了一遍那两行数字。" * 30,
    }


def _story(tokens: int, seed: int) -> str:
    draw = random.Random(seed)
    said: list[str] = []
    left = tokens * 4
    while left > 0:
        words = " ".join(draw.choice(of) for of in (_SUBJECTS, _VERBS, _OBJECTS, _WHEN))
        said.append(words[0].upper() + words[1:] + ".")
        left -= len(said[-1]) + 1
    return " ".join(said)


def _table(tokens: int) -> str:
    """Lines of code with numbers, about three characters for each token."""
    draw = random.Random(2)
    said = "LIMITS = {\n"
    while len(said) < tokens * 3:
        said += f'    "layer_{draw.randrange(96)}": ({draw.random():.6f}, {draw.randrange(1 << 16)}),\n'
    return said + "}\n\ndef largest(limits):\n    return"
