"""``PrecisionDebugger``: the name that users of torch_xray and msprobe have in their scripts, writing our dump.

The problem: torch_xray's guide pastes a PrecisionDebugger into ``execute_model``, so that it is made anew in each step;
msprobe's is made once, from a config.json, and driven by start, stop and step. Both count steps, differently, and both
are in other people's code. The idea: one class with the arguments of both; making it again for the same dump_path gives
the same object; behind it is a `Probe` on the model, which runs between start and stop. Arguments that say what we do
not capture are refused or noted, each in one line; once it exists nothing raises, because it may live in a server.
Not here: capture (capture/torch_model/probe.py), the settings' meaning (config.py); docs/migration.md has the table.
"""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

from vllm_accprobe.capture.core.dump_dir import free_directory
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.config import ConfigError, in_ranges
from vllm_accprobe.debugger_settings import Settings, read_settings

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
        self._said: set[str] = set()
        self._probe: Any = None
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
        debugger for the same dump_path is then a new one."""
        if _open.get(self._settings.probe.dir) is self:
            del _open[self._settings.probe.dir]
        self._finish()

    def _finish(self) -> None:
        probe, self._probe = self._probe, None
        self._over = True
        if probe is not None:
            probe.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _attach(self, model: Any) -> None:
        from vllm_accprobe.capture.core.recording import process_rank
        from vllm_accprobe.capture.torch_model.probe import Probe

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

        # Around the Probe's own wrapper, and taken off with it: a step is over when the model has returned.
        forward.__wrapped__ = inner  # type: ignore[attr-defined]
        model.__dict__["forward"] = forward
        say(f"PrecisionDebugger: the dump goes to {place}")

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
        if line not in self._said:
            self._said.add(line)
            say(f"PrecisionDebugger: {line}")

    def _give_up(self, line: str) -> None:
        self._over = True
        self._note(f"{line}: NOTHING is captured")
