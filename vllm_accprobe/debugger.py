"""``PrecisionDebugger``: the name that users of torch_xray and msprobe have in their scripts, writing our dump.

The problem: torch_xray's guide pastes one into ``execute_model``, so that it is made anew in each step; msprobe's is
made once, from a config.json, and driven by start, stop and step; both are in other people's code. The idea: one class
with the arguments of both; making it again for the same dump_path gives the same object; a `Probe` on the model runs
between start and stop. Each argument becomes a field of ProbeConfig, a note in one line (no effect here), or a refusal
in one line; once it exists nothing raises, because it may live in a server. With ``online_run_ut`` a child process
sends the dump while it grows, and `close` waits for it.

Not here: capture (capture/torch_model.py), sending (online/sending.py), the settings' meaning (config.py);
docs/migration.md has the table.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.recording import free_directory
from vllm_accprobe.config import RUN_ID, ConfigError, ProbeConfig, default_dir, in_ranges, nearest, parse_ranges
from vllm_accprobe.dump.decode import fits

_TASKS = {"tensor": "tensor", "statistics": "stats", "stats": "stats"}
_INSTEAD = {
    "acc_check": "capture a dump and run `accprobe opcheck DUMP`",
    "nan_check": "run `accprobe errcheck -- CMD`",
    "overflow_check": "run `accprobe errcheck -- CMD`",
    "diff_check": "compare two dumps with `accprobe compare`",
    "structure": "every dump holds the module tree",
}
_KEYS = {"task", "level", "rank", "step", "dump_path"}
_LEVELS = {"L0": False, "L1": True, "mix": True}
"""msprobe's levels that exist here: whether operator calls are captured too."""
_NO_EFFECT = (
    "extra_info", "async_dump", "precision", "risk_level", "custom_op_namespaces", "dump_enable", "enable_dataloader",
    "is_regex", "seed", "is_deterministic",
)  # fmt: skip
_KEYS |= {*_NO_EFFECT, *_TASKS, *_INSTEAD}
_SENDS = "calls are sent where the tensor block has online_run_ut true; or run `accprobe opcheck DUMP` after it"
_LINE = ("online_run_ut", "nfs_path", "host", "port", "tls_path")
"""Where calls are sent (online/keys.py)."""
_IN_BLOCK = {
    "scope": "choose modules with list, or VLLM_ACCPROBE_MODULES",
    "tensor_list": "in a capture of statistics no tensor is kept; capture again with task tensor and these in list",
    "slice": "whole tensors are kept; `accprobe inspect DUMP TAP --rows` prints a part of one",
    "bench_path": "compare two dumps with `accprobe compare`",
    "file_format": "payloads are safetensors; `accprobe convert` writes other formats",
    "backward_input": "backward is not captured: serving has none",
    "stat_cal_mode": "statistics are taken where the tensor lies",
    "device": "statistics are taken where the tensor lies",
    **dict.fromkeys((*_LINE, "online_run_ut_recompute", "is_online", "rank_list"), _SENDS),
}  # fmt: skip
"""msprobe's keys of a task's block that do nothing here → what to do instead."""
_BLOCK = ("list", "data_mode", "summary_mode", "request_id")
_SIDES = ("all", "input", "output", "forward", "backward")
_MODES = ("statistics", "md5", "xor")
"""Of msprobe's statistics: every dump has statistics and hashes."""


@dataclass(frozen=True)
class Settings:
    """What the arguments come to. first: number of the first step; explicit: only ``step()`` ends a step; sends: the
    config.json that says where calls are sent, None where they are not."""

    probe: ProbeConfig
    steps: tuple[tuple[int, int], ...]
    first: int
    explicit: bool
    notes: tuple[str, ...]
    sends: Path | None = None


