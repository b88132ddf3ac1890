"""Tiny models of many architectures, captured clean on a real vLLM: what raises an alarm, and what stays unchecked.

    python scripts/zoo.py [NAME ...] [--transformers] [--keep DIR] [--json FILE]

The problem: a block that is computed in a way that nobody thought of is condemned, or left unchecked, and that is seen
only with a model that has it. The idea: a table of configs (every `lab/zoo_*.py` with `MODELS`); for each the
transformers library makes a model with drawn weights, a real engine serves it twice, with the requests together and in
chunks, and `accprobe opcheck` and `accprobe compare` judge the two captures. Both must pass; with --transformers also
the first capture against that library's float32 golden. One line an architecture; what is unchecked and why is in
`--json`. Exit code 1 where any fails.
Not here: the configs (lab/zoo_models.py), how weights are drawn (mode_models.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("", "scripts", "tests"):
    sys.path.insert(0, str(ROOT / folder))

import mode_models  # noqa: E402
from support.engine import Ask, EngineError, EngineHost  # noqa: E402
from support.prompts import prompts  # noqa: E402

ASKS = [Ask(ids, 8) for ids in prompts(5, 23, 40, 70, 97)]
SEEN = [Ask([9, 10, 4, 6, 5, *a.ids], 8, image=(112, 84, k)) for k, a in enumerate(ASKS)]
"""With a picture, at the token that tiny_model.py's vision models have for one."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a": ("together", {"max_num_batched_tokens": 256}),
    "b": ("staggered", {"max_num_batched_tokens": 64}),
}
"""How the two captures are served: the second one in chunks, a request after the other."""
PER_COMMAND_S = 240


def table() -> dict[str, mode_models.Architecture]:
    """Name → architecture, of all tables."""
    found: dict[str, mode_models.Architecture] = {}
    for path in sorted((ROOT / "lab").glob("zoo_*.py")):
        found |= importlib.import_module(f"lab.{path.stem}").MODELS
    return found


def capture(host: EngineHost, model: Path, engine: Mapping[str, Any], keep: Path, picture: bool = False) -> str:
    """The two captures; why there are none, or ""."""
    for name, (how, way) in WAYS.items():
        if (keep / name / "run.json").exists():
            continue
        shutil.rmtree(keep / name, ignore_errors=True)
        try:
            more = {**way, "kv_cache_memory_bytes": 1 << 26, **engine}
            host.capture(model, SEEN if picture else ASKS, out=keep / name, how=how, **more)
        except EngineError as why:
            host.close()  # what a failed engine leaves behind would fail the next one
            shutil.rmtree(keep / name, ignore_errors=True)
            lines = [line for line in str(why).splitlines() if "Error" in line] or str(why).splitlines()
            return lines[0][:300]
    return ""


