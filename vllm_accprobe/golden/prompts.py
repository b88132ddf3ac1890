"""The prompts that ship with golden packs: public texts of our own, and images by formula.

The problem: a pack is published, so it cannot have anybody's prompts, and two packs can be compared only if their
prompts are the same everywhere. The idea: a fixed table of short texts in several scripts, texts that repeat, numbers,
code and lists, one long text composed with a fixed seed, and images that a formula draws. They cost about 1,500 tokens.
A model without a tokenizer gets token ids by formula.

Elsewhere: the set of `accprobe send`, from which the first of these come (gate/sending/prompts.py).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from typing import Any

from vllm_accprobe.gate.sending.prompts import PromptLine, shipped_lines

SHARED = ("five", "count", "numbers", "table", "code-python", "code-c", "json", "chinese", "mixed", "repeat", "symbols",
          "long-510")  # fmt: skip
"""Of the set of `accprobe send`."""
TEXTS = {
    "german": "Zwei Karten rechnen dieselbe Schicht, und die dritte Stelle hinter dem Komma ist anders. Der Grund:",
    "arabic": "جهازان يحسبان الطبقة نفسها، والنتيجة مختلفة في الرقم الثالث بعد الفاصلة. السبب هو",
    "russian": "Две карты считают один и тот же слой, а третья цифра после запятой разная. Причина в том, что",
    "japanese": "二枚のカードが同じ層を計算したのに、小数点以下三桁目が違う。その理由は",
    "korean": "두 장의 카드가 같은 층을 계산했는데 소수점 아래 셋째 자리가 다르다. 그 이유는",
    "hindi": "दो कार्ड एक ही परत की गणना करते हैं, पर दशमलव के बाद तीसरा अंक अलग है। कारण यह है कि",
    "french": "Deux cartes calculent la même couche, et la troisième décimale n'est pas la même. La raison est que",
    "list": "How to compare two machines:\n1. Send both the same prompts.\n2. Keep the token ids.\n3. Capture the "
    "first layer.\n4. Compare its rows.\n5. Go on to the next layer.\n6.",
    "repeat-one": "1 " * 96,
    "digits": " ".join(str(n * n * 7919 % 100_003) for n in range(1, 49)),
    "shell": "for rank in 0 1 2 3; do\n  grep -c '\"tensor\"' \"dump/rank000$rank/journal.jsonl\"; done\nif [",
}
CHAT = "Name three numbers that are larger than ten, and say which of them is prime."
MAX_TOKENS = 8
"""Chosen: generated tokens of a prompt: each has rows of its own, in every tap."""


def gradient(x: int, y: int) -> tuple[int, int, int]:
    """A color at column x and row y."""
    return x % 256, y % 256, (x + y) % 256


def checkerboard(x: int, y: int) -> tuple[int, int, int]:
    """Squares of 14 pixels, a patch of many vision towers."""
    return (240, 240, 240) if (x // 14 + y // 14) % 2 else (16, 16, 16)


IMAGES: dict[str, tuple[Callable[[int, int], tuple[int, int, int]], int, int, str]] = {
    "image-gradient": (gradient, 112, 84, "Describe the colors of this picture."),
    "image-board": (checkerboard, 84, 84, "How many squares has one row?"),
}
"""Formula, width, height, question."""


def png(color: Callable[[int, int], tuple[int, int, int]], width: int, height: int) -> bytes:
    """A picture of 8 bits RGB [W3C: Portable Network Graphics, 2003, 5 and 9.2: every row has filter 0]."""
    rows = b"".join(b"\0" + bytes(v for x in range(width) for v in color(x, y)) for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    )


def texts() -> list[PromptLine]:
    """The prompts without images; the last one is a chat."""
    shared = {line["id"]: line["prompt"] for line in shipped_lines() if line["id"] in SHARED}
    found = [PromptLine(name, text=text) for name, text in (shared | TEXTS).items()]
    return [*found, PromptLine("chat", messages=({"role": "user", "content": CHAT},))]


def images() -> list[PromptLine]:
    """Chats with one image each."""
    found = []
    for name, (formula, width, height, question) in IMAGES.items():
        url = f"data:image/png;base64,{base64.b64encode(png(formula, width, height)).decode()}"
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}},
                                       {"type": "text", "text": question}]  # fmt: skip
        found.append(PromptLine(name, messages=({"role": "user", "content": parts},)))
    return found


LENGTHS = (5, 23, 64, 150, 600)
"""Chosen: tokens of prompts by formula."""
_FIRST = 3
"""Ids below it are often special ones."""


def by_formula(vocabulary: int) -> list[PromptLine]:
    """Token ids for a model without a tokenizer; every second prompt repeats seven ids. vocabulary: ids are below
    it."""
    wide = max(vocabulary - _FIRST, 1)
    return [
        PromptLine(f"ids-{n}", token_ids=tuple(
            _FIRST + (7919 * j * j + 104_729 * j + n) % wide for j in ((i % 7 if k % 2 else i) for i in range(n))
        ))
        for k, n in enumerate(LENGTHS)
    ]  # fmt: skip
