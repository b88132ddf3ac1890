"""What the probe shall capture: one frozen dataclass with three spellings.

The problem: the same settings come as environment variables (a served model), as a TOML file (a long list of modules)
and as keyword arguments (a script). The idea: ProbeConfig is the only form that the rest of the house knows; each
spelling is parsed field by field by the same functions, and every mistake is one line that names the setting and the
nearest valid one. Precedence: environment over file over preset over default.
Not here: what the settings do (capture/), how a value is spelt (config_values.py), ait's spelling (dump_config.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_accprobe import config_values as words
from vllm_accprobe.config_values import Ranges, in_ranges, matches, parse_ranges

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
    errcheck: of overflow, nan, exit: what is looked for in every step, with the probe off, too, and whether the engine
    is then stopped. patches: names or files of patches (docs/capture.md), or ``all``.
    force: ``1``: requests may name the tokens that they are answered with, with the probe off, too (docs/gate.md); a
    directory: its engine steps are written there as well.
    states: ``events``, ``sample`` or ``full``: a ledger of states, with the probe off, too (docs/state-checks.md);
    ``off``: not even the one of owners, which a capture has.
    export: ``h5``: torch_xray's files are written beside the dump when it is closed (export_at_end.py).
    weights: ``full``; ``prints``: fingerprints alone; or ``off``: nothing of the weights' life (docs/state-checks.md).
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

    @property
    def ledger(self) -> str:
        """Which ledger of states is kept, "" for none; a capture has one of owners alone."""
        if self.states == "off":
            return ""
        return self.states or ("owners" if self.enabled else "")

    @property
    def force_dir(self) -> str:
        """Where engine steps are written, "" for nowhere."""
        return "" if self.force == words.ON else self.force

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

    def to_json(self) -> dict[str, Any]:
        """All fields by name, as run.json keeps them; all modules are (), however that was said."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
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
                raise ConfigError(f"{name} is not a setting of accprobe{words.nearest(name, known)}")
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
    "enabled": words.flag,
    "dir": words.path,
    "task": words.choice(words.TASKS),
    "tokens": parse_ranges,
    "steps": parse_ranges,
    "ranks": parse_ranges,
    "modules": words.modules,
    "parts": words.parts,
    "requests": words.globs,
    "graphs": words.flag,
    "graph_mb": words.natural,
    "graph_full": words.choice(words.WHEN_FULL),
    "graph_taps": words.modules,
    "ops": words.flag,
    "max_gb": words.amount("gigabytes", "GB", 10**6),
    "ops_mode": words.choice(words.OPS_MODES),
    "ops_list": words.globs,
    "ops_calls": words.natural,
    "ops_max_mb": words.amount("megabytes", "MB", 10**9),
    "seed": words.natural,
    "errcheck": words.errcheck,
    "patches": words.names,
    "armed": words.flag,
    "force": words.on_or_path,
    "states": words.choice(words.STATES),
    "export": words.choice(words.EXPORTS),
    "weights": words.choice(words.WEIGHTS),
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
    name = _parsed(key, words.choice(tuple(words.PRESETS)), value)
    return {field: _PARSERS[field](said) for field, said in words.PRESETS[name].items()}


def _parser(name: str) -> Callable[[object], Any]:
    try:
        return _PARSERS[name]
    except KeyError:
        raise ConfigError(f"{name!r} is not a setting of accprobe{words.nearest(name, tuple(_PARSERS))}") from None


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
            raise ConfigError(f"{key}={path}: {name!r} is not a setting{words.nearest(name, tuple(_PARSERS))}")
        values[name] = _parsed(f"{path}: {name}", _PARSERS[name], value)
    return values
