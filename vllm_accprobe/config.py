"""What a user may set: environment variables and the TOML file, checked before anything starts.

The problem: the same settings come as environment variables (a served model), as a TOML file (a long list of modules)
and as keyword arguments (a script). The idea: ProbeConfig, a frozen dataclass, is the only form that the rest knows.
Each value is parsed by one function, which takes text, TOML's types and Python's, or raises ValueError with what would
be right; every mistake is one line that names the setting and the nearest valid one. Precedence: environment over file
over preset over default.

`DumpConfig` is ait's and msit's spelling (tensor_part=2, token_range=[0]) of the same. Not here: what the settings do
(capture/).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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


def read_globs(value: object) -> tuple[str, ...]:
    """``"a,b*"`` or a list; "all" and "*" alone → (), which is all."""
    found = tuple(_words(value))
    return () if found in (("all",), ("*",)) else found


def _words(value: object) -> list[str]:
    """The items of a list, or of a text with commas, without those that are empty."""
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return [word for item in items if (word := str(item).strip())]


def read_modules(value: object) -> tuple[str, ...]:
    """As ``globs``, but "all" and "*" stay ("all",): in compiled graphs it is not the same as naming nothing."""
    return read_globs(value) or (("all",) if _words(value) else ())


def read_choice(options: tuple[str, ...]) -> Callable[[object], str]:
    """Parses one of ``options``, whatever its case."""

    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in options:
            raise ValueError(f"{text!r} is not one of {', '.join(options)}{nearest(text, options)}")
        return text

    return parse


def read_parts(value: object) -> tuple[str, ...]:
    """Of input, output, params; at least one."""
    found = tuple(dict.fromkeys(map(read_choice(PARTS), _words(value))))
    if not found:
        raise ValueError(f"name at least one of {', '.join(PARTS)}")
    return found


def read_flag(value: object) -> bool:
    """1, true, yes, on; 0, false, no, off, or nothing."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither 1 nor 0")


def read_errcheck(value: object) -> tuple[str, ...]:
    """Of overflow, nan and exit; 1 is overflow and nan, 0 and its like are none."""
    words = [word.lower() for word in _words(value)]
    if all(word in ("0", "false", "no", "off") for word in words):
        return ()
    if words == ["1"]:
        words = ["overflow", "nan"]
    kinds = tuple(dict.fromkeys(read_choice(ERRCHECK)(word) for word in words))
    if kinds == ("exit",):
        raise ValueError("name overflow, nan or both besides exit")
    return kinds


def read_names(value: object) -> tuple[str, ...]:
    """``"a,b"`` or a list, each once."""
    return tuple(dict.fromkeys(_words(value)))


def read_amount(unit: str, short: str, most: int) -> Callable[[object], float]:
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


def read_natural(value: object) -> int:
    """A whole number of at most 15 digits."""
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,15}", text):
        raise ValueError(f"{text!r} is not a whole number such as 5")
    return int(text)


def read_path(value: object) -> str:
    """A path with ``~`` filled in; it need not exist."""
    text = os.path.expanduser(str(value).strip())
    if not text or "\0" in text:
        raise ValueError("the path is empty")
    return text


def on_or_path(value: object) -> str:
    """``1`` and its like are ON, ``0`` and its like "", anything else is a path."""
    try:
        return ON if read_flag(value) else ""
    except ValueError:
        return read_path(value)


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


__all__ = [
    "ENV", "PREFIX", "REPLICAS", "RUN_ID", "TAP_SET", "ConfigError", "ProbeConfig", "Ranges",
    "default_dir", "environment_names", "in_ranges", "matches", "parse_ranges",
]  # fmt: skip

ENV = "VLLM_ACCPROBE"
PREFIX = ENV + "_"
RUN_ID = PREFIX + "RUN_ID"
"""Set by the front end for its workers, so that they know a running start from an old dump. Users set it only for
several front ends of one run (docs/capture.md)."""
REPLICAS = PREFIX + "REPLICAS"
"""Set by the front end for its workers: how many data-parallel replicas there are. Not for users."""
TAP_SET = PREFIX + "TAP_SET"
"""Set by each worker for itself, before its engine compiles: the key of the taps in its graphs. Not for users."""


class ConfigError(ValueError):
    """A setting is wrong. The message is one line: which, what is wrong, what would be right."""


