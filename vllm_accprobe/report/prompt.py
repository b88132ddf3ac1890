"""A request's prompt: its token ids, what is missing of them and why, and its text.

The problem: a report names a request, and the prompt is a user's text, which no report repeats. The idea: it is printed
where it is requested, from the ids next to the stored rows, with the positions that no stored row computed and
what to set so that they are. Ids become text by a tokenizer.json that the user names; nothing is downloaded or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.dump.reader import Dump, names_request
from vllm_accprobe.dump.schema import Request, hash_tokens
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.report.html.data import tokenizer_at
from vllm_accprobe.report.text import count, safe

_A_LINE = 16
_SPANS = 10
_MOST = 1 << 22
"""Tokens of a prompt that are printed: more is no model's context."""


def prompt_lines(dump: Dump, globs: Sequence[str], tokenizer: Path | None) -> list[str]:
    """The lines for the one request that ``globs`` name. Raises CommandError, NothingThere, and CompareError for a
    tokenizer that cannot be read."""
    request, keys = _chosen(dump, globs)
    ids = _ids(dump, keys, min(request.prompt_len, _MOST))
    what = f"request {safe(request.id, 80)}: a prompt of {count(request.prompt_len, 'token')}"
    missing = [p for p in range(min(request.prompt_len, _MOST)) if p not in ids]
    if not ids:
        raise NothingThere(f"{what}, and no id of it is recorded: {_why(dump.run)}")
    texts = None if tokenizer is None else load_tokenizer(tokenizer)
    lines = [what + ("" if not missing else f", of which {len(ids):,} are recorded") + _same(request, ids, missing)]
    for first, last in _stretches(sorted(ids)):
        for start in range(first, last + 1, _A_LINE):
            here = range(start, min(start + _A_LINE, last + 1))
            lines.append(f"  {start:>6}  {' '.join(str(ids[p]) for p in here)}")
    if missing:
        spans = [f"{a}-{b}" if b > a else str(a) for a, b in _stretches(missing)]
        more = f" and {len(spans) - _SPANS:,} more stretches" if len(spans) > _SPANS else ""
        lines.append(f"missing: positions {', '.join(spans[:_SPANS])}{more}: {_why(dump.run)}")
    if texts is None:
        lines.append("as text: --tokenizer DIR, the model's directory with its tokenizer.json")
    else:
        for first, last in _stretches(sorted(ids)):
            text = "".join(texts([ids[p] for p in range(first, last + 1)]))
            lines.append(f"text, positions {first}-{last}: {safe(text, len(text) + 1)}")
    return lines


def _chosen(dump: Dump, globs: Sequence[str]) -> tuple[Request, list[tuple[int, int]]]:
    """The request, and its (rank, number) on all ranks."""
    by_name: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key, request in dump.requests.items():
        if not globs or names_request(globs, request):
            by_name.setdefault((request.id, request.prompt), []).append(key)
    if len(by_name) == 1:
        (keys,) = by_name.values()
        return dump.requests[keys[0]], keys
    known = [name for name, _ in by_name] or list(dict.fromkeys(r.id for r in dump.requests.values()))
    names = ", ".join(safe(name, 80) for name in known[:_SPANS])
    names += f" and {len(known) - _SPANS:,} more" if len(known) > _SPANS else ""
    if not by_name:
        there = f"it has {names}" if known else "it names no requests"
        raise NothingThere(f"no request of {dump.path} matches {safe(' '.join(globs), 80) or 'anything'}: {there}")
    raise CommandError(f"--prompt shows one request, and {len(by_name):,} match ({names}): name one with --requests")


def _ids(dump: Dump, keys: Sequence[tuple[int, int]], length: int) -> dict[int, int]:
    """Position → token id, of the stored rows of the prompt."""
    selected = set(keys)
    found: dict[int, int] = {}
    for (rank, _, _), space in dump.rows.items():
        for s, rows in space.stretches():
            if (rank, s.req) in selected and s.image is None and len(space.ids) >= rows.stop:
                found.update((s.pos + k, space.ids[rows.start + k]) for k in range(min(s.n, max(length - s.pos, 0))))
    return found


def _same(request: Request, ids: Mapping[int, int], missing: Sequence[int]) -> str:
    if missing or len(ids) != request.prompt_len:
        return ""
    try:
        alike = hash_tokens(ids[p] for p in range(len(ids))) == request.prompt
    except OverflowError:  # no int32
        alike = False
    return "" if alike else "; the dump's hash of the prompt is another: it came as embeddings, or a tool rewrote it"


def _why(run: Mapping[str, Any]) -> str:
    """Why ids are missing, and what to set."""
    probe = object_at(run, "probe")
    if run.get("tool") != "accprobe" or not probe:
        return "a row map holds them only in a capture of accprobe (VLLM_ACCPROBE=1)"
    if probe.get("tokens") and not _first(probe["tokens"]):
        return "the capture kept generated tokens only; leave VLLM_ACCPROBE_TOKENS unset, or name 0 in it (0-4)"
    if probe.get("steps"):
        return "the capture kept some steps only; leave VLLM_ACCPROBE_STEPS unset"
    return (
        "no step of this capture computed them (a prefix cache had them, or it was armed later); start the server with "
        "--no-enable-prefix-caching, and capture from the request's first step on"
    )


def _first(tokens: Any) -> bool:
    """Whether a capture's VLLM_ACCPROBE_TOKENS, as run.json keeps it, names 0."""
    try:
        return any(int(low) <= 0 for low, *_ in tokens)
    except (TypeError, ValueError):
        return True


def _stretches(positions: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each stretch of sorted ``positions``."""
    out: list[tuple[int, int]] = []
    for p in positions:
        if out and out[-1][1] == p - 1:
            out[-1] = out[-1][0], p
        else:
            out.append((p, p))
    return out


_PART = "\ufffd"
"""What decoding gives for bytes that are no whole character."""
_LONGEST = 8
"""Tokens of which one character can be made; UTF-8 has at most four bytes, and some tokenizers add empty ones."""


def load_tokenizer(path: str | Path) -> Callable[[Sequence[int]], list[str]]:
    """What turns ids into their texts, one for each; joined they are the whole text. ``path``: a directory with a
    tokenizer.json, or that file. Raises CompareError, one line."""
    tokenizer = tokenizer_at(Path(path))
    size = tokenizer.get_vocab_size(with_added_tokens=True)

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return lambda ids: _each(ids, decoded, size)


def _each(ids: Sequence[int], decode: Callable[[Sequence[int]], str], size: int) -> list[str]:
    """The text that each token adds to those before it: many tokenizers begin a text without the blank that the token
    has. An id that is not in the vocabulary is shown as its number."""
    out: list[str] = []
    last = 0  # where the text that is shown begins
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
