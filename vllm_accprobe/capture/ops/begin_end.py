"""``begin_dump`` and ``end_dump``: operator calls of any code between two lines, without a model.

The problem: somebody wants to see what one function does, in a script or in the middle of a server's forward, where it
runs again and again (torch_xray's guide pastes the two calls into a model's ``forward``, and sets X_DEBUG, X_DEDUP and
X_DUMP_NUM as arguments or in the environment). The idea: each stretch from begin to end is a step of one dump, which
stays open until ``end_dump(close=True)`` or the process ends; begun again with the same path, it continues. The
operator tap is the one of served models; names of modules come from ``model``. torch_xray's variables are read where
they are not arguments; a server with the probe on, where our own names hold, prints the new name in one line.

Not here: what a mode means and what is captured of a call (dispatch.py).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, at_exit, process_rank, root_of, run_facts
from vllm_accprobe.capture.ops.dispatch import Operators
from vllm_accprobe.capture.ops.op_tensors import Memory
from vllm_accprobe.capture.taps.params import named_tensors
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.schema import ROOT_TAP, Step

NAMES = ("X_DEBUG", "X_DEDUP", "X_DUMP_NUM")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def torch_xray_settings(environ: Mapping[str, str]) -> dict[str, int | bool]:
    """The arguments of ``begin_dump`` that the environment sets; empty ones are unset. Raises ConfigError."""
    found: dict[str, int | bool] = {}
    for name in NAMES:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if name == "X_DEDUP":
            if text.lower() not in _YES + _NO:
                raise ConfigError(f"{name}={text[:40]} is neither True nor False")
            found[name] = text.lower() in _YES
            continue
        try:
            found[name] = int(text, 0)
        except ValueError:
            raise ConfigError(f"{name}={text[:40]} is no number; 0x102 and 5 are") from None
    return found


def advice(environ: Mapping[str, str]) -> str:
    """What stands for them where a server captures; "" where none is set."""
    try:
        found = torch_xray_settings(environ)
    except ConfigError as error:
        return f"{error}; it is torch_xray's, and has no effect here"
    if not found:
        return ""
    number = int(found.get("X_DUMP_NUM", 0))
    mode = "dedup" if found.get("X_DEDUP") else "sample" if number else "trace"
    calls = f" VLLM_ACCPROBE_OPS_CALLS={number}" if number or mode == "dedup" else ""
    names = ", ".join(found)
    ours = f"VLLM_ACCPROBE_OPS=1 VLLM_ACCPROBE_OPS_MODE={mode}{calls}"
    return f"{names}: torch_xray's, without effect here; {ours} says the same"


_TRACE = 0x102
"""torch_xray's X_DEBUG: operators' names, shapes, dtypes and ranges."""
_open: dict[str, OpDump] = {}  # by path: the code between begin and end runs again and again
_lock = threading.Lock()


def begin_dump(
    path: str | os.PathLike[str] | None = None,
    *,
    model: torch.nn.Module | None = None,
    X_DEBUG: int | None = None,
    X_DEDUP: bool | None = None,
    X_DUMP_NUM: int | None = None,
    **settings: Any,
) -> OpDump:
    """Captures the operators that this thread calls until ``end_dump``, as a step of the dump at ``path``.

    Args:
        path: directory; by default VLLM_ACCPROBE_DIR or ./accprobe/<UTC time>. A path that has the dump of an earlier
            run gets a number: ``path.2``.
        model: names the modules that call the operators, and parameters.
        X_DEBUG, X_DEDUP, X_DUMP_NUM: torch_xray's spellings, read from the environment where none of ours and not the
            same are given. X_DEBUG=0x102 is the only one there is; X_DUMP_NUM=n keeps
            the tensors of n random calls of each operator, 0 of none; X_DEDUP=True leaves out calls whose shapes and
            dtypes were there before.
        settings: ``mode``, ``calls``, ``ops`` (globs), ``seed``, ``max_mb``, ``max_gb``: the values of
            VLLM_ACCPROBE_OPS_MODE, _OPS_CALLS, _OPS_LIST, _SEED, _OPS_MAX_MB and _MAX_GB. They hold from the first
            ``begin_dump`` of a path on.

    Raises:
        ConfigError: a setting is wrong or the directory cannot be written. Later nothing is raised.
    """
    words = {"X_DEBUG": X_DEBUG, "X_DEDUP": X_DEDUP, "X_DUMP_NUM": X_DUMP_NUM}
    if settings.get("mode") is None and settings.get("calls") is None:
        words = {**words, **{k: v for k, v in torch_xray_settings(os.environ).items() if words[k] is None}}
    config = _config(path, words["X_DEBUG"], words["X_DEDUP"], words["X_DUMP_NUM"], settings)  # type: ignore[arg-type]
    key = os.path.abspath(config.dir) if config.dir else ""
    with _lock:
        dump = _open.get(key)
        if dump is None:
            dump = _open[key] = OpDump(config, key, model)
    dump.begin()
    return dump


def end_dump(*, close: bool = False, clear_context: bool = False) -> Path | None:
    """Ends what this thread began last; the dump's directory, or None if nothing was begun.

    close: finishes the dump. clear_context (torch_xray's): random samples and counts of equal calls begin anew.
    """
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, _Stretch):
        say("end_dump() without a begin_dump() before it in this thread: nothing is ended")
        return None
    mode.dump.end(mode)
    if clear_context:
        mode.forget_calls()
    if close:
        mode.dump.close()
    return mode.dump.path


class _Stretch(Operators):
    """The operator tap of a dump, found again by ``end_dump`` as the innermost mode of its thread."""

    dump: OpDump


class OpDump:
    """A dump of operator calls. Also a context manager: ``with begin_dump("out"): ...``."""

    def __init__(self, config: ProbeConfig, key: str, model: torch.nn.Module | None):
        self._key = key
        self._model = model
        self._thread: int | None = None
        self._step = 0
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []
        self._closed = False
        rank, world = process_rank()
        device = getattr(torch, "accelerator", None)
        found = device.current_accelerator() if device is not None and device.is_available() else None
        found = found or torch.device("cpu")
        run = run_facts(
            config.to_json(),
            device={"type": found.type},
            model={"class": type(model).__name__ if model is not None else ""},
            parallel={"world_size": world},
            engine={"runner": "accprobe.begin_dump", "eager": True, "argv": sys.argv[:1]},
        )
        self._recording = Recording(
            config, root_of(config), run, Layouts({}, 0, 1), lambda *_: None,
            rank=rank, parallel={"world_size": world}, device=found, contents="these operators go", setting="",
            announced=True,
        )  # fmt: skip
        self.path = self._recording.root
        self._session = self._recording.session
        memory = Memory(self._parameters)
        self._session.ops = self._mode = _Stretch(self._session, memory)
        self._mode.dump = self
        if model is not None:
            self._names = {id(module): path or ROOT_TAP for path, module in model.named_modules()}
        at_exit(self.close, "process exit", priority=90)

    def __enter__(self) -> OpDump:
        return self

    def __exit__(self, *exc: object) -> None:
        end_dump()

    def begin(self) -> None:
        """A new step. Never raises."""
        session = self._session
        if session.dead is not None or self._closed:
            return
        if self._thread is not None:
            say(f"begin_dump() again before end_dump() for {self.path}: the step that is running goes on")
            return
        try:
            self._thread = threading.get_ident()
            session.begin(Step(self._step, {}, time.time()), [], self._step == 0)
            self._step += 1
            self._watch_modules()
            self._mode.__enter__()
        except Exception as error:
            session.fail("begin_dump", error)

    def end(self, mode: _Stretch) -> None:
        """Ends the step; called in the thread that began it, whose innermost mode ``mode`` is."""
        mode.__exit__(None, None, None)
        self._session.end()
        self._thread = None
        while self._hooks:
            self._hooks.pop().remove()

    def close(self, reason: str = "closed") -> None:
        """Finishes the dump. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with _lock:
            if _open.get(self._key) is self:
                del _open[self._key]
        self._recording.close(reason)
        say(f"{self._step} steps, {self._mode.calls} operator calls in {self.path}")

    def _watch_modules(self) -> None:
        """Keeps the session's stack of running modules, by the hooks of the model's modules."""
        state = self._session.state
        if state is None or self._model is None:
            return

        def entered(module: torch.nn.Module, args: Any) -> None:
            name = self._names.get(id(module), "")
            state.calls[name] = state.calls.get(name, 0) + 1
            state.stack.append(name)

        def left(module: torch.nn.Module, args: Any, result: Any) -> None:
            if state.stack:
                state.stack.pop()

        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(entered))
            self._hooks.append(module.register_forward_hook(left, always_call=True))

    def _parameters(self) -> list[tuple[str, str, torch.Tensor]]:
        if self._model is None:
            return []
        return [(path, name, tensor) for path, _, name, tensor in named_tensors(self._model)]