@dataclass(frozen=True)
class ProbeConfig:
    """Everything that can be chosen. Field ``x`` is ``VLLM_ACCPROBE_X`` in the environment and ``x`` in TOML.

    enabled: the probe is on (``VLLM_ACCPROBE=1``). armed: a served engine captures from its start, and not only once
    its control file says so (arm_file.py).
    dir: the dump directory; "" means ./accprobe/<UTC time>.
    task: ``tensor`` keeps payloads, ``stats`` only statistics and hashes.
    tokens, steps, ranks: closed ranges, () means all. modules, requests: globs, () means all; ``!`` excludes.
    parts: of input, output, params; () means input and output, and params while they fit a quarter of the budget.
    graphs: leave torch.compile and captured graphs as configured; graph_mb: taps inside them get so many 1e6 bytes of a
    rank's memory, 0 for none; graph_taps: globs over modules, at which alone taps stand; graph_full: while the disk
    is slower than they, ``wait`` or ``drop`` and count what they hold (docs/capture.md).
    ops: capture operator calls too; ops_mode: ``trace`` (no tensors), ``dedup`` (one call of each set of shapes and
    dtypes), ``sample`` (tensors of ``ops_calls`` random calls of each operator) or ``full``; ops_list: globs over
    operators, or over ``module::operator``; ops_max_mb: tensors above so many 1e6 bytes are not kept; seed: of whatever
    is drawn at random.
    max_gb: disk budget per rank in 1e9 bytes.
    errcheck: of overflow, nan, exit: what is searched for in every step, with the probe off, too, and whether the
    engine is then stopped. patches: names or files of patches (docs/capture.md), or ``all``.
    force: ``1``: requests may name the tokens that they are answered with, with the probe off, too (docs/gate.md); a
    directory: its engine steps are written there as well.
    states: ``events``, ``sample`` or ``full``: a ledger of states, with the probe off, too (docs/state-checks.md);
    ``off``: not even the one of owners, which a capture has.
    export: ``h5``: torch_xray's files are written next to the dump when it is closed (export_at_end.py).
    weights: ``full``; ``prints``: fingerprints alone; or ``off``: nothing of the weights' life (docs/state-checks.md).
    heal: globs over modules whose outputs are replaced by their references, with the probe off, too; () means none.
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
    graph_mb: int = 512
    graph_full: str = "wait"
    graph_taps: tuple[str, ...] = ()
    ops: bool = False
    max_gb: float = 20.0
    ops_mode: str = "full"
    ops_list: tuple[str, ...] = ()
    ops_calls: int | None = None
    ops_max_mb: float = 256.0
    seed: int = 0
    errcheck: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    armed: bool = True
    force: str = ""
    states: str = ""
    export: str = ""
    weights: str = "full"
    heal: tuple[str, ...] = ()

    @property
    def ledger(self) -> str:
        """Which ledger of states is kept, "" for none; a capture has one of owners alone."""
        if self.states == "off":
            return ""
        return self.states or ("owners" if self.enabled else "")

    @property
    def force_dir(self) -> str:
        """Where engine steps are written, "" for nowhere."""
        return "" if self.force == ON else self.force

    @property
    def budget_bytes(self) -> int:
        """``max_gb`` in bytes."""
        return int(self.max_gb * 1e9)

    @property
    def modules_left(self) -> bool:
        """Whether ``modules`` leaves any out."""
        return self.modules not in ((), ("all",))

    @property
    def capture_inputs(self) -> bool:
        """Whether modules' inputs are taken."""
        return not self.parts or "input" in self.parts

    @property
    def capture_outputs(self) -> bool:
        """Whether modules' outputs are taken."""
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
        if self.heal and self.graphs:
            raise ConfigError(f"{PREFIX}HEAL needs an eager engine: leave {PREFIX}GRAPHS=1 (--graphs) out")

    def to_json(self) -> dict[str, Any]:
        """All fields by name, as run.json keeps them; all modules are (), however that was said."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "heal" or self.heal} | {
            "modules": self.modules if self.modules_left else ()
        }

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
                raise ConfigError(f"{name} is not a setting of accprobe{nearest(name, known)}")
        base: dict[str, Any] = {}
        if environ.get(PREFIX + "CONFIG"):
            base = _from_toml(environ[PREFIX + "CONFIG"])
        if environ.get(PREFIX + "PRESET"):
            base = _preset(PREFIX + "PRESET", environ[PREFIX + "PRESET"]) | base
        for name, parse in _PARSERS.items():
            key = ENV if name == "enabled" else PREFIX + name.upper()
            if environ.get(key, "") != "":
                base[name] = _parsed(key, parse, environ[key])
        return cls(**base)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ProbeConfig:
        """The keyword form: ``from_kwargs(dir="out", tokens="0-4", modules=["layers"])``; enabled by default."""
        chosen = kwargs.pop("preset", None)
        values = {"enabled": True, **(_preset("preset", chosen) if chosen else {}), **kwargs}
        return cls(**{name: _parsed(name, _parser(name), value) for name, value in values.items()})

    def with_dir(self, path: str | Path) -> ProbeConfig:
        """The same settings with another dump directory."""
        return replace(self, dir=str(path))


_PARSERS: dict[str, Callable[[object], Any]] = {
    "enabled": read_flag,
    "dir": read_path,
    "task": read_choice(TASKS),
    "tokens": parse_ranges,
    "steps": parse_ranges,
    "ranks": parse_ranges,
    "modules": read_modules,
    "parts": read_parts,
    "requests": read_globs,
    "graphs": read_flag,
    "graph_mb": read_natural,
    "graph_full": read_choice(WHEN_FULL),
    "graph_taps": read_modules,
    "ops": read_flag,
    "max_gb": read_amount("gigabytes", "GB", 10**6),
    "ops_mode": read_choice(OPS_MODES),
    "ops_list": read_globs,
    "ops_calls": read_natural,
    "ops_max_mb": read_amount("megabytes", "MB", 10**9),
    "seed": read_natural,
    "errcheck": read_errcheck,
    "patches": read_names,
    "armed": read_flag,
    "force": on_or_path,
    "states": read_choice(STATES),
    "export": read_choice(EXPORTS),
    "weights": read_choice(WEIGHTS),
    "heal": read_modules,
}


def environment_names() -> tuple[str, ...]:
    """All environment names that belong to accprobe."""
    names = [ENV, PREFIX + "CONFIG", PREFIX + "PRESET", RUN_ID, REPLICAS, TAP_SET]
    names += [PREFIX + name.upper() for name in _PARSERS if name != "enabled"]
    return tuple(names)


def default_dir(now: datetime | None = None) -> str:
    """./accprobe/<UTC time>, the place of a dump whose user named none."""
    now = now or datetime.now(timezone.utc)
    return str(Path("accprobe") / now.strftime("%Y%m%dT%H%M%SZ"))


def _preset(key: str, value: object) -> dict[str, Any]:
    """A preset's settings, parsed. Raises ConfigError."""
    name = _parsed(key, read_choice(tuple(PRESETS)), value)
    return {field: _PARSERS[field](text) for field, text in PRESETS[name].items()}


