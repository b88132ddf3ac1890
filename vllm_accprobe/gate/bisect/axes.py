"""The settings that bisect varies: what the command has, and what the plainest value of it is.

The problem: a fault of a new card shows with prefix caching, or chunks and asynchronous scheduling together, or with
one custom operator, and whoever switches by hand tries three of the hundred combinations. The idea: each
`ServerSetting` is one setting whose value in the command is not the plain one, with the `Edit` that makes it plain.
What is made of many (compilation, custom operators) is one axis first, and is taken apart only where it belongs to
the culprits. Not here: what the installed vLLM has (offered.py), a vendor's own (vendor.py), trying (trials.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_accprobe.gate.bisect.edits import BisectError, Edit, ServeCommand, number
from vllm_accprobe.gate.bisect.offered import Offered

CC, IR = "--compilation-config", "--ir-op-priority"
TOKENS, CHUNKED, BLOCK = "--max-num-batched-tokens", "--enable-chunked-prefill", "--block-size"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
MODEL_LENGTH = "{model length}"
"""Stands in an edit for what the first run tells."""


@dataclass(frozen=True)
class ServerSetting:
    """One setting. value, plain: for people; edit: makes it plain; parts: what it is made of, each an axis; fact: what
    an engine's log says of it (engine_log.py), "" where it says nothing; scale: (option, the command's number, the
    plain one's, None: the first run tells)."""

    name: str
    value: str
    plain: str
    edit: Edit
    parts: tuple[ServerSetting, ...] = ()
    fact: str = ""
    scale: tuple[str, int, int | None] | None = None


def axes(
    command: ServeCommand, offered: Offered, vendor: Sequence[ServerSetting] = (), plain: Mapping[str, str] = {}
) -> list[ServerSetting]:
    """All whose value is not plain already. plain: by axis, another plain value (`--plain attention=TRITON_ATTN`).
    Raises BisectError."""
    found = [a for a in (f(command, offered) for f in _TABLE) if a is not None]
    found += [a for a in _values(command, offered, plain) if a is not None]
    names = {a.name for a in found} | {a.name for a in vendor}
    if len(names) < len(found) + len(vendor):
        raise BisectError("--switches: a switch has the name of one of bisect's own axes, or two have the same")
    return [*found, *vendor]


def _switch(
    name: str, option: str, fact: str, on: bool, command: ServeCommand, offered: Offered
) -> ServerSetting | None:
    """on: the plain value of ``option``."""
    said = command.flag(option)
    if option not in offered or said is on:
        return None
    words = (option if on else "--no-" + option[2:],)
    edit = Edit(drop=(option,), add=words)
    return ServerSetting(name, _said(said), "on" if on else "off", edit, fact=fact)


def _said(flag: bool | None) -> str:
    return "as by default" if flag is None else "on" if flag else "off"


