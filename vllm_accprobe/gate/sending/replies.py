"""The folder of a `send`: what was sent, what came back, and which steps the engine computed.

    OUT/send.json       schema, server, settings, the passes and how many prompts each has answered
    OUT/prompts.jsonl   what was sent, a prompt on each line; `accprobe send` takes it again
    OUT/rendered.jsonl  the token ids that the server made of each chat (rendering.py)
    OUT/pass-0.jsonl    a `Reply` on each line, in the order of the answers; pass-1.jsonl, ...
    OUT/steps-0/steps-rank0.jsonl   {"step": 7, "requests": [["p3.pass1", 512, 256], ...]}: tokens computed before, and
                                    in this step; steps-1 of the next engine, whose lines replace those before

The problem: a run of hours ends in the middle, and what was answered must not be lost or sent again. The idea: each
answer is one line, written at once; a torn last line is cut off; a folder is resumed only where prompts, model and
settings are the same. Directories are 0700 and files 0600. Not here: writing steps (capture/teacher_forcing.py).
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import bounded_lines
from vllm_accprobe.gate.sending import prompts
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.whole_file import naming, write_private

Row = tuple[int, int, int, int]
"""Step, tokens computed before, tokens of this step, requests in this step."""


def folder_name(engine: int) -> str:
    return f"steps-{engine}"


def request_id(name: str, pass_index: int) -> str:
    """What the prompt ``name`` is called in pass ``pass_index``: a server may not have one id twice."""
    return name if pass_index == 0 else f"{name}.pass{pass_index}"


@dataclass(frozen=True)
class Steps:
    """by_request: rows of each request id."""

    by_request: dict[str, list[Row]] = field(default_factory=dict)

    def rows(self, pass_index: int, name: str) -> list[Row]:
        """In the order of computation; empty where the server was not ours. A request that was preempted has rows
        for the same tokens again."""
        return self.by_request.get(request_id(name, pass_index), [])


def read_steps(out: Path) -> Steps:
    """Of a folder of `send`; what is no such line is left out. Raises OSError."""
    found: dict[str, list[Row]] = {}
    for folder in sorted((p for p in out.glob("steps-*") if _number(p) is not None), key=lambda p: _number(p) or 0):
        engine: dict[str, list[Row]] = {}
        for path in sorted(folder.glob("steps-rank*.jsonl")):
            _add(engine, path)
        found |= engine
    return Steps(found)


def _number(path: Path) -> int | None:
    match = re.fullmatch(r"steps-(\d{1,6})", path.name)
    return int(match[1]) if match and path.is_dir() else None


def _add(engine: dict[str, list[Row]], path: Path) -> None:
    for line in lines(path):
        try:
            step, parts = int(line["step"]), [(str(name), int(a), int(n)) for name, a, n in line["requests"]]
        except (KeyError, TypeError, ValueError):
            continue
        for name, before, n in parts:
            engine.setdefault(name, []).append((step, before, n, len(parts)))


def lines(path: Path) -> Iterator[Any]:
    """The json of each line; what is none is left out. Raises OSError, DumpError."""
    for raw in bounded_lines(path):
        try:
            yield json.loads(raw)
        except (ValueError, RecursionError):
            continue


SCHEMA = 1
SEND, PROMPTS = "send.json", "prompts.jsonl"
_NAMES = frozenset(f.name for f in fields(Reply))
_BARE = _NAMES - {"logprobs", "top", "margins"}


class FolderError(Exception):
    """One line: why a folder is no folder of a `send`, or not of this one."""


def pass_name(index: int) -> str:
    return f"pass-{index}.jsonl"


@dataclass(frozen=True)
class Sent:
    """An open folder, to be read. about: send.json; passes: the replies of each, by the prompt's id."""

    path: Path
    about: dict[str, Any]
    passes: list[dict[str, Reply]]


def exists(out: Path) -> bool:
    return (out / SEND).is_file()