def _config(
    path: Any, debug: int | None, dedup: bool | None, number: int | None, settings: dict[str, Any]
) -> ProbeConfig:
    """The settings, from our words or torch_xray's."""
    names = {"mode": "ops_mode", "calls": "ops_calls", "ops": "ops_list", "max_mb": "ops_max_mb", "seed": "seed",
             "max_gb": "max_gb"}  # fmt: skip
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise ConfigError(f"begin_dump: {unknown[0]!r} is not one of its settings: {', '.join(names)}")
    values = {names[name]: value for name, value in settings.items() if value is not None}
    if debug is not None and debug != _TRACE:
        raise ConfigError(f"begin_dump: X_DEBUG={debug:#x} is not known here; 0x102 traces operators")
    if (debug, dedup, number) != (None, None, None):
        if "ops_mode" in values or "ops_calls" in values:
            raise ConfigError(
                "begin_dump: X_DEBUG, X_DEDUP and X_DUMP_NUM stand for mode and calls: name only one kind"
            )
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise ConfigError(f"begin_dump: X_DUMP_NUM={number!r} is not a number of calls")
        values["ops_mode"] = "dedup" if dedup else ("sample" if number else "trace")
        if dedup or number:
            values["ops_calls"] = number or 0
    directory = os.fspath(path) if path is not None else os.environ.get("VLLM_ACCPROBE_DIR", "")
    if directory:
        values["dir"] = directory
    return ProbeConfig.from_kwargs(ops=True, **values)
