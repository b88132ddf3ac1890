"""Where the line goes: from options, or from the keys that msprobe's config.json has for it.

The problem: users of msprobe's online pre-check have two config.json, one for each side. The idea: they are read as
they are: the ``run_ut`` block with ``is_online`` says how to receive, the ``tensor`` block with ``online_run_ut`` how
to send; what is set and has no meaning here is named. Not here: the connection (connection.py, shared.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from vllm_accprobe.dump.decode import DecodeError, Text, between, fits, load, object_at
from vllm_accprobe.dump.files import DumpError

_MAX_JSON = 1 << 20
_Rank = Annotated[int, between(0, (1 << 16) - 1)]
RECEIVES, SENDS = "run_ut", "tensor"
_SWITCH = {RECEIVES: "is_online", SENDS: "online_run_ut"}
_KNOWN = {"nfs_path", "host", "port", "tls_path", "rank_list", "white_list", "black_list", *_SWITCH.values()}
_IGNORED = {"error_data_path", "is_benchmark_device", "scope", "list", "online_run_ut_recompute", "data_mode",
            "backward_input", "file_format"}  # fmt: skip


@dataclass(frozen=True)
class Endpoint:
    """host, port: of the receiver; shared: a folder that both machines see, in place of them; tls: the folder of
    certificates, None for a plain line within this machine."""

    host: str = "127.0.0.1"
    port: int = 0
    shared: Path | None = None
    tls: Path | None = None


@dataclass(frozen=True)
class Keys:
    """What a config.json says. ranks: None where it says nothing; ops: globs, of white_list and black_list; notes:
    sentences on what has no meaning here; dump: the capture's directory, of the sending side."""

    endpoint: Endpoint
    ranks: tuple[int, ...] | None = None
    ops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dump: Path | None = None


def read_keys(path: Path, block: str) -> Keys:
    """block: RECEIVES or SENDS. Raises DumpError, one line."""
    try:
        tree = load(dict[str, Any], path, _MAX_JSON)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from None
    except DecodeError:
        raise DumpError(f"{path} is no JSON object") from None
    found = object_at(tree, block)
    if found is None:
        raise DumpError(f'{path} has no "{block}" block, which says where the connection goes')
    if found.get(_SWITCH[block]) is not True:
        raise DumpError(f"{path}: {block}.{_SWITCH[block]} is not true: this configuration is not for an online check")
    where = f"{path}: {block}"
    shared, host, tls = (_text(found, key, where) for key in ("nfs_path", "host", "tls_path"))
    port = found.get("port", 0)
    if shared:
        endpoint = Endpoint(shared=Path(shared))
    elif type(port) is not int or not 0 < port < 65536:
        raise DumpError(f"{where}.port is {json.dumps(port)[:40]}: a number from 1 to 65535, or name nfs_path")
    elif not host:
        raise DumpError(f"{where}.host is missing: name the receiver's address, or nfs_path")
    else:
        endpoint = Endpoint(host, port, None, Path(tls) if tls else None)
    ranks_value = found.get("rank_list", [0]) if block == RECEIVES else tree.get("rank") or None
    ranks = None if ranks_value is None else _ranks(ranks_value, where)
    notes = [f"{block}.{key} has no effect here" for key in sorted(_IGNORED & set(found)) if found[key]]
    notes += [f"{block}.{key} is not known and has no effect" for key in sorted(set(found) - _KNOWN - _IGNORED)]
    dump = _text(tree, "dump_path", str(path)) if block == SENDS else ""
    return Keys(endpoint, ranks, _globs(found, where), tuple(notes), Path(dump) if dump else None)


def _text(found: Mapping[str, Any], key: str, where: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str) or "\0" in value:
        raise DumpError(f"{where}.{key} is no text")
    return value


def _ranks(value: Any, where: str) -> tuple[int, ...]:
    if not value or not fits(list[_Rank], value):
        raise DumpError(f"{where}: the ranks are {json.dumps(value)[:40]}, not a list of numbers from 0 on")
    return tuple(sorted(set(value)))


def _globs(found: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """msprobe's names of functions (``conv1d``) as globs over ours: as they are, or as a part between dots."""
    made: list[str] = []
    for key, sign in (("white_list", ""), ("black_list", "!")):
        names = found.get(key) or []
        if not fits(list[Text], names):
            raise DumpError(f"{where}.{key} is no list of names")
        made += [sign + form for n in names for form in (n, f"*.{n}", f"*.{n}.*")]
    return tuple(made)