def begun(out: Path) -> dict[str, Any] | None:
    """send.json, None where nothing was begun. Raises FolderError, OSError."""
    return read_about(out) if exists(out) else None


def prompts_of(folder: Path) -> list[PromptLine]:
    """What a folder was sent; [] where it does not say. Raises PromptsError, OSError."""
    path = folder / PROMPTS
    return prompts.read(str(path)) if path.is_file() and path.stat().st_size else []


def read(out: Path) -> Sent:
    """Raises FolderError, OSError."""
    about = read_about(out)
    return Sent(out, about, [_by_name(out / pass_name(i)) for i in range(len(about["passes"]))])


def read_pass(out: Path, index: int) -> dict[str, Reply]:
    """The replies of one pass, by the prompt's id, without log-probabilities: 3 KB each, not 60. Raises OSError."""
    return {reply.name: reply for reply in _replies(out / pass_name(index), _BARE)}


def refusals(out: Path, index: int) -> dict[str, str | None]:
    """By the prompt's id, why one pass has no answer to it; None where it has one. Raises OSError."""
    return {reply.name: reply.refused for reply in _replies(out / pass_name(index), _BARE)}


def read_about(out: Path) -> dict[str, Any]:
    """send.json. Raises FolderError, OSError."""
    try:
        about = json.loads((out / SEND).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise FolderError(f"{out} is no folder of `accprobe send`: it has no {SEND}") from None
    except (ValueError, RecursionError):
        raise FolderError(f"{out / SEND} is no json") from None
    if not isinstance(about, dict) or about.get("schema") != SCHEMA or not isinstance(about.get("passes"), list):
        raise FolderError(f"{out / SEND} is not of this version of accprobe send (schema {SCHEMA})")
    return about


def begin(out: Path, prompts: str, about: dict[str, Any]) -> None:
    """Makes a folder. Raises OSError."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(out / PROMPTS, prompts)
    write_about(out, about)


def write_about(out: Path, about: dict[str, Any]) -> None:
    write_private(out / SEND, json.dumps(about, indent=1) + "\n")


def answered(path: Path) -> set[str]:
    """The ids in a pass's file, which is cut to its whole lines. Raises OSError."""
    cut(path)
    return {reply.name for reply in _replies(path, _BARE)}


def cut(path: Path) -> None:
    """Takes a torn last line away, so that lines can be added. Raises OSError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        torn = sum(len(raw) for raw in file if not raw.endswith(b"\n"))
    if torn:
        os.truncate(path, path.stat().st_size - torn)


def _by_name(path: Path) -> dict[str, Reply]:
    return {reply.name: reply for reply in _replies(path)}


def _replies(path: Path, names: frozenset[str] = _NAMES) -> Iterator[Reply]:
    """Each whole line that is a reply, of which ``names`` are kept."""
    if not path.exists():
        return
    for raw in bounded_lines(path):
        try:
            value = json.loads(raw)
            if not raw.endswith(b"\n"):
                continue
            top = value.get("top")
            if top is not None:
                value["top"] = [(ids, values) for ids, values in top]
            yield Reply(**{k: v for k, v in value.items() if k in names})
        except (ValueError, RecursionError, TypeError, AttributeError):
            continue


class LineWriter:
    """Adds lines of json to a file, from several threads, each at once."""

    def __init__(self, path: Path):
        self._path = path
        fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._file = os.fdopen(fd, "ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, value: dict[str, Any]) -> None:
        """Raises OSError; NoSpace, which names the file, where the disk is full."""
        raw = (json.dumps(value, separators=(",", ":")) + "\n").encode()
        with self._lock, naming(self._path, self._path, len(raw)):
            left = memoryview(raw)
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


class ReplyWriter(LineWriter):
    """Adds replies to a pass's file."""

    def add(self, reply: Reply) -> None:
        """Raises OSError."""
        self.write({k: v for k, v in asdict(reply).items() if v is not None})
