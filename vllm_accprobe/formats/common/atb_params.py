"""What parameters an ATB operator was created with, by where it stands in a dump.

The problem: a tensor file says nothing of transposeB, of epsilon, of a head count, and releases keep these in different
files. The idea: one table that is asked by execution and operator and looks in the order of what is nearest to the
call: ``op_param.json`` in the operator's own directory (msit from 8 on), the table of operators that ``ait llm dump
--type op`` writes (``operation_tensors_<execution>.csv``, columns OpName and OpParam, cut by ``|``), the topology
(``param`` of its node). Read when it is asked for, kept for the next call.
Not here: what a parameter means (opcheck/references/atb).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io import walk
from vllm_accprobe.formats.io.plain_file import read_json, read_text

FILE = "op_param.json"
TABLE = re.compile(r"operation_tensors_(\d{1,9})\.csv", re.ASCII)
_DIRECTORY = "operation_io_tensors"
_LARGEST = 1 << 20
_OPERATOR = re.compile(r"(.+?)((?:_\d+)+)", re.ASCII)
_NAME, _PARAM = "OpName", "OpParam"
Operator = tuple[int, int, str]
"""(rank, execution, tap)"""


class AtbParameters:
    """files: each operator's own; tables: (execution or None, operator's id and class) → parameters of a table;
    problems: sentences on what cannot be read."""

    def __init__(self, topology: Mapping[str, Mapping[str, Any]]):
        self._topology = topology
        self._files: dict[Operator, Path] = {}
        self._tables: dict[tuple[int | None, str, str], Mapping[str, Any]] = {}
        self._known: dict[Operator, Mapping[str, Any] | None] = {}
        self.problems: list[str] = []

    def add_file(self, operator: Operator, path: Path) -> None:
        self._files[operator] = path

    def add_table(self, path: Path, execution: int | None = None) -> int:
        """Reads a table of operators; execution: that it belongs to, None for all. Gives how many operators it has.
        Raises DumpError where it is none."""
        try:
            text = read_text(path)
        except (OSError, ValueError) as e:
            why = e.strerror or e if isinstance(e, OSError) else e
            raise DumpError(f"{path} cannot be read: {why}") from None
        head = text.partition("\n")[0]
        cut = "|" if "|" in head else ","
        rows = csv.reader(io.StringIO(text), delimiter=cut, quoting=csv.QUOTE_NONE if cut == "|" else csv.QUOTE_MINIMAL)
        try:
            names = [n.strip() for n in next(rows, [])]
            if _NAME not in names or _PARAM not in names:
                raise DumpError(f"{path} is no table of ATB's operators: it has no columns {_NAME} and {_PARAM}")
            at, param = names.index(_NAME), names.index(_PARAM)
            count, odd = 0, 0
            for row in rows:
                if not any(cell.strip() for cell in row):
                    continue
                found = self._row(row, at, param, execution)
                count, odd = count + found, odd + (not found)
        except csv.Error as e:
            raise DumpError(f"{path} is no table of ATB's operators: {e}") from None
        if odd:
            self.problems.append(f"{path.name}: {odd} lines are not understood")
        self._known.clear()
        return count

    def _row(self, row: list[str], at: int, param: int, execution: int | None) -> bool:
        if len(row) <= max(at, param):
            return False
        match = _OPERATOR.fullmatch(row[at].strip())
        value = _parsed(row[param].strip().strip("'"))
        if match is None or value is None:
            return False
        self._tables[execution, match[2].strip("_"), match[1]] = value
        return True

    def find_tables(self, path: Path) -> None:
        """Reads the tables that lie beside the tensors: ``operation_io_tensors`` at, below or above ``path``."""
        for root in (path, *(p for p in path.parents[:4] if (p / "tensors").is_dir())):
            place = root / _DIRECTORY
            if not place.is_dir():
                continue
            for f in walk.files(place, lambda n: TABLE.fullmatch(n) is not None, walk.Passed()):
                match = TABLE.fullmatch(f.parts[-1])
                assert match is not None
                try:
                    self.add_table(f.path, int(match[1]))
                except DumpError as why:
                    self.problems.append(str(why))
            return

    def of(self, rank: int, execution: int, tap: str) -> Mapping[str, Any] | None:
        """The parameters of an operator's call; None where nothing tells them."""
        place = rank, execution, tap
        if place not in self._known:
            self._known[place] = self._look(place)
        return self._known[place]

    def _look(self, place: Operator) -> Mapping[str, Any] | None:
        _, execution, tap = place
        path = self._files.get(place)
        if path is not None:
            try:
                value = read_json(path, _LARGEST)
            except (OSError, ValueError) as e:
                self.problems.append(f"{path}: no parameters can be read from it ({str(e)[:80]})")
                return None
            return value if isinstance(value, dict) else None
        ids, kind = id_of(tap), tap.rpartition(".")[2].partition("_")[2]
        for when in (execution, None):
            if (when, ids, kind) in self._tables:
                return self._tables[when, ids, kind]
        spec = self._topology.get(tap, {}).get("param")
        return spec if isinstance(spec, Mapping) else None


def id_of(tap: str) -> str:
    """``3_layer.1_Attention`` → ``3_1``: an operator's id as ait writes it."""
    return "_".join(part.partition("_")[0] for part in tap.split("."))


def _parsed(text: str) -> Mapping[str, Any] | None:
    import orjson

    if len(text) > _LARGEST:
        return None
    try:
        value = orjson.loads(text) if text else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