def read_settings(
    config_path: str | os.PathLike[str] | None = None,
    task: str | None = None,
    dump_path: str | os.PathLike[str] | None = None,
    level: str | None = None,
    model: Any = None,
    step: Any = None,
    *,
    rank: Any = None,
    hook_name: str | None = None,
    dump_torch_api: bool | None = None,
    **unknown: Any,
) -> Settings:
    """Raises ConfigError."""
    if unknown:
        raise ConfigError(
            f"PrecisionDebugger has no argument {sorted(unknown)[0]!r}; known are config_path, task, dump_path, level, "
            "model, step, rank, hook_name, dump_torch_api"
        )
    file: dict[str, Any] = {}
    if config_path is not None and not str(config_path).endswith(".json"):
        dump_path, config_path = dump_path or config_path, None
    if config_path is not None:
        file = _read(Path(config_path))
    if hook_name not in (None, "dump"):
        raise ConfigError(f"hook_name={hook_name}: only 'dump' exists here")
    of_msprobe = config_path is not None or task is not None or level is not None
    notes: list[str] = []
    values: dict[str, Any] = {"dir": _directory(dump_path or file.get("dump_path"))}
    kind = task or file.get("task")
    if kind and kind not in _TASKS:
        raise ConfigError(f"task={kind}: {_INSTEAD.get(str(kind), 'known are tensor and statistics')}")
    if kind:
        values["task"] = _TASKS[kind]
    block = str(kind or "tensor")
    sends = None if config_path is None else _sends(Path(config_path), block, file.get(block))
    depth = str(level or file.get("level") or ("L0" if sends is None else "L1"))  # msprobe's own defaults
    if depth not in _LEVELS:
        raise ConfigError(f"level={depth}: known are L0, L1 and mix; single tensors are labelled with set_label")
    if dump_torch_api or _LEVELS[depth]:
        values["ops"] = True
    if (hook_name is not None or dump_torch_api is not None) and not of_msprobe:
        values["export"] = os.environ.get("VLLM_ACCPROBE_EXPORT") or "h5"  # what torch_xray leaves
    ranks = _numbers("rank", rank if rank is not None else file.get("rank"))
    if ranks:
        values["ranks"] = ranks
    steps = _numbers("step", step if step is not None else file.get("step"))
    _of_task(block, file.get(block), values, notes, sends is not None)
    ignored = sorted(key for key in file if key in _NO_EFFECT)
    other_keys = sorted(key for key in file if key not in _KEYS)
    notes += [f"{', '.join(ignored)} of the config file: no effect here"] if ignored else []
    notes += [f"{key} of the config file is not known here{nearest(key, tuple(_KEYS))}: ignored" for key in other_keys]
    probe = ProbeConfig.from_kwargs(**values)
    # What the script leaves open is the environment's, where it has the probe on (`accprobe run -- python script.py`).
    # Inside vLLM those settings are the plugin's: its globs name modules of the whole model, not of the one given here.
    base = ProbeConfig.from_env()
    ours = base.enabled and not os.environ.get(RUN_ID)
    config = replace(base, **{name: getattr(probe, name) for name in values}) if ours else probe
    return Settings(config, steps, 0 if of_msprobe else 1, of_msprobe, tuple(notes), sends)


def _sends(path: Path, name: str, block: Any) -> Path | None:
    """``path`` where its block ``name`` says that calls are sent. Raises ConfigError where it does not say where to."""
    if name != "tensor" or not isinstance(block, Mapping) or block.get("online_run_ut") is not True:
        return None
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.online.keys import SENDS, read_keys

    try:
        read_keys(path, SENDS)
    except DumpError as why:
        raise ConfigError(f"config_path={why}") from None
    return path.absolute()


def _directory(named: Any) -> str:
    """Absolute: it is what tells one debugger from another."""
    if named:
        return os.path.abspath(os.path.expanduser(str(named)))
    return os.path.abspath(os.environ.get("VLLM_ACCPROBE_DIR", "") or _default())


def _default() -> str:
    """One default directory per process: a debugger that is made in every step must find itself again."""
    if not _defaults:
        _defaults.append(os.path.abspath(default_dir()))
    return _defaults[0]


_defaults: list[str] = []


