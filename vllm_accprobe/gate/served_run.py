"""A server that a command starts: from the words to its first answer, its log, and its end.

The problem: many commands start an engine, which takes minutes, may die of a wrong word, and leaves thousands of lines
of which one says why. The idea: `server_command` reads from the words whether a command is a server, and gives it a
free port. `ServedRun` runs it in a session of its own with a log, and says while it starts how far it is; at its end
the command gets SIGTERM, its group time to follow, then SIGKILL. Where it dies, vLLM's own error is in the message,
and for the usual ones what to change (`ADVICE`). `served` is all of that for a line as a user types it.

Not here: requests (sending/), commands in the foreground (run/launcher.py).
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_accprobe.config import ENV
from vllm_accprobe.gate import preflight
from vllm_accprobe.gate.bisect.edits import ServeCommand
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.client import NotServed, Sender, SendError, ServerLost
from vllm_accprobe.progress import USUAL, Pace, waiting
from vllm_accprobe.run.launcher import Guard, LaunchError, command_line

_SERVER_MODULE = "vllm.entrypoints."
_DEFAULT_PORT = 8000
"""derived: vLLM's own."""
_EVERYWHERE = ("", "0.0.0.0", "::", "localhost")
_REFUSED = ("--uds", "--ssl-keyfile", "--ssl-certfile", "--headless")


@dataclass(frozen=True)
class ServerCommand:
    """words: the command as it is run. url: where it serves, "" for a program that ends by itself. key: for its
    clients; never printed. note: what was added to the user's words, and what they may have meant, for people."""

    words: tuple[str, ...]
    url: str = ""
    key: str = ""
    note: str = ""

    def __repr__(self) -> str:
        return f"ServerCommand({self.words[:1]}, {self.url!r})"


def server_command(words: Sequence[str], environ: Mapping[str, str], port: int | None = None) -> ServerCommand:
    """How ``words`` are run. port: the user's: the command is a server, and listens there.

    Raises NotServed for a server without plain HTTP, or whose port is taken.
    """
    if not words:
        raise NotServed("a command is missing; write `accprobe doctor --graphs -- vllm serve MODEL ...`")
    one_line = len(words) == 1 and " " in words[0]
    parts = split_line(words[0]) if one_line else list(words)
    if port is None and not serves(parts):
        return ServerCommand(tuple(words))
    command = ServeCommand(tuple(parts))
    for option in _REFUSED:
        if command.get(option) is not None:
            raise NotServed(f"{option}: servers are reached over plain HTTP only; leave it out")
    value = command.get("--port") or None
    if port is not None and value is not None and value != str(port):
        raise NotServed(f"--port={port}, and the command says --port {value}")
    host = command.get("--host") or ""
    host = "127.0.0.1" if host in _EVERYWHERE else host
    full = tuple(words)
    if value is None and port is None and not one_line:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        full += (f"--port={port}",)
    elif port is None:
        port = int(value) if value is not None and value.isdecimal() else _DEFAULT_PORT
    if _taken(host, port):
        raise NotServed(f"something listens on port {port} of {host} already: end it, or name another --port")
    key = command.get("--api-key") or environ.get("VLLM_API_KEY", "")
    return ServerCommand(full, f"http://{f'[{host}]' if ':' in host else host}:{port}", key)


def checked(line: ServeCommand, *, captured: bool = False) -> ServerCommand:
    """How a line is run, with what it lacks. captured: the probe is to be on in it. Raises NotServed for all that is
    known before the start."""
    preflight.check(line, captured=captured)
    words, note = preflight.prepared(line)
    server = server_command(words, line.full())
    if not server.url:
        raise NotServed(f"{words[0]} is no `vllm serve`: start it yourself, and name its URL")
    return replace(server, note="; ".join(filter(None, (preflight.meant(preflight.model_of(line)), note))))


def serves(parts: Sequence[str]) -> bool:
    """Whether they are a server's words."""
    return any(
        (Path(part).name == "vllm" and after == "serve")
        or (part.startswith(_SERVER_MODULE) and part.endswith("api_server"))
        for part, after in itertools.zip_longest(parts, parts[1:])
    )


