"""The Python processes that we start: none runs what lies in the current directory, none outlives who started it.

The problem: ``python -c`` and ``python -m`` search for modules in the current directory first, which may be a
stranger's dump with a ``numpy.py`` in it; and a process whose parent was killed goes on. The idea: a `Child` begins
with a line that removes the current directory from its path, and takes this package from where its parent had it. It
holds the reading end of a pipe whose other end only its parent has: however the parent dies, the kernel closes that
end, and on Linux kills the child at once (``F_SETSIG``, fcntl(2)), which native code that never releases the
interpreter's lock cannot prevent; elsewhere a thread waits for the pipe's end. What stands in PYTHONPATH stays.

Not here: the commands that `accprobe run` starts (run/launcher.py), Ray's workers (comparison/distributed.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

HOME = Path(__file__).resolve().parent
"""This package. A child takes the same, whatever else is installed, and however this process found it."""
_PROGRAM = (
    # "" is the current directory; nothing is imported before it has gone
    "import sys; sys.path[:] = [p for p in sys.path if p]\n"
    "from importlib.util import module_from_spec, spec_from_file_location\n"
    "name, home = 'vllm_accprobe', sys.argv[1]\n"
    "spec = spec_from_file_location(name, home + '/__init__.py', submodule_search_locations=[home])\n"
    "sys.modules[name] = module_from_spec(spec)\n"
    "spec.loader.exec_module(sys.modules[name])\n"
    "from vllm_accprobe.children import main; main()"
)
_LIBRARIES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "NUMBA", "VECLIB", "BLIS")
ONE_THREAD = {f"{name}_{'MAXIMUM' if name == 'VECLIB' else 'NUM'}_THREADS": "1" for name in _LIBRARIES}
"""Environment of a process that is one of several, or whose products are small: torch, OpenMP, MKL, OpenBLAS and numba
otherwise start a thread for each core, which wait for one another in a loop."""

BLOCKS_REUSED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
"""glibc's settings (mallopt(3)) of a process that works through blocks of megabytes: what it frees it uses again.
Otherwise each block is returned to the kernel, which clears it anew at its first use: measured, a third of the time
of a replay of large calls. 512 MiB stay at most (chosen)."""


class Child(subprocess.Popen[str]):
    """A Python process that calls ``main()`` of one of our modules, which finds ``words`` in sys.argv[1:].

    It ends with this process, or when this object has gone. env: all of it, this process's by default; how: as for
    Popen, text in UTF-8. Raises OSError."""

    def __init__(self, module: str, *words: str, env: Mapping[str, str] | None = None, **how: Any):
        theirs, self._ours = os.pipe()
        command = [sys.executable, "-c", _PROGRAM, str(HOME), str(theirs), module, *words]
        # What this process starts in turn, a library's helpers too, is to keep the current directory off its path.
        environ = {**(os.environ if env is None else env), "PYTHONSAFEPATH": "1"}
        try:
            super().__init__(
                command, env=environ, pass_fds=(theirs,), text=True, encoding="utf-8", errors="backslashreplace", **how
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(theirs)

    def tell(self, line: str) -> None:
        """A line to its stdin, which is a pipe. Where it has died, `heard` is None."""
        assert self.stdin is not None
        with contextlib.suppress(OSError):
            self.stdin.write(line + "\n")
            self.stdin.flush()

    def heard(self) -> dict[str, Any] | None:
        """The next line of its stdout, which is a pipe: a JSON object. None when it is gone."""
        assert self.stdout is not None
        line = self.stdout.readline()
        return dict(json.loads(line)) if line.endswith("\n") else None

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _let_go(self) -> None:
        ours, self._ours = self._ours, -1
        if ours >= 0:
            os.close(ours)

    def __del__(self, *args: Any) -> None:
        if getattr(self, "_ours", -1) >= 0:
            self._let_go()
        super().__del__(*args)  # type: ignore[misc]  # typeshed does not know it


def own_stdout() -> TextIO:
    """A child's stdout for lines to its parent; what a library or a kernel prints goes to stderr from now on."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def how_it_ended(process: subprocess.Popen[Any]) -> str:
    """The end of a sentence: "was killed by SIGKILL (out of memory?)". Waits for it to end."""
    code = process.wait()
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def main() -> None:
    """What a child does first. sys.argv: HOME, the pipe's number, the module, its words."""
    pipe, module, words = int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    end_with(pipe)
    # Ctrl-C on a terminal reaches the whole group: the parent answers it, and ends this one. No SIG_IGN, which what is
    # started here would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    ignore_settings_here()
    sys.argv[:] = [module, *words]
    sys.exit(importlib.import_module(module).main())


def end_with(pipe: int) -> None:
    """Ends this process when the other end of ``pipe`` is closed, now or later."""
    import select
    import threading

    os.set_inheritable(pipe, False)
    try:
        _killed_by_kernel(pipe)
    except (ImportError, AttributeError, OSError):  # not Linux, or a sandbox that has no such thing
        pass

    def wait() -> None:
        while True:
            try:
                if os.read(pipe, 1) == b"":
                    os._exit(1)
            except InterruptedError:
                continue

    if select.select([pipe], [], [], 0)[0]:  # it had died before anybody knew
        os._exit(1)
    threading.Thread(target=wait, name="accprobe-parent", daemon=True).start()


def _killed_by_kernel(pipe: int) -> None:
    import fcntl

    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def ignore_settings_here() -> None:
    """Keeps numba from taking settings from the current directory's ``.numba_config.yaml``, which may name a cache of
    pickles: those would be run."""
    if not os.path.isfile(".numba_config.yaml"):
        return
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(HOME)
        config: Any = importlib.import_module("numba.core.config")
        config._config_fname = ""  # it searches again whenever it compiles
    except ImportError:
        pass
    finally:
        os.fchdir(here)
        os.close(here)