def command(*words: str) -> tuple[int, str]:
    """(exit code, all that it printed)."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    start = [sys.executable, "-m", "vllm_accprobe.cli"]
    ran = subprocess.run([*start, *words], capture_output=True, text=True, env=env, timeout=PER_COMMAND_S, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def judge(keep: Path) -> dict[str, Any]:
    """What the two commands find in the captures: exit codes, rows, alarms, and what is unchecked."""
    import csv

    checked, text = command("opcheck", str(keep / "a"), "--out", str(keep / "opcheck"))
    (keep / "opcheck.txt").write_text(text)
    found: dict[str, Any] = {"opcheck": checked, "rows": 0, "unchecked": 0, "alarms": [], "why": {}}
    why: Counter[str] = Counter()
    result = keep / "opcheck" / "opcheck.csv"
    with result.open(newline="") if result.exists() else open(os.devnull) as lines:
        for row in csv.DictReader(lines):
            found["rows"] += int(row["checked"] or 0)
            if row["status"] in ("fail", "error"):
                found["alarms"].append(f"{row['class']} {row['tap']} {row['role']}: {row['message']}"[:300])
            elif row["status"] == "skip":
                found["unchecked"] += 1
                why[f"{row['class']} {row['role']}: {row['message']}"[:200]] += 1
            elif row["unchecked_because"] and row["checked"] != row["rows"]:
                why[f"{row['class']} {row['role']}, rows: {row['unchecked_because']}"[:200]] += 1
    found["why"] = dict(why.most_common())
    found["compare"], text = command("compare", str(keep / "a"), str(keep / "b"), "--out", str(keep / "report"))
    (keep / "compare.txt").write_text(text)
    return found


def against_transformers(entry: mode_models.Architecture, keep: Path) -> dict[str, Any]:
    """What `accprobe compare` says of the first capture and a golden of the same requests; {} where the library has no
    such model, or another one with pictures and without tokens."""
    if entry.drawn or entry.picture or "runner" in entry.engine:
        return {}
    from support.transformers_golden import capture as golden

    try:
        if not (keep / "golden" / "run.json").exists():
            golden(keep / "model", ASKS, keep / "golden")
    except Exception as why:
        return {"transformers": 2, "transformers_says": f"no golden: {type(why).__name__}: {why}"[:300]}
    code, text = command("compare", str(keep / "golden"), str(keep / "a"), "--out", str(keep / "report-transformers"))
    (keep / "transformers.txt").write_text(text)
    says = next((x for x in text.splitlines() if x.startswith(("FAIL", "PASS"))), text[-200:])[:200]
    why = entry.differs or entry.defect[1]
    right = code == 1 and bool(why)
    return {"transformers": 0 if right else code, "transformers_says": f"rightly: {why}" if right else says}


def one(
    name: str, entry: mode_models.Architecture, host: EngineHost, keep: Path, transformers: bool = False
) -> dict[str, Any]:
    """What became of an architecture; its files lie below ``keep``."""
    began = time.monotonic()
    found: dict[str, Any] = {"name": name, "starts": "yes"}
    try:
        model = mode_models.of_architecture(entry, keep / "model")
    except Exception as why:
        return found | {"starts": f"no model: {type(why).__name__}: {why}"[:300]}
    engine = {**({"load_format": "drawn"} if entry.drawn else {}), **entry.engine}
    if failed := capture(host, model, engine, keep, entry.picture):
        return found | {"starts": failed}
    found |= judge(keep) | {"seconds": round(time.monotonic() - began), "defect": ""}
    if transformers:
        found |= against_transformers(entry, keep)
    if entry.defect[0] and found["alarms"] and all(a.startswith(f"{entry.defect[0]} ") for a in found["alarms"]):
        found |= {"opcheck": 0, "compare": 0, "defect": ": ".join(entry.defect)}
    return found


def line(found: Mapping[str, Any]) -> str:
    if found["starts"] != "yes":
        return f"{found['name']}: does not start: {found['starts']}"
    return (
        f"{found['name']}: opcheck {found['opcheck']}, {found['rows']} rows checked, {found['unchecked']} outputs not, "
        f"{len(found['alarms'])} alarms; compare {found['compare']}; {found['seconds']} s"
        + (f"; the alarms are right: {found['defect']}" if found["defect"] else "")
        + (f"; transformers {found['transformers']}: {found['transformers_says']}" if "transformers" in found else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of the table; all by default")
    parser.add_argument("--transformers", action="store_true", help="also against a golden of transformers")
    parser.add_argument("--keep", type=Path, help="where models, captures and reports stay, and are not made again")
    parser.add_argument("--json", type=Path, help="what was found, also why outputs are unchecked")
    asked = parser.parse_args()
    known = table()
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"no such architecture: {', '.join(unknown)}; there are {', '.join(known)}")
    keep = asked.keep or Path(tempfile.mkdtemp(prefix="accprobe-zoo-"))
    host = EngineHost(keep / "engine.log")
    all_found = []
    try:
        for name in asked.names or known:
            all_found.append(one(name, known[name], host, keep / name, asked.transformers))
            (keep / name / "found.json").write_text(json.dumps(all_found[-1], indent=1))
            print(line(all_found[-1]), flush=True)
            for alarm in all_found[-1].get("alarms", [])[:3]:
                print(f"    {alarm}", flush=True)
    finally:
        host.close()
        if asked.json:
            asked.json.write_text(json.dumps(all_found, indent=1))
    wrong = ("opcheck", "compare", "transformers")
    return int(any(f["starts"] != "yes" or any(f.get(what) for what in wrong) for f in all_found))


if __name__ == "__main__":
    sys.exit(main())
