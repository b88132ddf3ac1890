"""Tokens of the heat map as text, for whoever names a tokenizer.

The problem: a dump holds token ids and no text, and a person knows a prompt by its words; a token may be a part of a
letter, a line break, a mark that turns the writing around, or something that no vocabulary has. The idea: the model's
``tokenizer.json`` read by the library `tokenizers` (vLLM brings it; imported only here), each id by itself, every text
through ``safe``; the text stays in the page, nothing else keeps it. Not here: which ids there are (align/token_ids.py),
what is drawn (heat.js).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.align.token_ids import TokenIds
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.report.text import safe

LONGEST = 40
"""Characters of one token on the page."""
MAX_IN_COLUMN = 8
"""Tokens that are told of a column of many."""
NO_IDS = (
    "no token ids are recorded in {}, so compare.html shows no tokens' text: only a capture in vLLM (VLLM_ACCPROBE=1) "
    "records them"
)


def tokenizer_at(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model's folder, or of its tokenizer.json; local files only. Raises CompareError,
    one line, for what cannot be read."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CompareError(
            "tokenizers is not installed, which --tokenizer needs: pip install tokenizers (vLLM brings it)"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CompareError(
            f"--tokenizer {safe(path)}: there is no {'tokenizer.json in it' if file != path else 'such file'}; "
            "name a model's folder or its tokenizer.json, which transformers' save_pretrained writes"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # the library has one type for all
        raise CompareError(f"--tokenizer {safe(path)} cannot be read: {safe(e)}") from None


class Vocabulary:
    """A model's tokens. Raises CompareError, one line, for what cannot be read."""

    def __init__(self, path: Path) -> None:
        """path: a model's folder, or its tokenizer.json."""
        self._tokenizer = tokenizer_at(path)

    def text(self, token: int) -> str | None:
        """What one token says, as one printable line; its entry in the vocabulary where it is only a part of a letter;
        None for a number that is no token."""
        if not 0 <= token < 1 << 31:
            return None
        entry: str | None = self._tokenizer.id_to_token(token)
        if entry is None:
            return None
        if "▁" in entry:  # SentencePiece's mark of a space, which decoding one token loses
            return safe(entry.replace("▁", " "), LONGEST)
        said: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return safe(entry if "�" in said or not said else said, LONGEST)


@dataclass(frozen=True)
class TokenTexts:
    """What the page needs. ids: of mine's requests; place: mine's path, for the line that says there are none."""

    vocabulary: Vocabulary
    ids: TokenIds
    place: str
    _texts: dict[int, str | None] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        """A sentence where no ids were recorded."""
        return None if self.ids else NO_IDS.format(safe(self.place))

    def columns(self, label: str, start: np.ndarray, width: int) -> list[list[int]] | None:
        """The ids in each column of a request's map, at most MAX_IN_COLUMN of each; None where none are known. start:
        int [columns], the first position of each; width: positions to a column."""
        known = self.ids.get(label)
        if known is None or not len(start):
            return None
        positions, ids = known
        first = np.searchsorted(positions, start)
        last = np.searchsorted(positions, [*start[1:], int(start[-1]) + width])
        out = [ids[a : min(b, a + MAX_IN_COLUMN)].tolist() for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        for token in {t for column in out for t in column} - self._texts.keys():
            self._texts[token] = self.vocabulary.text(token)
        return out

    @property
    def texts(self) -> Mapping[str, str]:
        """Of each id that a column has; ids that are no token are not there."""
        return {str(token): text for token, text in self._texts.items() if text is not None}


def token_texts(vocabulary: Vocabulary, mine: str | Path) -> TokenTexts:
    """Reads mine's row maps once more. What cannot be read has no ids."""
    from vllm_accprobe.align.token_ids import token_ids
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.formats import open_dump

    try:
        return TokenTexts(vocabulary, token_ids(open_dump(mine)), str(mine))
    except (DumpError, OSError):
        return TokenTexts(vocabulary, {}, str(mine))
