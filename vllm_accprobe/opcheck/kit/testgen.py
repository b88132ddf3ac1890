"""A folder of tests that reproduces captured calls where neither vLLM nor accprobe is installed.

The problem: whoever wrote a kernel needs the failing call, on their own machine, in a form that they trust. The idea:
each call becomes a JSON file and a safetensors file (case.py); the references, the verdict and a handful of other files
of ours are copied with them, with their imports renamed; pytest runs one parametrised test per operator. What ships
needs torch and pytest, nothing else. A reference that is not ours is not copied: its exact outputs are written down.
Not here: what a case is checked for (bench.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.calls import case as cases
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run import table

KIT = "operator_kit"
_PACKAGE = Path(__file__).parents[1]
_FILES = (
    "reference", "reference_table", "roundings", "calls/case",
    "floors/verdict", "floors/rounding", "floors/output_rows", "kit/bench", "measures",
    "calls/random_inputs", "calls/views",
)  # fmt: skip
_FURTHER = {
    "judge/rounding_unit.py": "floor", "judge/statistic.py": "statistic",
    "kernels/formulas.py": "formulas", "kernels/float_formats.py": "float_formats",
    "dump/block_code.py": "block_code",
    "standards/measures.py": "measure_names", "standards/dtype_limits.py": "dtype_limits",
}  # fmt: skip
"""Files of other rooms, and what they are called in the kit."""
_ROOMS = re.compile(r"vllm_accprobe\.opcheck(\.(calls|floors|kit)\b)?")
"""The kit is one flat package."""
_OURS = "vllm_accprobe.opcheck.references."


@dataclass(frozen=True)
class Written:
    """name: of the case; op: the operator's or class's name; cause: why the captured output is wrong, "" if unknown."""

    name: str
    op: str
    cause: str = ""


def about(captured: Captured) -> dict[str, Any]:
    """What a case says of its call besides its tensors."""
    op, records = captured.what.cls, captured.records
    return {
        "op": op, "class": op, "tap": captured.tap, "call": captured.call, "step": captured.step,
        "rank": captured.rank, "seq": min((r.seq for r in records.values()), default=captured.seq),
        "row_dims": {role: r.row_dim if r.rows is not None else 0 for role, r in records.items()},
    }  # fmt: skip


def write_case(
    captured: Captured, references: References, directory: Path, number: int | None = None, cause: str = "",
    more: Mapping[str, Any] | None = None,
) -> Written:  # fmt: skip
    """One call as <directory>/<name>.json and .safetensors. cause: of `Written`; more: what the case says besides.
    Raises ValueError for what cannot be written down, and OSError."""
    call = cases.closed(captured.what, references)
    op = call.cls
    step = "x" if captured.step is None else str(captured.step)
    place = "" if number is None else f"{number:04d}-"
    name = f"{place}{_word(op)}-{_word(captured.tap)[-60:]}-step{step}-rank{captured.rank}-call{captured.call}"
    tensors: dict[str, Any] = {}
    tree: dict[str, Any] = {
        "about": {**about(captured), **({"cause": cause} if cause else {}), **(more or {})},
        "call": cases.encode(call, tensors),
    }
    found = references.find(op)
    if not isinstance(found, Declined) and not getattr(found, "__module__", "").startswith(_OURS):
        expected = references.evaluate(call)
        if not isinstance(expected, Declined):
            tree["expected"] = {role: _kept(role, e, tensors) for role, e in expected.items() if role in call.outputs}
    cases.save(tensors, directory / f"{name}.safetensors")
    (directory / f"{name}.json").write_text(json.dumps(tree, indent=1, allow_nan=False), encoding="utf-8")
    return Written(name, op, cause)


def saved(captured: Captured, references: References, directory: Path) -> list[str]:
    """`write_case`, whose error is a sentence: the verdict counts more than the copy."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_case(captured, references, directory)
    except (ValueError, OSError) as why:
        return [f"{captured.tap} could not be saved: {why}"]
    return []


