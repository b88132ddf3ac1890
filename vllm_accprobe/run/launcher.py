"""Commands that are started, watched and ended: terminal, signals, exit code.

The problem: a command may be a server that never ends and wants one SIGINT, a script that reads the terminal, or a line
for the shell with children of its own; Ctrl-C reaches a whole process group, ``kill`` one process; and we may be killed
meanwhile. The idea: `run` is as if nobody stood in between. Where stdin is a terminal the command stays in our process
group and is only passed what others sent to us; elsewhere it gets a group of its own and everything through us, once.
Signals are waited for, not caught. `Background` runs a command in a session of its own with a log; at its end it gets
SIGTERM, its group time to follow, then SIGKILL. A `Guard` sends SIGTERM where we die first. `server_command` reads from
the words whether a command is a server, and gives it a free port.

Not here: requests to a server (gate/sending, doctor/graph_proof.py), progress
(watcher.py).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vllm_accprobe.config import ENV, PREFIX, RUN_ID, ConfigError, ProbeConfig, default_dir
from vllm_accprobe.dump.schema import RUN_JSON

_SERVER_MODULE = "vllm.entrypoints."
_DEFAULT_PORT = 8000
"""derived: vLLM's own."""
_EVERYWHERE = ("", "0.0.0.0", "::", "localhost")
_REFUSED = ("--uds", "--ssl-keyfile", "--ssl-certfile", "--headless")


class ServerCommandError(ValueError):
    """The command cannot be used; one line."""


@dataclass(frozen=True)
class ServerCommand:
    """words: the command as it is run. url: where it serves, "" for a program that ends by itself. key: for its
    clients; never printed."""

    words: tuple[str, ...]
    url: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"ServerCommand({self.words[:1]}, {self.url!r})"


def server_command(words: Sequence[str], environ: Mapping[str, str], port: int | None = None) -> ServerCommand:
    """How ``words`` are run. port: set by the user: the command is a server, and listens there.

    Raises ServerCommandError for a server that gets no requests, or whose port is taken.
    """
    if not words:
        raise ServerCommandError("no command is given; write `accprobe doctor --graphs -- vllm serve MODEL ...`")
    one_line = len(words) == 1 and " " in words[0]
    parts = split_line(words[0]) if one_line else list(words)
    if port is None and not _serves(parts):
        return ServerCommand(tuple(words))
    for option in _REFUSED:
        if any(part == option or part.startswith(option + "=") for part in parts):
            raise ServerCommandError(f"{option}: a server is asked over plain HTTP; leave it away for this")
    value = option_of(parts, "--port")
    if port is not None and value is not None and value != str(port):
        raise ServerCommandError(f"--port={port}, and the command says --port {value}")
    host = option_of(parts, "--host") or ""
    host = "127.0.0.1" if host in _EVERYWHERE else host
    full = tuple(words)
    if value is None and port is None and not one_line:
        port = _free_port()
        full += (f"--port={port}",)
    elif port is None:
        port = int(value) if value is not None and value.isdecimal() else _DEFAULT_PORT
    if _taken(host, port):
        raise ServerCommandError(f"something listens on port {port} of {host} already: end it, or name another --port")
    key = option_of(parts, "--api-key") or environ.get("VLLM_API_KEY", "")
    return ServerCommand(full, f"http://{f'[{host}]' if ':' in host else host}:{port}", key)


def _serves(parts: Sequence[str]) -> bool:
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if Path(part).name == "vllm" and after == "serve":
            return True
        if part.startswith(_SERVER_MODULE) and part.endswith("api_server"):
            return True
    return False


def option_of(parts: Sequence[str], name: str) -> str | None:
    """The last value of the option ``name`` (``--port``) among a command's words."""
    found = None
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if part == name and after:
            found = after
        elif part.startswith(name + "="):
            found = part[len(name) + 1 :]
    return found