def _numbers(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    try:
        return parse_ranges([] if value is None else value if isinstance(value, (list, tuple)) else [value])
    except ValueError as error:
        raise ConfigError(f"{name}={value}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as f:
            table = json.loads(f.read(1 << 20))
    except OSError as error:
        raise ConfigError(f"config_path={path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"config_path={path}: not a JSON file; it should be msprobe's config.json") from None
    if not isinstance(table, dict):
        raise ConfigError(f"config_path={path}: not a JSON object; it should be msprobe's config.json")
    return table


def _of_task(name: str, block: Any, values: dict[str, Any], notes: list[str], sends: bool) -> None:
    """msprobe's settings of one task: which modules, which side of them, whose requests. sends: what says where to has
    an effect. Raises ConfigError for a value of these that cannot be; whatever else stands there is one note each."""
    if block is None:
        return
    if not isinstance(block, Mapping):
        what = f"{name} of the config file is {str(block)[:40]!r}"
        raise ConfigError(f"{what}, not a JSON object with list and data_mode")
    wanted = _texts(f"{name}.list", block.get("list"))
    if wanted:
        values["modules"] = [_module(word) for word in wanted]
    requests = _texts(f"{name}.request_id", block.get("request_id"))
    if requests:
        values["requests"] = requests
    modes = _texts(f"{name}.data_mode", block.get("data_mode")) or ["all"]
    for mode in modes:
        if mode not in _SIDES:
            raise ConfigError(f"{name}.data_mode={mode}: known are {', '.join(_SIDES)}{nearest(mode, _SIDES)}")
    if "backward" in modes:
        notes.append("backward is not captured: serving has none")
    sides = [mode for mode in ("input", "output") if mode in modes]
    if sides and "all" not in modes:
        values["parts"] = sides
    if block.get("summary_mode", "statistics") not in _MODES:
        statistics = "every dump has min, max, mean, l2 norm and hashes"
        notes.append(f"summary_mode of the config file's {name} block is ignored: {statistics}")
    for key, value in block.items():
        if key in _BLOCK or (sends and key in _LINE):
            continue
        if key in _IN_BLOCK and value in (None, [], {}, "", False):  # a template's empty places
            continue
        known = _IN_BLOCK.get(str(key))
        about = f"{str(key)[:40]} of the config file's {name} block"
        if known is None:
            notes.append(f"{about} is not known here{nearest(str(key), (*_BLOCK, *_IN_BLOCK))}: ignored")
        else:
            notes.append(f"{about} is ignored: {known}")


def _texts(name: str, value: Any) -> list[str]:
    """A text, or a list of texts; [] of nothing. Raises ConfigError."""
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not fits(list[str], found):
        raise ConfigError(f"{name}={str(value)[:60]}: a list of names is expected")
    return [v for v in found if v]


def _module(name: str) -> str:
    """``Module.model.layers.0.mlp.Qwen2MLP.forward.0`` is the module's path, anything else a part of one."""
    if name.startswith("name-regex("):
        raise ConfigError(f"list: {name[:60]}: no regular expressions here; give a part of the name, or a glob")
    words = name.split(".")
    if words[0] in ("Module", "Cell") and len(words) > 3 and words[-2] in ("forward", "backward"):
        return ".".join(words[1:-3])
    return f"*{name}*"


_open: dict[str, PrecisionDebugger] = {}  # by dump path: torch_xray's guide makes one in every step


class PrecisionDebugger:
    """Captures a model between ``start`` and ``stop``.

    Args:
        config_path: msprobe's config.json; a path that does not end in ``.json`` is taken for dump_path.
        task: "tensor" or "statistics". level: "L0" modules; "L1" and "mix" operator calls too.
        dump_path: directory; by default VLLM_ACCPROBE_DIR or ./accprobe/<UTC time>.
        step: numbers of the steps to capture, all by default. msprobe counts the calls of ``step()`` from 0;
            torch_xray, which has none, the model's forwards from 1. A script that passes ``hook_name``,
            ``dump_torch_api`` or a model here, and nothing of msprobe's, is torch_xray's.
        rank: ranks to capture. model: an nn.Module; msprobe gives it to ``start``.
        hook_name: "dump". dump_torch_api: operator calls too.

    Raises:
        ConfigError: an argument has a value that is not known here; one line.
    """

    _model: Any
    _made = False

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        known = _open.get(read_settings(*args, **kwargs).probe.dir)
        return known if known is not None else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        model = kwargs.get("model", args[4] if len(args) > 4 else None)
        if self._made:
            if model is not None and self._model is not None and model is not self._model:
                self._note("another model for the same dump_path is ignored: name another dump_path for it")
            self._model = self._model if self._model is not None else model
            return
        self._made = True
        self._running = False
        self._settings: Settings = read_settings(*args, **kwargs)
        self._model = model
        self._printed: set[str] = set()
        self._probe: Any = None
        self._sender: Any = None
        self._step = self._settings.first
        self._over = False
        _open[self._settings.probe.dir] = self
        for note in self._settings.notes:
            self._note(note)
        # vLLM ends its workers past atexit, which the Probe itself uses.
        mp_util.Finalize(None, self.close, exitpriority=100)

    @property
    def dump(self) -> Path | None:
        """The dump's directory, once capture has begun."""
        return None if self._probe is None else self._probe.root

    def start(self, model: Any = None, **ignored: Any) -> None:
        """Captures the model's calls from now on. msprobe's further arguments (token_range ...) have no effect."""
        if ignored:
            self._note(f"start() ignores {', '.join(sorted(ignored))}: tokens are chosen by VLLM_ACCPROBE_TOKENS")
        model = model if model is not None else self._model
        if isinstance(model, (list, tuple)):
            if len(model) > 1:
                self._note("of several models only the first is captured")
            model = model[0] if model else None
        if self._over:
            return
        if model is None:
            self._note("start() without a model: NOTHING is captured; pass model=, an nn.Module")
            return
        try:
            if self._probe is None:
                self._attach(model)
            self._running = True
            if self._probe is not None:
                self._probe.paused = not self._wanted()
        except ConfigError as error:
            self._give_up(str(error))
        except Exception as error:
            self._give_up(f"PrecisionDebugger could not start ({type(error).__name__}: {error})")

    def stop(self) -> None:
        """Captures nothing until the next ``start``."""
        self._running = False
        if self._probe is not None:
            self._probe.paused = True

    def step(self) -> None:
        """Ends a step."""
        if not self._settings.explicit and self._probe is not None:
            # torch_xray's spelling counts forwards until somebody counts himself.
            self._settings = replace(self._settings, explicit=True)
            self._step -= int(self._step > self._settings.first)  # the forward before this was counted already
        self._step += 1
        self._advance()

    def close(self) -> None:
        """Closes the dump; otherwise this happens after the last chosen step, or when the process ends. Made again, a
        debugger for the same dump_path is then a new one. Waits until the dump is sent, where it is."""
        if _open.get(self._settings.probe.dir) is self:
            del _open[self._settings.probe.dir]
        self._finish()
        sender, self._sender = self._sender, None
        if sender is not None and sender.wait():
            self._note("the dump was not sent to its end; `accprobe online send DUMP --config FILE` sends the rest")

    def _finish(self) -> None:
        probe, self._probe = self._probe, None
        self._over = True
        if probe is not None:
            probe.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _attach(self, model: Any) -> None:
        from vllm_accprobe.capture.core.recording import process_rank
        from vllm_accprobe.capture.torch_model import Probe

        config = self._settings.probe
        rank, _ = process_rank()
        if not in_ranges(config.ranks, rank):
            self._over = True
            return
        place = free_directory(Path(os.path.abspath(config.dir)), rank, "this dump goes")
        self._probe = Probe(model, config.with_dir(place))
        self._probe.next_step = self._step
        inner = model.__dict__["forward"]

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            finally:
                try:
                    self._after_forward()
                except Exception as error:
                    self._give_up(f"PrecisionDebugger could not end a step ({type(error).__name__}: {error})")

        # Outside the Probe's own wrapper, and taken off with it: a step is over when the model has returned.
        forward.__wrapped__ = inner  # type: ignore[attr-defined]
        model.__dict__["forward"] = forward
        say(f"PrecisionDebugger: the dump goes to {place}")
        if self._settings.sends is not None:
            from vllm_accprobe.children import Child

            words = ["online", "send", str(place), "--follow", "--ranks", str(rank)]
            self._sender = Child("vllm_accprobe.cli", *words, "--config", str(self._settings.sends),
                                 stdin=subprocess.DEVNULL, stdout=2)  # fmt: skip

    def _after_forward(self) -> None:
        probe = self._probe
        if probe is not None and self._running and not self._settings.explicit:
            self._step += 1
            self._advance()

    def _wanted(self) -> bool:
        return in_ranges(self._settings.steps, self._step)

    def _advance(self) -> None:
        probe = self._probe
        if probe is None:
            return
        probe.next_step = self._step
        if self._settings.steps and self._step > self._settings.steps[-1][1]:
            self._finish()
        elif not self._settings.explicit:
            probe.paused = not self._wanted()
        elif not self._wanted():
            probe.paused = True

    def _note(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            say(f"PrecisionDebugger: {line}")

    def _give_up(self, line: str) -> None:
        self._over = True
        self._note(f"{line}: NOTHING is captured")