def split_line(line: str) -> list[str]:
    """A command's words; of a line for the shell, which may be more than words, what blanks part."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


_MEMORY = "--gpu-memory-utilization (of the host's memory on a CPU)"
ADVICE = (
    (r"KV cache is needed, which is larger than|No available memory for the cache blocks",
     f"lower --max-model-len, or raise {_MEMORY}, or name --kv-cache-memory-bytes"),
    (r"is less than (desired|the engine's budget)",
     f"another process has the memory: end it, or lower {_MEMORY}, or name --kv-cache-memory-bytes"),
    (r"OutOfMemoryError|out of memory|Cannot allocate memory|not enough memory",
     f"lower {_MEMORY}, --max-num-seqs or --max-num-batched-tokens, or raise --tensor-parallel-size"),
    (r"Address already in use|EADDRINUSE", "end what listens there, or name another --port"),
    (r"Invalid repository ID or local directory|Repo id must be|is not a local folder|couldn't connect to '?https?://"
     r"|does not appear to have a file named|No such file or directory: .*config\.json|LocalEntryNotFoundError",
     "no model is in that folder: write the path of a folder with config.json as it is from here, or download it"),
    (r"unrecognized arguments|invalid choice|the following arguments are required|expected one argument",
     "this release of vLLM reads its options otherwise: vllm serve --help=all"),
    (r"max_model_len .* is greater than", "lower --max-model-len"),
    (r"Failed to infer device type|Found no NVIDIA driver|No module named 'vllm_",
     "this vLLM finds no device: `accprobe doctor` examines the platform"),
    (r"died unexpectedly \(exit code: -9\)", "the system killed it, most often for memory: lower what it may take"),
    (r"died unexpectedly \(exit code: -4\)", "an instruction that this processor lacks: install another build of vLLM"),
)  # fmt: skip
"""(pattern in an error of vLLM's, torch's or the system's; what to change). The first that fits."""
_PREFIX = re.compile(r"^(?:\([^()]{1,80} pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d [\d:.]+ (?:\[[^\]]*\] )?)?")
_ERROR = re.compile(
    r"(?:[A-Za-z_][\w.]*(?:Error|Exception|Failure|Exit|Exhausted)|Exception)(?:: .*)?|[\w. ]+: error: .+"
    r"|Worker proc \S+ died unexpectedly \(exit code: -?\d+\)(?=, |$).*"
)
_FOLLOWS = re.compile(
    r"Engine core initialization failed|Engine core proc|Frontend process failed|EngineDeadError|WorkerProc "
    r"initialization failed|See (?:stack trace|root cause)|CancelledError|SystemExit|BrokenPipeError|Executor failed"
    r"|RuntimeError: cancelled"
)
"""Errors of a process whose other process failed first."""
_MOST = 400
"""Chosen: characters of an error that is quoted."""


def cause(log: str) -> str:
    """The error that a log ends with, in vLLM's own words, and what to change where that is known: ``error; advice``.
    Its last line where none reads like an error; "" of an empty log."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    found = ""
    for line, after in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if _ERROR.fullmatch(line) and not _FOLLOWS.search(line):
            more = after.strip() if after.startswith((" ", "\t")) and not after.strip().startswith(("^", "~")) else ""
            found = f"{line} {more}".strip()
    found = (found or next((line.strip() for line in reversed(lines) if line.strip()), ""))[:_MOST]
    advice = next((what for pattern, what in ADVICE if re.search(pattern, found)), "")
    return f"{found.rstrip('.')}; {advice}" if advice else found


_STOP_S = 60.0
"""chosen: what an engine may take to close its dump and free its device."""
_DIES_S = 10.0
"""chosen: what an API server may take to end after its engine."""
_LOOK_S = 0.1
_ASK_S = 0.25
_TAIL = 1 << 18
"""Chosen: bytes of the end of a log; a failed start of two processes writes about 30 kB of tracebacks."""


class ServedRun:
    """``with ServedRun(name, command, environ, log=...) as run:``; the command's output goes to ``log``, a new file.

    name: for people, e.g. golden. command: also of a program that ends by itself. say: gets lines while it starts and
    ends. Raises NotServed where there is no such program, OSError where ``log`` cannot be made.
    """

    def __init__(
        self, name: str, command: ServerCommand, environ: Mapping[str, str], *, log: Path, say: Pace = USUAL,
        stop_s: float = _STOP_S,
    ):  # fmt: skip
        self.name, self.command, self.log = name, command, log
        self._environ, self._say, self._stop_s = dict(environ), say, stop_s
        try:
            self._argv = command_line(command.words, environ)
        except LaunchError as e:
            raise NotServed(str(e)) from None

    def __enter__(self) -> ServedRun:
        fd = os.open(self.log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._guard = guard = Guard(kill_after=int(self._stop_s))
        try:
            self.process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=fd, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: guard.watch(-os.getpid()),
            )  # fmt: skip
        except BaseException:  # also Ctrl-C within Popen, behind the fork: nobody else knows of that process
            guard.strike()
            raise
        finally:
            os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self._stop_s
        try:
            # The front end ends before its engine has; the engine closes the dump.
            with waiting(lambda: f"{self.name} is ending", self._say):
                while (self.process.poll() is None or self._to_group(0)) and time.monotonic() < end:
                    time.sleep(_LOOK_S)
        finally:  # also where somebody insists
            self._to_group(signal.SIGKILL)
            self.process.wait()
            self._guard.dismiss()

    def ready(self, until: float, option: str = "--ready-timeout") -> None:
        """Waits for the first answer, to time.monotonic() ``until``, which ``option`` sets. Raises NotServed."""
        sender = Sender(self.command.url, self.command.key, timeout=2.0)
        with waiting(self._starting, self._say):
            while time.monotonic() < until:
                if self.code is not None:
                    raise NotServed(f"the command ended with exit code {self.code} before it served{self.why()}")
                if sender.healthy():
                    return
                time.sleep(_ASK_S)
        raise NotServed(f"nothing answers at {self.command.url} ({option}); read {self.log}")

    def _starting(self) -> str:
        lines = (line for raw in reversed(self.tail()) if (line := _PREFIX.sub("", raw)).strip())
        last = self._shown(next((line for line in lines if not line[0].isspace()), ""))[:120]  # no line's second half
        return f"{self.name} is starting" + (f": {last}" if last else "")

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """An error of a request in this context says how the server ended, where it has, or what its log says."""
        try:
            yield
        except SendError as e:
            # What refuses a connection may be about to die.
            code = self.wait(_DIES_S if isinstance(e, ServerLost) else 0.0)
            if code is None and not isinstance(e, ServerLost):
                raise
            end = "the server's log ends with" if code is None else f"the server ended with exit code {code}"
            raise type(e)(f"{e}; {end}{self.why()}") from None

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + n where signal n ended it; None while it runs."""
        code = self.process.poll()
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

    def why(self) -> str:
        """``: error; what to change; read LOG``, behind what says that it ended."""
        found = cause(self._shown("\n".join(self.tail(_TAIL))))
        return (f": {found}" if found else "") + f"; read {self.log}"

    def _shown(self, text: str) -> str:
        return text.replace(self.command.key, "$KEY") if self.command.key else text

    def _to_group(self, number: int) -> bool:
        """Whether there is anybody left in it."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


FORCE = "VLLM_ACCPROBE_FORCE"


@contextmanager
def served(
    name: str, command: str, environ: Mapping[str, str], out: Path, ready_s: float, say: Pace = USUAL
) -> Iterator[ServedRun]:
    """The server that ``command`` starts, once it answers; it is ended with the context. name: for people. out: an
    existing folder, where its output goes as engine-N.log; where accprobe is installed, its steps go into steps-N, and
    it can be forced. Raises NotServed."""
    line = preflight.command_of(command, environ)
    server = checked(line, captured=line.full().get(ENV) == "1")
    if server.note:
        say(server.note)
    number = next(i for i in range(10_000) if not (out / f"engine-{i}.log").exists())
    environ = line.full()
    environ[FORCE] = environ.get(FORCE) or str((out / replies.folder_name(number)).absolute())
    with ServedRun(name, server, environ, log=out / f"engine-{number}.log", say=say, stop_s=_STOP_S) as run:
        run.ready(time.monotonic() + ready_s)
        with run.reporting():
            yield run


def assigns(word: str) -> bool:
    """Whether a word in front of a command is of its environment, as a shell would have it."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()