def split_line(line: str) -> list[str]:
    """A command's words; of a line for the shell, which may be more than words, what blanks part."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAIT_S = 0.25
_SHELL = frozenset("|&;<>()$`\\\"' \t\n*?[#~=%")
TICK_S = 1.0
_GUARD = 'read -r target || exit 0; read -r done || kill -s TERM -- "$target"'


class LaunchError(Exception):
    """The command cannot be started; one line."""


def command_line(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What is executed for ``words``: a single word that is no program but reads like a line for the shell goes to
    ``sh -c``. Raises LaunchError where there is no such program."""
    if not words:
        raise LaunchError("no command is given; write `accprobe run [options] -- CMD ...`")
    program = shutil.which(words[0], path=environ.get("PATH"))
    if program is not None:
        return [program, *words[1:]]
    if len(words) == 1 and _SHELL & set(words[0]):
        return ["/bin/sh", "-c", words[0]]
    raise LaunchError(f"{words[0]}: no such command; is it installed, and on PATH?")


def run(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    tick: Callable[[], None] = lambda: None,
    busy: Callable[[], bool] = lambda: False,
    patience_s: float = 45.0,
) -> int:
    """Runs a command to its end and returns its exit code, 128 + n where signal n ended it.

    tick: called about once a second. busy: called after the command's end: whether what it started is still writing (an
    engine that closes its dump); waited for, at most ``patience_s``. Raises LaunchError, OSError.
    """
    if not hasattr(signal, "sigtimedwait"):
        raise LaunchError("this system has no sigtimedwait: set VLLM_ACCPROBE_* yourself (docs/capture.md)")
    argv = command_line(words, environ)
    own_group = not _is_terminal(sys.stdin)
    watched = {*PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    guard = Guard()

    def prepare() -> None:  # in the child: signals as they were for us
        if own_group:
            os.setpgid(0, 0)
        guard.watch(-os.getpid() if own_group else os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(argv, env=dict(environ), preexec_fn=prepare)
        waiter = _Waiter(process, own_group, watched, tick)
        while process.poll() is None:
            waiter.wait()
        deadline = time.monotonic() + patience_s
        if waiter.ending and own_group and process.returncode < 0:
            # What dies of a signal has not signalled its children: `sh -c` leaves what it started.
            waiter.to_group(signal.SIGTERM)
        arrived = waiter.arrived
        while busy() and time.monotonic() < deadline and waiter.arrived < arrived + 2:  # somebody insists
            waiter.wait()
        if waiter.ending and own_group:
            waiter.to_group(signal.SIGTERM)  # what is left now has had its time
    finally:
        guard.dismiss()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = process.returncode
    return 128 - code if code < 0 else code


class Guard:
    """Sends SIGTERM to what is watched if this process dies before it has dismissed the guard. In a session of its own:
    what is sent to our group does not reach it."""

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # without a shell nobody watches
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", start_new_session=True,
            )  # fmt: skip

    def watch(self, target: int) -> None:
        """target: as for kill(2), a process or a group. Called in the child, so that there is no moment between."""
        if self._shell is not None and self._shell.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._shell.stdin.fileno(), b"%d\n" % target)

    def dismiss(self) -> None:
        if self._shell is not None:
            with contextlib.suppress(OSError):
                self._shell.communicate(b"done\n")


class _Waiter:
    """Waits for a moment, passes on what arrived meanwhile, ticks. arrived: how many signals did."""

    def __init__(
        self, process: subprocess.Popen[bytes], own_group: bool, watched: set[signal.Signals], tick: Callable[[], None]
    ):
        self._process, self._own_group, self._watched, self._tick = process, own_group, watched, tick
        self._next = time.monotonic() + TICK_S
        self.arrived = 0

    @property
    def ending(self) -> bool:
        """Whether a signal ended the command."""
        return self.arrived > 0

    def wait(self) -> None:
        info = signal.sigtimedwait(self._watched, _WAIT_S)
        if info is not None and info.si_signo != signal.SIGCHLD:
            self.arrived += 1
            self._pass_on(signal.Signals(info.si_signo), sent_by_process=info.si_code <= 0)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TICK_S
            try:
                self._tick()
            except Exception:  # progress that cannot be shown must not leave a command behind that nobody waits for
                self._next = float("inf")

    def _pass_on(self, number: signal.Signals, sent_by_process: bool) -> None:
        if self._own_group and (number != signal.SIGTERM or self._process.poll() is not None):
            self.to_group(number)
        elif self._own_group or sent_by_process:
            self._process.send_signal(number)

    def to_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # nobody of the group is left
            return


