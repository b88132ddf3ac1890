"""What the probe shall capture: one frozen dataclass with three spellings.

The problem: the same settings come as environment variables (a served model), as a TOML file (a long list of modules)
and as keyword arguments (a script). The idea: ProbeConfig is the only form that the rest of the house knows; each
spelling is parsed field by field by the same functions, and every mistake is one line that names the setting and the
nearest valid one. Precedence: environment over file over default.
Not here: what the settings do (capture/), nor the seed's DumpConfig semantics beyond translating it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ENV = "VLLM_ACCPROBE"
PREFIX = ENV + "_"
RUN_ID = PREFIX + "RUN_ID"
"""Set by the front end for its workers, so that they know a running start from an old dump. Not for users."""

PRESETS = ("vision", "layers", "attention", "mlp", "norm", "linear", "logits", "all")
TASKS = ("tensor", "stats")
PARTS = ("input", "output", "params")
ERRCHECK = ("overflow", "nan", "exit")
OPS_MODES = ("trace", "dedup", "sample", "full")


class ConfigError(ValueError):
    """A setting is wrong. The message is one line: which, what is wrong, what would be right."""


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
    return not ranges or any(low <= value <= high for low, high in ranges)


def _globs(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    globs = tuple(str(item).strip() for item in items if str(item).strip())
    return () if globs in (("all",), ("*",)) else globs


def _choice(options: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in options:
            raise ValueError(f"{text!r} is not one of {', '.join(options)}{_nearest(text, options)}")
        return text

    return parse


def _parts(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    parts = tuple(dict.fromkeys(_choice(PARTS)(item) for item in items if str(item).strip()))
    if not parts:
        raise ValueError(f"name at least one of {', '.join(PARTS)}")
    return parts


def _flag(value: object) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither 1 nor 0")


def _errcheck(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    words = [str(item).strip().lower() for item in items if str(item).strip()]
    if all(word in ("0", "false", "no", "off") for word in words):
        return ()
    if words == ["1"]:
        words = ["overflow", "nan"]
    kinds = tuple(dict.fromkeys(_choice(ERRCHECK)(word) for word in words))
    if kinds == ("exit",):
        raise ValueError("name overflow, nan or both besides exit")
    return kinds


def _names(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return tuple(dict.fromkeys(str(item).strip() for item in items if str(item).strip()))


def _gigabytes(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a number of gigabytes") from None
    if not 0 < number < 1e6:
        raise ValueError(f"{value!r} is not a sensible number of gigabytes (0 < GB < 1000000)")
    return number


def _megabytes(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a number of megabytes") from None
    if not 0 < number < 1e9:
        raise ValueError(f"{value!r} is not a sensible number of megabytes (0 < MB < 1000000000)")
    return number


def _natural(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,15}", text):
        raise ValueError(f"{text!r} is not a whole number such as 5")
    return int(text)


def _path(value: object) -> str:
    text = os.path.expanduser(str(value).strip())
    if not text or "\0" in text:
        raise ValueError("the path is empty")
    return text


@dataclass(frozen=True)
class ProbeConfig:
    """Everything that can be chosen. Field ``x`` is ``VLLM_ACCPROBE_X`` in the environment and ``x`` in TOML.

    enabled: the probe is on (``VLLM_ACCPROBE=1``).
    dir: the dump directory; "" means ./accprobe/<UTC time>.
    task: ``tensor`` keeps payloads, ``stats`` only statistics and hashes.
    tokens, steps, ranks: closed ranges, () means all. modules, requests: globs, () means all; ``!`` excludes.
    parts: of input, output, params; () means input and output, and params while they fit a quarter of the budget.
    graphs: leave torch.compile and captured graphs as configured. ops: capture operator calls too; ops_mode: ``trace``
    (no tensors), ``dedup`` (one call of each set of shapes and dtypes), ``sample`` (tensors of ``ops_calls`` random
    calls of each operator) or ``full``; ops_list: globs over operators, or over ``module::operator``; ops_max_mb:
    tensors above so many 1e6 bytes are not kept; seed: of whatever is drawn at random.
    max_gb: disk budget per rank in 1e9 bytes.
    errcheck: of overflow, nan, exit: what is looked for in every step, with the probe off, too, and whether the engine
    is then stopped. patches: names or files of patches (docs/patches.md), or ``all``.
    """

    enabled: bool = False
    dir: str = ""
    task: str = "tensor"
    tokens: Ranges = ()
    steps: Ranges = ()
    ranks: Ranges = ()
    modules: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    graphs: bool = False
    ops: bool = False
    max_gb: float = 20.0
    ops_mode: str = "full"
    ops_list: tuple[str, ...] = ()
    ops_calls: int | None = None
    ops_max_mb: float = 256.0
    seed: int = 0
    errcheck: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> int:
        return int(self.max_gb * 1e9)

    @property
    def capture_inputs(self) -> bool:
        return not self.parts or "input" in self.parts

    @property
    def capture_outputs(self) -> bool:
        return not self.parts or "output" in self.parts

    def wants_param_payloads(self, total_bytes: int) -> bool:
        """Whether parameters are stored and not only fingerprinted; ``total_bytes`` is the size of all of them."""
        if self.task == "stats":
            return False
        if self.parts:
            return "params" in self.parts
        return total_bytes <= self.budget_bytes / 4

    def wants_request(self, *names: str) -> bool:
        """Whether a request known under any of ``names`` is selected."""
        return matches(self.requests, names)

    def __post_init__(self) -> None:
        if self.ops_calls is not None and self.ops_mode not in ("sample", "dedup"):
            raise ConfigError(
                f"{PREFIX}OPS_CALLS={self.ops_calls}: it counts the calls that {PREFIX}OPS_MODE=sample or dedup keeps, "
                f"and the mode is {self.ops_mode}"
            )

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ProbeConfig:
        """The configuration of the environment (and of the TOML file it names).

        Raises:
            ConfigError: an unknown ``VLLM_ACCPROBE_*`` name or a bad value.
        """
        environ = os.environ if environ is None else environ
        known = environment_names()
        for name in environ:
            if name.startswith(PREFIX) and name not in known:
                raise ConfigError(f"{name} is not a setting of accprobe{_nearest(name, known)}")
        base: dict[str, Any] = {}
        if environ.get(PREFIX + "CONFIG"):
            base = _from_toml(environ[PREFIX + "CONFIG"])
        for name, parse in _PARSERS.items():
            key = ENV if name == "enabled" else PREFIX + name.upper()
            if environ.get(key, "") != "":
                base[name] = _parsed(key, parse, environ[key])
        return cls(**base)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ProbeConfig:
        """The keyword form: ``from_kwargs(dir="out", tokens="0-4", modules=["layers"])``; enabled by default."""
        values = {"enabled": True, **kwargs}
        return cls(**{name: _parsed(name, _parser(name), value) for name, value in values.items()})

    def with_dir(self, path: str | Path) -> ProbeConfig:
        return replace(self, dir=str(path))


_PARSERS: dict[str, Callable[[object], Any]] = {
    "enabled": _flag,
    "dir": _path,
    "task": _choice(TASKS),
    "tokens": parse_ranges,
    "steps": parse_ranges,
    "ranks": parse_ranges,
    "modules": _globs,
    "parts": _parts,
    "requests": _globs,
    "graphs": _flag,
    "ops": _flag,
    "max_gb": _gigabytes,
    "ops_mode": _choice(OPS_MODES),
    "ops_list": _globs,
    "ops_calls": _natural,
    "ops_max_mb": _megabytes,
    "seed": _natural,
    "errcheck": _errcheck,
    "patches": _names,
}


def environment_names() -> tuple[str, ...]:
    """All environment names that belong to accprobe."""
    names = [ENV, PREFIX + "CONFIG", RUN_ID]
    names += [PREFIX + name.upper() for name in _PARSERS if name != "enabled"]
    return tuple(names)


def default_dir(now: datetime | None = None) -> str:
    """./accprobe/<UTC time>, the place of a dump whose user named none."""
    now = now or datetime.now(timezone.utc)
    return str(Path("accprobe") / now.strftime("%Y%m%dT%H%M%SZ"))


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


def _parser(name: str) -> Callable[[object], Any]:
    try:
        return _PARSERS[name]
    except KeyError:
        raise ConfigError(f"{name!r} is not a setting of accprobe{_nearest(name, tuple(_PARSERS))}") from None


def _parsed(key: str, parse: Callable[[object], Any], value: object) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {error}") from None


def _from_toml(path: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
    key = PREFIX + "CONFIG"
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{key}={path}: not a TOML file: {error}") from None
    table = table.get("accprobe", table) if isinstance(table.get("accprobe"), dict) else table
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in _PARSERS:
            raise ConfigError(f"{key}={path}: {name!r} is not a setting{_nearest(name, tuple(_PARSERS))}")
        values[name] = _parsed(f"{path}: {name}", _PARSERS[name], value)
    return values


def _nearest(name: str, valid: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class DumpConfig:
    """The seed's spelling of a configuration (ait's and msit's ``DumpConfig``): what register_hook() takes.

    dump_path: directory, by default VLLM_ACCPROBE_DIR or ./accprobe/<UTC time>; token_range: token ordinals (default:
    the prompt only, as in ait); module_list: classes or globs of modules, [] for all; tensor_part: 0 inputs, 1 outputs,
    2 both; device_id: only this device; dump_last_logits: the logits only; mode: "module", "api" (operator calls too)
    or both; api_list: operators, with "api"; dump_weight: parameters' payloads too; layer_name: a glob over module
    paths, besides module_list.
    """

    dump_path: str | None = None
    token_range: Any = (0,)
    module_list: Any = ()
    tensor_part: int = 2
    device_id: int | None = None
    dump_last_logits: bool = False
    mode: Any = ("module",)
    dump_weight: bool = False
    layer_name: str | None = None
    api_list: Any = ()

    def to_probe(self) -> ProbeConfig:
        """Raises ConfigError for a bad value."""
        if self.tensor_part not in (0, 1, 2):
            raise ConfigError(f"tensor_part={self.tensor_part}: 0 is inputs, 1 outputs, 2 both")
        parts = ("input", "output", "input,output")[self.tensor_part] + (",params" if self.dump_weight else "")
        names = [m if isinstance(m, str) else getattr(m, "__name__", str(m)) for m in self.module_list or ()]
        names += [self.layer_name] if self.layer_name else []
        names += ["logits"] if self.dump_last_logits else []
        mode = (self.mode,) if isinstance(self.mode, str) else tuple(self.mode or ("module",))
        for word in mode:
            if word not in ("module", "api"):
                raise ConfigError(f"mode={word}: known are module and api{_nearest(str(word), ('module', 'api'))}")
        values: dict[str, Any] = {"modules": names, "parts": parts, "tokens": self.token_range or (0,)}
        # Without a path of its own: where `accprobe run` or the environment wants it.
        path = self.dump_path or os.environ.get(PREFIX + "DIR")
        if path:
            values["dir"] = path
        if "api" in mode:
            values |= {"ops": True, "ops_list": list(self.api_list or ())}
        return ProbeConfig.from_kwargs(**values)
