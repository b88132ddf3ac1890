"""Commands that are started, watched and ended: terminal, signals, exit code.

The problem: a command may be a server that never ends and wants one SIGINT, a script that reads the terminal, or a line
for the shell with children of its own; Ctrl-C reaches a whole process group, ``kill`` one process; and we may be killed
meanwhile. The idea: `run` is as if nobody stood in between. Where stdin is a terminal the command stays in our process
group and is only passed what others sent to us; elsewhere it gets a group of its own and everything through us, once.
Signals are waited for, not caught. A `Guard` sends SIGTERM where we die first.

Not here: commands in the background, and servers (gate/served_run.py), progress (watcher.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_accprobe.config import ENV, PREFIX, RUN_ID, ConfigError, ProbeConfig, default_dir
from vllm_accprobe.dump.schema import RUN_JSON

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAIT_S = 0.25
_SHELL = frozenset("|&;<>()$`\\\"' \t\n*?[#~=%")
TICK_S = 1.0
_GUARD = 'read -r target || exit 0; read -r done && exit 0; kill -s TERM -- "$target"'
_THEN_KILL = (
    '; n=0; while kill -s 0 -- "$target"; do [ "$n" -lt {0} ] || {{ kill -s KILL -- "$target"; exit 0; }}; '
    "sleep 1; n=$((n+1)); done"
)


class LaunchError(Exception):
    """The command cannot be started; one line."""


def command_line(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What is executed for ``words``: a single word that is no program but reads like a line for the shell goes to
    ``sh -c``. Raises LaunchError where there is no such program."""
    if not words:
        raise LaunchError("a command is missing; write `accprobe run [options] -- CMD ...`")
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
    what is sent to our group does not reach it. kill_after: seconds until SIGKILL follows, at least 1; None: never."""

    def __init__(self, kill_after: int | None = None) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        script = _GUARD + (_THEN_KILL.format(max(1, kill_after)) if kill_after is not None else "")
        with contextlib.suppress(OSError):  # without a shell nobody watches
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", start_new_session=True,
            )  # fmt: skip

    def watch(self, target: int) -> None:
        """target: as for kill(2), a process or a group. Called in the child, so that there is no moment between."""
        if self._shell is not None and self._shell.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._shell.stdin.fileno(), b"%d\n" % target)

    def strike(self) -> None:
        """Ends what is watched, if anything is yet: as where this process dies."""
        shell, self._shell = self._shell, None
        if shell is not None and shell.stdin is not None:
            with contextlib.suppress(OSError):
                shell.stdin.close()

    def dismiss(self) -> None:
        """Also twice."""
        shell, self._shell = self._shell, None
        if shell is not None:
            with contextlib.suppress(OSError):
                shell.communicate(b"done\n")


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