def _is_terminal(stream: object) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        return False


_STOP_S = 60.0
"""chosen: what an engine may take to close its dump and free its device."""
_LOOK_S = 0.1
_TAIL = 1 << 16


class Background:
    """``with Background(words, environ, log=...) as command:``; the command's output goes to ``log``, a new file.

    Raises LaunchError where there is no such program, OSError where ``log`` cannot be made.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], *, log: Path, stop_s: float = _STOP_S):
        self.log = log
        self._argv = command_line(words, environ)
        self._environ = dict(environ)
        self._stop_s = stop_s
        self._guard: Guard | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Background:
        fd = os.open(self.log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._guard = guard = Guard()
        try:
            self._process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=fd, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: guard.watch(-os.getpid()),
            )  # fmt: skip
        except BaseException:
            guard.dismiss()
            raise
        finally:
            os.close(fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            if self._guard is not None:
                self._guard.dismiss()

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + n where signal n ended it; None while it runs."""
        code = None if self._process is None else self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, timeout: float) -> int | None:
        """Its exit code, or None where it still runs after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self.code is None and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.code

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines of its log."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self._stop_s
        try:
            # The front end ends before its engine has; the engine closes the dump.
            while (process.poll() is None or self._anybody_left()) and time.monotonic() < end:
                time.sleep(_LOOK_S)
        finally:  # also where somebody insists
            if self._anybody_left():
                self._to_group(signal.SIGKILL)
            process.wait()

    def _anybody_left(self) -> bool:
        return self._to_group(0)

    def _to_group(self, number: int) -> bool:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


# --- the environment of a command with the probe on ---

PLUGIN = "accprobe"
REGISTER = "ACCPROBE_RUN_REGISTER"
"""Names the file in which processes announce their dumps; as in capture/core/recording.py, which imports torch's
room."""


def environment(
    options: Mapping[str, str | None], base: Mapping[str, str]
) -> tuple[dict[str, str], ProbeConfig, list[str]]:
    """(environment, settings, lines to say) for a command. options: by setting's name in small letters; None: not
    given, the base environment's stays. The directory is settled, absolute.

    Raises:
        ConfigError: a setting is wrong, or the directory already holds a dump.
    """
    environ = dict(base)
    environ[ENV] = "1"
    for name, value in options.items():
        if value is not None:
            # The command may work in another directory than this one.
            environ[PREFIX + name.upper()] = os.path.abspath(value) if name == "config" else value
    config = ProbeConfig.from_env(environ)
    root = os.path.abspath(config.dir or default_dir())
    # With a run id of its own a command joins a run that others, on other machines, may have begun.
    if not environ.get(RUN_ID) and Path(root, RUN_JSON).exists():
        raise ConfigError(f"--dir={root} already holds a dump; name another directory, or remove it")
    environ[PREFIX + "DIR"] = root
    notes = []
    if allow_plugin(environ):
        notes.append(f"VLLM_PLUGINS did not contain {PLUGIN}, and vLLM would not have loaded it: added")
    return environ, config.with_dir(root), notes


def allow_plugin(environ: dict[str, str]) -> bool:
    """Adds our plugin to vLLM's list of those that it may load, where there is one without it; whether it did."""
    names = [p.strip() for p in environ.get("VLLM_PLUGINS", PLUGIN).split(",")]
    if PLUGIN in names:
        return False
    environ["VLLM_PLUGINS"] = ",".join([*filter(None, names), PLUGIN])
    return True
