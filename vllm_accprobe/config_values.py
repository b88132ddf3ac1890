"""What a setting may say: one function per kind of value, and the words that some of them choose from.

The problem: the same value comes as text (environment), as TOML's own types, and as Python's. The idea: each function
takes any of them and gives the one form that ProbeConfig keeps, or raises ValueError with what would be right; whoever
calls it knows the setting's name and puts it in front. Not here: which settings there are (config.py).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

TASKS = ("tensor", "stats")
WHEN_FULL = ("wait", "drop")
PARTS = ("input", "output", "params")
ERRCHECK = ("overflow", "nan", "exit")
ON = "1"
EXPORTS = ("h5",)
PRESETS: dict[str, dict[str, str]] = {
    # What finds the layer in a model of any size: each layer's outputs and the logits of the prompt and of the first
    # two answers. 2 tensors a layer in place of 13; the layer that it names is then captured whole (chosen).
    "first-look": {"modules": "layers,logits", "parts": "output", "tokens": "0-2", "max_gb": "5"},
}
"""Name → settings that hold where they are not set themselves."""
STATES = ("off", "events", "sample", "full")
WEIGHTS = ("full", "prints", "off")
OPS_MODES = ("trace", "dedup", "sample", "full")

Ranges = tuple[tuple[int, int], ...]
"""Closed integer ranges in rising order; empty means all."""


def parse_ranges(value: object) -> Ranges:
    """``"0-4,7"``, ``[0, 1, "5-9"]`` or ``3`` → ((0, 4), (7, 7)). Empty or "all" → (). Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("expected numbers such as 0-4,7")
    items = value if isinstance(value, (list, tuple, set, range)) else str(value).split(",")
    spans: list[tuple[int, int]] = []
    for item in items:
        if isinstance(item, (list, tuple)) and len(item) == 2:
            item = f"{item[0]}-{item[1]}"
        text = str(item).strip()
        if text in ("", "all", "*"):
            continue
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text)
        if not match:
            raise ValueError(f"{text!r} is not a number or a range such as 0-4")
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if high < low:
            raise ValueError(f"range {text!r} ends before it begins")
        spans.append((low, high))
    return tuple(sorted(spans))


def in_ranges(ranges: Ranges, value: int) -> bool:
    """Whether ``value`` lies in one of ``ranges``; in no ranges at all everything does."""
    return not ranges or any(low <= value <= high for low, high in ranges)


def globs(value: object) -> tuple[str, ...]:
    """``"a,b*"`` or a list; "all" and "*" alone → (), which is all."""
    found = tuple(str(item).strip() for item in _items(value) if str(item).strip())
    return () if found in (("all",), ("*",)) else found


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else str(value).split(",")


def modules(value: object) -> tuple[str, ...]:
    """As ``globs``, but "all" and "*" stay ("all",): in compiled graphs it is not the same as naming nothing."""
    return globs(value) or (("all",) if any(str(item).strip() for item in _items(value)) else ())


def choice(options: tuple[str, ...]) -> Callable[[object], str]:
    """Parses one of ``options``, whatever its case."""

    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in options:
            raise ValueError(f"{text!r} is not one of {', '.join(options)}{nearest(text, options)}")
        return text

    return parse


def parts(value: object) -> tuple[str, ...]:
    """Of input, output, params; at least one."""
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    found = tuple(dict.fromkeys(choice(PARTS)(item) for item in items if str(item).strip()))
    if not found:
        raise ValueError(f"name at least one of {', '.join(PARTS)}")
    return found


def flag(value: object) -> bool:
    """1, true, yes, on; 0, false, no, off, or nothing."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither 1 nor 0")


def errcheck(value: object) -> tuple[str, ...]:
    """Of overflow, nan and exit; 1 is overflow and nan, 0 and its like are none."""
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    words = [str(item).strip().lower() for item in items if str(item).strip()]
    if all(word in ("0", "false", "no", "off") for word in words):
        return ()
    if words == ["1"]:
        words = ["overflow", "nan"]
    kinds = tuple(dict.fromkeys(choice(ERRCHECK)(word) for word in words))
    if kinds == ("exit",):
        raise ValueError("name overflow, nan or both besides exit")
    return kinds


def names(value: object) -> tuple[str, ...]:
    """``"a,b"`` or a list, each once."""
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return tuple(dict.fromkeys(str(item).strip() for item in items if str(item).strip()))


def amount(unit: str, short: str, most: int) -> Callable[[object], float]:
    """Parses a number of ``unit`` above 0 and below ``most``."""

    def parse(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            raise ValueError(f"{value!r} is not a number of {unit}") from None
        if not 0 < number < most:
            raise ValueError(f"{value!r} is not a sensible number of {unit} (0 < {short} < {most})")
        return number

    return parse


def natural(value: object) -> int:
    """A whole number of at most 15 digits."""
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,15}", text):
        raise ValueError(f"{text!r} is not a whole number such as 5")
    return int(text)


def path(value: object) -> str:
    """A path with ``~`` filled in; it need not exist."""
    text = os.path.expanduser(str(value).strip())
    if not text or "\0" in text:
        raise ValueError("the path is empty")
    return text


def on_or_path(value: object) -> str:
    """``1`` and its like are ON, ``0`` and its like "", anything else is a path."""
    try:
        return ON if flag(value) else ""
    except ValueError:
        return path(value)


def matches(globs: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether one of ``names`` is chosen: the last glob that matches decides; only exclusions choose the rest."""
    if not globs:
        return True
    chosen = all(glob.startswith("!") for glob in globs)
    for glob in globs:
        wanted = not glob.startswith("!")
        if any(fnmatchcase(name, glob.lstrip("!")) for name in names):
            chosen = wanted
    return chosen


def nearest(name: str, valid: tuple[str, ...]) -> str:
    """``; did you mean ...?`` with the valid name that is most like ``name``, or ""."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


_MODULE_PRESETS: dict[str, Callable[[str, str], bool]] = {
    "all": lambda path, cls: True,
    "vision": lambda path, cls: any(
        word in path.split(".") for word in ("visual", "vision_tower", "vision_model", "vision")
    ),
    "layers": lambda path, cls: bool(path) and path.rpartition(".")[2].isdigit(),
    "attention": lambda path, cls: any(
        part in ("attn", "self_attn", "attention", "cross_attn", "mla_attn") for part in path.split(".")
    ),
    "mlp": lambda path, cls: any(
        part in ("mlp", "feed_forward", "ffn", "experts", "block_sparse_moe") for part in path.split(".")
    ),
    "norm": lambda path, cls: "norm" in path.rpartition(".")[2].lower() or "norm" in cls.lower(),
    "linear": lambda path, cls: "linear" in cls.lower() or cls.endswith("LMHead"),
    "logits": lambda path, cls: path.rpartition(".")[2] in ("lm_head", "logits_processor", "sampler"),
}


def words_choose(words: Sequence[str], name: str, path: str, cls: str) -> bool:
    """Whether globs, presets and class names choose a module. name: its tap; path: "" for the root; cls: its class."""
    globs: list[str] = []
    for glob in words:
        mark = "!" if glob.startswith("!") else ""
        word = glob.lstrip("!")
        if word in _MODULE_PRESETS:
            globs.append(mark + ("*" if _MODULE_PRESETS[word](path, cls) else "\0"))
        elif word == cls:
            globs.append(mark + "*")
        else:
            globs.append(glob)
    return matches(tuple(globs), (name,))