def _kept(role: str, e: Expected, tensors: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {k: getattr(e, k) for k in ("unit", "common", "reason", "groups", "shared")}
    for key in ("value", "noise", "bound", "rows"):
        value = getattr(e, key)
        entry[key] = None if value is None else f"expected.{role}.{key}"
        if value is not None:
            tensors[entry[key]] = value
    return entry


def _word(text: str) -> str:
    """Letters and digits of a name that came from a dump, for a file's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.") or "x"


def write_folder(written: Iterable[Written], out: Path, source: str) -> None:
    """Everything besides the cases, which lie in ``out``/cases already. source: what the README calls the dump."""
    kit = out / KIT
    (kit / "references").mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        _copy(_PACKAGE / f"{name}.py", kit / f"{Path(name).name}.py")
    for path in sorted((_PACKAGE / "references").rglob("*.py")):
        to = kit / path.relative_to(_PACKAGE)
        to.parent.mkdir(parents=True, exist_ok=True)
        _copy(path, to)
    for place, name in _FURTHER.items():
        _copy(_PACKAGE.parent / place, kit / f"{name}.py")
    (kit / "__init__.py").write_text('"""What the tests need; copied from vllm-accprobe."""\n', encoding="utf-8")
    shutil.copyfile(_PACKAGE / "kit" / "templates" / "conftest.py.txt", out / "conftest.py")
    (out / "columns.json").write_text(json.dumps((*table.COLUMNS, "min_val", "max_val")), encoding="utf-8")
    by_op: dict[str, list[str]] = {}
    causes: dict[str, list[str]] = {}
    for w in written:
        by_op.setdefault(w.op, []).append(w.name)
        causes.setdefault(w.op, []).extend([w.cause] if w.cause else [])
    (out / "test_operators.py").write_text("\n".join(_tests(by_op, causes)) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_readme(by_op, source), encoding="utf-8")


def _copy(path: Path, to: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for place, name in _FURTHER.items():
        text = text.replace(f"vllm_accprobe.{place.removesuffix('.py').replace('/', '.')}", f"{KIT}.{name}")
    to.write_text(_ROOMS.sub(KIT, text), encoding="utf-8")


def _tests(by_op: Mapping[str, list[str]], causes: Mapping[str, list[str]]) -> Iterator[str]:
    """causes: by operator, the titles of its test."""
    yield '"""Captured operator calls; see README.md. Written by `accprobe gentest`."""\n'
    yield "import pytest\n"
    taken: set[str] = set()
    for op, names in by_op.items():
        function = base = "test_" + re.sub(r"\W", "_", op)
        while function in taken:
            function += f"_{len(taken)}" if function == base else "_"
        taken.add(function)
        listed = "".join(f"    {json.dumps(name)},\n" for name in names)
        text = "; ".join(dict.fromkeys(causes.get(op, ())))  # its docstring
        title = f"    {json.dumps(text)}\n" if text else ""
        head = f'\n@pytest.mark.parametrize("name", [\n{listed}])\ndef {function}(name, way, run):\n'
        yield f"{head}{title}    run(name, way)\n"


def _readme(by_op: Mapping[str, list[str]], source: str) -> str:
    lines = "\n".join(f"| {op} | {len(names)} |" for op, names in by_op.items())
    return f"""# Captured operator calls

From {source}. Needs torch and pytest, nothing else.

    pytest                                   # captured outputs, and the operators on the CPU
    pytest --device cuda --detail-csv gpu.csv
    pytest --device npu --load torch_npu --seed 1 --detail-csv npu.csv
    accprobe compare gpu.csv npu.csv         # where accprobe is installed

Each case is checked in these ways:

- `captured`: what the engine gave, against the reference in float64 from the very inputs that it had. Fails: the
  operator was wrong in the engine.
- `device`: what the operator gives on `--device`, here and now, from the same inputs, against the same reference. An
  operator of torch.ops runs itself; a module runs through torch's operators, or a vendor's kernel of the same name;
  `--kernel my_kernels.py:rms_norm` runs that function in its place. Inputs have the strides and the storage offset that
  they had in the engine. Fails: it is wrong on this device.
- `drawn`, with `--seed`: as `device`, with inputs drawn at random from the captured mean, spread and range. Weaker
  evidence.

`--detail-csv` writes the measures of every `device` output. `--load` imports what registers a device or operators. The
function of `--kernel` gets an operator's arguments as they are; of a module's call, by the names of its parameters,
inputs (`x`), weights (`weight`) and attributes (`variance_epsilon`) of the case's json. It returns the output, or
several. A case's json also says how much of the call it has (`kept`), and whose numbers these are (`values`).

| operator | cases |
| --- | --- |
{lines}
"""
