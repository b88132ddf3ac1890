"""Children of opcheck, of the replay and of the online check, forked from a process that has imported torch.

The problem: each of some hundred that the tests' own process starts imports torch and all references again, 3 s of a
processor. The idea: one process imports them; given an environment and open files it forks twice, and the kernel gives
the orphan to the tests' process, a subreaper then (prctl(2)). So the child is one as ever: its number, signals, pipes,
limits, and how it ends. `Command` is one of our commands, forked too, and so are its children. What differs: its
memory, its hashes of strings, what /proc says of its words and environment, and what a library reads of that when it
is imported; a test of these starts its process `anew`. Not here: a command started as a shell does, which imports what
it needs; each kind has a test of that. On Linux alone: elsewhere nothing is forked.
"""

import atexit
import ctypes
import importlib
import inspect
import json
import os
import pkgutil
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_accprobe.children import BLOCKS_REUSED, ONE_THREAD, Child, how_it_ended, main as first_of_a_child

COMMAND = "support.forked_command"
MODULES = ("vllm_accprobe.opcheck.run.process_pool", "vllm_accprobe.opcheck.proof.replay_child",
           "vllm_accprobe.online.live", COMMAND)  # fmt: skip
POSSIBLE = sys.platform == "linux"
PATIENCE_S = 300.0
"""For the next child; the first waits for all imports, on a machine that does other things."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h."""
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_PYTHON = sys.executable
_START = Child._execute_child  # type: ignore[attr-defined]


class Forking:
    """The process that forks; it is started when it is first needed, and ends with this one."""

    def __init__(self, here: socket.socket | None = None, modules: tuple[str, ...] = ()) -> None:
        self._modules = modules  # what it imports; () is all
        self.of = os.getpid()
        """Whose children are forked: what this process forks starts its own as ever."""
        self._here = here
        self._process: Child | None = None
        self._lock = threading.Lock()

    def start(self, argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int]) -> int:
        """The number of a new child of this process. fds: a file's number in the child → here."""
        with self._lock:  # opcheck's threads start processes
            here = self._here = self._here or self._begun()
            here.settimeout(PATIENCE_S)
            request = {"argv": argv, "env": env, "cwd": cwd, "fds": [*fds], "parent": os.getpid()}
            _becomes_parent(True)
            try:
                socket.send_fds(here, [b"{"], [*fds.values()])
                here.sendall(json.dumps(request)[1:].encode() + b"\n")
                return int(_line(here))
            except (OSError, EOFError) as e:
                how = how_it_ended(self._process) if isinstance(e, EOFError) and self._process else repr(e)
                self.close()  # an answer that comes late is no other child's; the next start begins anew
                raise RuntimeError(f"no child was forked for {argv[3:]}: the process that forks them: {how}") from e
            finally:
                _becomes_parent(False)

    def _begun(self) -> socket.socket:
        here, there = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        own = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "ACCPROBE_"))}
        own |= {**BLOCKS_REUSED, **ONE_THREAD, "PYTHONPATH": path}
        with there:
            self._process = Child("support.forked_children", *self._modules, env=own, stdin=there)
        return here

    def close(self) -> None:
        if self._here is not None:
            self._here.close()
        if self._process is not None:
            self._process.end()
        self._here = self._process = None


class Command(Child):
    """`accprobe` with ``words``; ``-c`` and a program: as ``python -c``."""

    def __init__(self, *words: str, **how: Any):
        super().__init__(COMMAND, *words, **how)


@contextmanager
def forked() -> Iterator[None]:
    """While it lasts, each `Child` of one of `MODULES` is forked."""
    forking = Forking()
    with mock.patch.object(Child, "_execute_child", _by(forking)) if POSSIBLE else nullcontext():
        try:
            yield
        finally:
            forking.close()


def _by(forking: Forking) -> Any:
    arguments = inspect.signature(_START)

    def start(self: Any, *given: Any, **named: Any) -> None:
        how = arguments.bind(self, *given, **named).arguments
        ours = how["args"][5] in MODULES and how["args"][0] == _PYTHON and forking.of == os.getpid()
        if not ours or how["preexec_fn"] or how["start_new_session"]:
            _START(self, *given, **named)
            return
        pipes = enumerate((how["p2cread"], how["c2pwrite"], how["errwrite"]))
        fds = {n: n if fd == -1 else fd for n, fd in pipes} | {fd: fd for fd in how["pass_fds"]}
        cwd = os.path.abspath(how["cwd"] or ".")
        self.pid = forking.start(["-c", *how["args"][3:]], dict(how["env"]), cwd, fds)
        self._child_created = True
        self._close_pipe_fds(*(how[k] for k in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))

    return start


@contextmanager
def anew() -> Iterator[None]:
    """While it lasts, no `Child` is forked."""
    with mock.patch.object(Child, "_execute_child", _START):
        yield


def main() -> None:
    """The process that forks: its stdin is a socket, a line and some files each time."""
    names = sys.argv[1:]
    if not names:
        from vllm_accprobe.opcheck import references

        found = pkgutil.walk_packages(references.__path__, f"{references.__name__}.")
        names = [*MODULES, *(module.name for module in found)]
    for name in names:
        importlib.import_module(name)
    _fork_for(socket.socket(fileno=os.dup(0)))


def _fork_for(asker: socket.socket) -> None:
    while True:
        begin, fds, _, _ = socket.recv_fds(asker, 1, 16)
        if not begin:
            return
        request = json.loads(begin + _line(asker))
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _become(request, fds, asker)
            os._exit(0)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become(request: dict[str, Any], fds: list[int], asker: socket.socket) -> None:
    code = 1
    try:
        end = time.monotonic() + PATIENCE_S
        while os.getppid() != request["parent"]:
            assert time.monotonic() < end, "the process that requests a child is not its parent"
            time.sleep(0.0005)
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(request["parent"], limit))
        asker.sendall(b"%d\n" % os.getpid())
        out_of_the_way = [os.dup2(fd, 900 + n) for n, fd in enumerate(fds)]
        for number, fd in zip(request["fds"], out_of_the_way, strict=True):
            os.dup2(fd, number)
        for fd in {int(fd) for fd in os.listdir("/proc/self/fd")} - set(request["fds"]):
            with suppress(OSError):  # what listed them
                os.close(fd)
        os.chdir(request["cwd"])
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(request["env"])
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, added), *(p for p in sys.path if p not in before)]
        sys.argv[:] = request["argv"]
        if sys.argv[3] == COMMAND:
            here, there = socket.socketpair()
            if os.fork() == 0:
                here.close()
                _fork_for(there)
                os._exit(0)
            there.close()
            Child._execute_child = _by(Forking(here))  # type: ignore[attr-defined]
        first_of_a_child()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):  # as Python ends a process
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 120
        os._exit(code)


def _becomes_parent(on: bool) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0)


def _line(of: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if not (got := of.recv(1 << 16)):
            raise EOFError("the process that forks has gone")
        data += got
    return data