def _parser(name: str) -> Callable[[object], Any]:
    try:
        return _PARSERS[name]
    except KeyError:
        raise ConfigError(f"{name!r} is not a setting of accprobe{nearest(name, tuple(_PARSERS))}") from None


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
    if isinstance(table.get("accprobe"), dict):  # a file shared with others; what is ours stands in our table
        for name in table:
            if name in _PARSERS:
                raise ConfigError(f"{key}={path}: {name} stands outside of the table [accprobe]: move it there")
        table = table["accprobe"]
    values: dict[str, Any] = {}
    if "preset" in table:
        values = _preset(f"{path}: preset", table.pop("preset"))
    for name, value in table.items():
        if name not in _PARSERS:
            raise ConfigError(f"{key}={path}: {name!r} is not a setting{nearest(name, tuple(_PARSERS))}")
        values[name] = _parsed(f"{path}: {name}", _PARSERS[name], value)
    return values


@dataclass(frozen=True)
class DumpConfig:
    """ait's and msit's spelling of a configuration: what register_hook() takes.

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
                raise ConfigError(f"mode={word}: known are module and api{nearest(str(word), ('module', 'api'))}")
        if self.api_list and "api" not in mode:
            raise ConfigError("api_list chooses operators, and mode is 'module': write mode=['module', 'api'] or 'api'")
        values: dict[str, Any] = {"modules": names, "parts": parts, "tokens": self.token_range or (0,)}
        # Without a path of its own: where `accprobe run` or the environment wants it.
        path = self.dump_path or os.environ.get(PREFIX + "DIR")
        if path:
            values["dir"] = path
        if "api" in mode:
            values |= {"ops": True, "ops_list": list(self.api_list or ())}
        return ProbeConfig.from_kwargs(**values)
