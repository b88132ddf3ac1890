"""Token ids as text, by a tokenizer that the user names.

The problem: a dump holds ids, and what they mean is the model's. The idea: `load` reads a tokenizer.json from a local
directory as the heat map does (report/html/token_text.py) and gives a function of ids; nothing is downloaded, nothing
is stored. Tokens that are parts of a character are told by the last of them. Not here: which ids, and making the text
``safe`` (whoever prints it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_accprobe.cli.common.options import CommandError

_PART = "\ufffd"
"""What decoding gives for bytes that are no whole character."""
_LONGEST = 8
"""Tokens of which one character can be made; UTF-8 has at most four bytes, and some tokenizers add empty ones."""


def load(path: str | Path) -> Callable[[Sequence[int]], list[str]]:
    """What turns ids into their texts, one for each; joined they are the whole text. ``path``: a directory with a
    tokenizer.json, or that file. Raises CommandError, one line."""
    from vllm_accprobe.comparison.result import CompareError
    from vllm_accprobe.report.html.token_text import tokenizer_at

    try:
        tokenizer = tokenizer_at(Path(path))
    except CompareError as why:
        raise CommandError(str(why)) from None
    size = tokenizer.get_vocab_size(with_added_tokens=True)

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    def texts(ids: Sequence[int]) -> list[str]:
        return _each(ids, decoded, size)

    return texts


def _each(ids: Sequence[int], decode: Callable[[Sequence[int]], str], size: int) -> list[str]:
    """The text that each token adds to those before it: many tokenizers begin a text without the blank that the token
    has. An id that is not in the vocabulary is told by its number."""
    out: list[str] = []
    last = 0  # where the text that is told begins
    for i, token in enumerate(ids):
        if not 0 <= token < size:
            if last < i:  # parts of a character that nobody ends
                out[-1] = decode(ids[last:i])
            out.append(f"<{token}>")
            last = i + 1
            continue
        start = last - 1 if last and 0 <= ids[last - 1] < size else last
        before, whole = decode(ids[start:last]) if start < last else "", decode(ids[start : i + 1])
        text = whole[len(before) :] if whole.startswith(before) else decode([token])
        if text.endswith(_PART) and i + 1 - last < _LONGEST and i + 1 < len(ids):
            out.append("")
            continue
        out.append(text)
        last = i + 1
    return out