def _compilation(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    if command.flag("--enforce-eager") or "--enforce-eager" not in offered:
        return None
    given = command.json(CC)
    parts: list[ServerSetting] = []
    if CC in offered:
        fields: list[tuple[str, str, Any]] = [("mode", "mode", 0), ("graphs", "cudagraph_mode", "NONE")]
        fields += [(name, f"pass_config.{name}", False) for name in offered.passes]
        for name, path, value in fields:
            now = _inside(given, path)
            if now != value or type(now) is not type(value):
                edit = Edit(fields=((CC, path, value),))
                parts.append(ServerSetting(f"compilation: {name}", _shown(now), _shown(value), edit))
    level = command.get("--optimization-level")
    value = "as by default" if level is None and not given else "-O" + (level or "") if not given else "as given"
    return ServerSetting("compilation", value, "eager", Edit(add=("--enforce-eager",)), tuple(parts), "eager")


def _custom_ops(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    given = command.json(CC).get("custom_ops") or []
    if CC not in offered or not isinstance(given, list) or ("none" in given and not any(o[:1] == "+" for o in given)):
        return None
    off = {op[1:] for op in given if op[:1] == "-"}
    on = {op[1:] for op in given if op[:1] == "+"}
    names = on if "none" in given else set(offered.custom_ops) - off | on
    parts = tuple(
        ServerSetting(f"custom operators: {name}", "as by default" if name not in on else "on", "native",
             Edit(fields=((CC, "custom_ops+", f"-{name}"),)))
        for name in sorted(names)
    )  # fmt: skip
    shown = "as by default" if not given else ",".join(given)
    return ServerSetting(
        "custom operators", shown, "native", Edit(fields=((CC, "custom_ops", ["none"]),)), parts, "custom operators"
    )


def _ir_ops(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    """vLLM IR (0.2x on): each operator has a list of who implements it, the first that can is taken."""
    if IR not in offered or not offered.ir_ops:
        return None
    given = command.json(IR)
    left = [name for name in offered.ir_ops if given.get(name) not in (["native"], "native")]
    parts = tuple(
        ServerSetting(
            f"IR operators: {name}", _shown(given.get(name)), "native", Edit(fields=((IR, name, ["native"]),))
        )
        for name in left
    )
    if not left:
        return None
    edit = Edit(fields=tuple((IR, name, ["native"]) for name in left))
    value = "as given" if given else "as by default"
    return ServerSetting("IR operators", value, "native", edit, parts, "IR operators")


def _chunks(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    """Plain is a step that takes any prompt whole: as many tokens as the model's length, and no chunks where vLLM can
    be told so."""
    if TOKENS not in offered:
        return None
    length = number(command.get("--max-model-len"))
    now = number(command.get(TOKENS))
    switch = ("--no-" + CHUNKED[2:],) if CHUNKED in offered else ()
    if now is not None and length is not None and now >= length and (not switch or command.flag(CHUNKED) is False):
        return None
    whole = str(max(now or 0, length)) if length is not None else MODEL_LENGTH
    drop = (TOKENS, CHUNKED) if switch else (TOKENS,)
    value = f"{now} tokens a step" if now is not None else "as by default"
    edit = Edit(drop=drop, add=(*switch, TOKENS, whole))
    plain = length if now is not None and (length is None or length > now) else None
    return ServerSetting("chunked prefill", value, "off", edit, fact="chunks",
                scale=(TOKENS, now, plain) if now is not None and (plain or length is None) else None)  # fmt: skip


def _runner(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    said = command.full().get(V2)
    if said is None or said == "0" or V2 not in offered:
        return None
    return ServerSetting("model runner", "V2", "V1", Edit(environ=((V2, "0"),)))


_TABLE = (
    _compilation,
    lambda c, o: _switch("prefix caching", "--enable-prefix-caching", "prefix", False, c, o),
    _chunks,
    lambda c, o: _switch("async scheduling", "--async-scheduling", "async", False, c, o),
    _runner,
    _custom_ops,
    _ir_ops,
)

_VALUES = (
    ("tensor parallel", "--tensor-parallel-size", "1"),
    ("KV cache dtype", "--kv-cache-dtype", "auto"),
    ("block size", BLOCK, None),
    ("attention", "--attention-backend", None),
    ("speculation", "--speculative-config", None),
)
"""(axis, option, the plain value; None: the option is taken away)."""


def _values(command: ServeCommand, offered: Offered, plain: Mapping[str, str]) -> list[ServerSetting | None]:
    if unknown := set(plain) - {name for name, _, _ in _VALUES}:
        raise BisectError(
            f"--plain {min(unknown)}=...: only {', '.join(n for n, _, _ in _VALUES)} have other plain values"
        )
    found: list[ServerSetting | None] = []
    for name, option, usual in _VALUES:
        now, wanted = command.get(option), plain.get(name, usual)
        if name in plain and option not in offered:
            raise BisectError(f"--plain {name}=...: this vLLM has no {option}")
        if option not in offered or now == wanted or (now is None and name not in plain):
            continue
        edit = Edit(drop=(option,), add=() if wanted is None else (option, wanted))
        scale = None
        if name == "block size" and (n := number(now)) is not None:
            scale = (option, n, number(wanted))
        fact = name if name in ("block size", "KV cache dtype") else ""
        found.append(ServerSetting(name, _shown(now), wanted or "as by default", edit, fact=fact, scale=scale))
    return found


def partial(axis: ServerSetting, names: Sequence[str]) -> ServerSetting:
    """The same with only these of its parts."""
    return replace(axis, parts=tuple(p for p in axis.parts if p.name in set(names)))


def _inside(made: dict[str, Any], path: str) -> Any:
    value: Any = made
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _shown(value: Any) -> str:
    return "as by default" if value is None else value if isinstance(value, str) else json.dumps(value)
