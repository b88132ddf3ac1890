"""The page of ``scripts/card.sh`` and its archive, from the results of its parts.

The page says, in this order: what was run on, whether looking changed anything and whether the fault was named, what a
step costs, errcheck, the taps with torch alone, what failed and how it ended, versions. Pure functions of the results,
but for ``write`` and ``pack``. Not here: what is concluded (card_found.py).
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from card_found import Results, WayFound, all_good, conclusions, costs, errchecks, failed, rest
from card_parts import FACTOR, FAULTY

TAIL, SENT_TAIL = 15, 80
"""Last lines of a log: on the page, in the archive."""
LARGEST = 512 << 10
"""Bytes of one file in the archive; a larger one is left out, and the page says so."""
ARCHIVE = "accprobe-card.tar.gz"


def page(results: Results, logs: Mapping[str, list[str]], torch_page: str = "", quick: bool = False) -> str:
    """Markdown. logs: by part, the last lines of its log; torch_page: what card_torch.py wrote."""
    machine = results.get("machine", {}).get("found") or {}
    left = rest(results)
    verdict = "Everything passed." if not left else f"What was run passed; {len(left)} parts were not run."
    lines = ["# accprobe on this card", "", f"**{verdict if all_good(results) else 'Not all passed.'}**", ""]
    lines += _header(machine, results, quick)
    lines += ["", "## Inside each way to run", "", *_ways(results)]
    lines += ["", "## What a decode step costs", "", *_costs(results, quick)]
    lines += ["", "## errcheck", "", *_errcheck(results)]
    if torch_page:
        body = torch_page.split("\n\n", 1)[-1]
        lines += ["", "## The taps with torch alone", "", *body.strip().splitlines()]
    lines += ["", "## What did not run to its end", "", *_failed(results, logs)]
    lines += ["", "## Parts", "", *_parts(results)]
    lines += ["", "## Versions and settings", "", *_versions(machine)]
    return "\n".join(lines) + "\n"


def _header(machine: Mapping[str, Any], results: Results, quick: bool) -> list[str]:
    if not machine:
        return ["This machine's vLLM could not be asked: see below."]
    probe = machine.get("accprobe", {})
    seconds, busy = (sum(one.get(clock, 0.0) for one in results.values()) for clock in ("s", "cpu_s"))
    missing = machine.get("missing", [])
    lack = [f"- **not installed here, so that parts fail: {', '.join(missing)}**"] if missing else []
    return [
        *lack,
        f"- devices: {', '.join(machine.get('devices', ['not known']))}",
        f"- vLLM {machine.get('vllm')} ({machine.get('platform')}), torch {machine.get('torch')}, Python "
        f"{machine.get('python')}, {machine.get('system')}, {machine.get('cores')} cores",
        f"- accprobe {probe.get('version')}, source {probe.get('source')}",
        f"- {len(results) - len(rest(results))} of {len(results)} parts{' (--quick)' if quick else ''}, "
        f"{seconds:.0f} s ({busy:.0f} s of CPU time)",
    ]


def _ways(results: Results) -> list[str]:
    found = conclusions(results)
    if not found:
        return ["Nothing was run."]
    lines = [
        f"The planted fault: {FAULTY} × {FACTOR}. *Bits* are those of the served tokens and top log-probabilities "
        "against an engine without the probe, and of what was recorded of the root and the logits.", "",
        "| | mode, graphs | taps seen | steps replayed | bits with taps | some taps | no taps | clean against eager | "
        "fault named first | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for one in found:
        if one.why:
            lines.append(f"| {one.way} | {cell(one.why)} | | | | | | | | not run |")
            continue
        bits = [{True: "same", False: "CHANGED", None: "-"}[one.bits.get(v)] for v in ("on", "selected", "off")]
        replayed = ", ".join(f"{n} {mode}" for mode, n in one.replayed.items()) or "-"
        lines.append(
            f"| {one.way} | {one.how.get('mode', '?')}, {one.how.get('graphs', '?')} | {dash(one.taps)} | {replayed} | "
            f"{' | '.join(bits)} | {dash(one.verdict)} | {dash(one.culprit)} | "
            f"{ {True: 'passed', False: 'FAILED', None: 'unfinished'}[one.passed] } |"
        )
    for one in found:
        lines += _problems(one, results)
    return lines


def _problems(one: WayFound, results: Results) -> list[str]:
    lines = [f"- {one.way}: {cell(problem)}" for problem in one.problems]
    if one.repeatable is False:
        lines.append(f"- {one.way}: two engines without the probe gave different bits: so does this machine by itself")
    dump = (results.get(f"{one.way}-on", {}).get("found") or {}).get("dump", {})
    skips = list(dump.get("skips", {}).items())
    if skips:
        told = "; ".join(f"{cell(reason)} ({n})" for reason, n in skips[:4])
        lines.append(f"- {one.way}, not captured: {told}{'; ...' if len(skips) > 4 else ''}")
    return ["", *lines] if lines else []


def _costs(results: Results, quick: bool) -> list[str]:
    found = costs(results)
    if not found:
        return ["Not measured with --quick." if quick else "Not measured."]
    lines = [
        f"Medians (quartiles) of a decode step of 8 requests, {found[0].clock}; 4 layers, hidden size 1024, bfloat16. "
        "*off*: taps are there and nothing is captured, in turn with *tensors* in one engine. Engines are processes "
        "one after another: small differences between them are the machine's.", "",
        "| | without probe, ms | off | statistics | tensors | tensors captured a step | µs a tensor: off | "
        "statistics | tensors |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for one in found:
        low, middle, high = one.ms["bare"]
        kinds = ("off", "stats", "tensor")
        ratios = " | ".join(
            f"{one.ms[kind][1]:.2f} ({one.ratio(kind):.2f} ×)" if kind in one.ms else "-" for kind in kinds
        )
        each = " | ".join(f"{one.each_us(kind):.1f}" if kind in one.ms else "-" for kind in kinds)
        lines.append(f"| {one.way} | {middle:.2f} ({low:.2f}-{high:.2f}) | {ratios} | {one.a_step} | {each} |")
    return lines


def _errcheck(results: Results) -> list[str]:
    found = errchecks(results)
    lines = [f"- {name}: {'passed' if good else 'FAILED'}. {cell(said)}" for name, good, said in found]
    return lines or ["Not run."]


def _failed(results: Results, logs: Mapping[str, list[str]]) -> list[str]:
    lines = []
    for name, why in failed(results).items():
        lines.append(f"**{name}**: {cell(why)}")
        tail = logs.get(name, [])[-TAIL:]
        if tail:
            lines += ["", "```text", *(line[:300].replace("```", "'''") for line in tail), "```"]
        lines.append("")
    return lines[:-1] or ["Nothing."]


def _parts(results: Results) -> list[str]:
    lines = ["| part | | s | CPU s |", "| --- | --- | --- | --- |"]
    return lines + [
        f"| {name} | {one.get('status')} | {one.get('s', 0):.0f} | {one.get('cpu_s', 0):.0f} |"
        for name, one in results.items()
    ]


def _versions(machine: Mapping[str, Any]) -> list[str]:
    packages = [f"{name}=={version}" for name, version in machine.get("packages", {}).items()]
    settings = [f"{name}={value}" for name, value in machine.get("settings", {}).items()]
    said = [line.replace("```", "~~~")[:160] for line in machine.get("managers", ())]
    blocks = [block for block in (packages, settings, said) if block]
    return ["```text", *"\n\n".join("\n".join(block) for block in blocks).splitlines(), "```"]


def cell(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.split()).replace("|", "/")[:400]


def dash(value: Any) -> str:
    return "-" if value is None else str(value)


# --- files -----------------------------------------------------------------------------------------------------------


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log; none where there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(0, io.SEEK_END)
            file.seek(max(0, file.tell() - (64 << 10)))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def write(root: Path, results: Results, quick: bool) -> Path:
    """card.md, card.json and the archive; gives the archive's path. Safe to call after every part."""
    logs = {name: tail(root / "logs" / f"{name}.log", SENT_TAIL) for name in results}
    torch_page = root / "torch" / "card.md"
    text = page(results, logs, torch_page.read_text(encoding="utf-8") if torch_page.exists() else "", quick)
    (root / "card.md").write_text(text, encoding="utf-8")
    (root / "card.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return pack(root, logs)


def pack(root: Path, logs: Mapping[str, list[str]]) -> Path:
    """What is sent: the page, the results, the logs' last lines, each dump's run.json, each compare.json; no tensor."""
    archive, left = root / ARCHIVE, []
    with tarfile.open(archive.with_suffix(".new"), "w:gz") as file:
        for name, lines in logs.items():
            if lines:
                _add(file, f"logs/{name}.log", "\n".join(lines).encode() + b"\n")
        found = [root / "card.md", root / "card.json", *sorted((root / "torch").glob("*.[mjt][dsx]*"))]
        found += sorted((root / "dumps").glob("*/run.json")) + sorted((root / "compared").glob("*/compare.json"))
        found += sorted((root / "errcheck").glob("*/*.json"))
        for path in found:
            if path.is_file() and path.stat().st_size <= LARGEST:
                _add(file, path.relative_to(root).as_posix(), path.read_bytes())
            elif path.is_file():
                left.append(f"{path.relative_to(root)}: {path.stat().st_size} bytes")
        if left:
            _add(file, "left-out.txt", "\n".join(left).encode() + b"\n")
    archive.with_suffix(".new").replace(archive)
    return archive


def _add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(f"accprobe-card/{name}")
    info.size = len(data)
    file.addfile(info, io.BytesIO(data))
