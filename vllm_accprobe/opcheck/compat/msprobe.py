"""msprobe's pre-check: its options and configuration, and its files of both stages.

The problem: scripts say ``-api_info ./dump.json -d 0 1 2 3 -j``, have a config.json whose keys are split between
capture, pre-check and online pre-check, and read accuracy_checking_result_<time>.csv, ..._details_<time>.csv and
api_precision_compare's by name and header. The idea: the words have msprobe's own meaning; each key of the
configuration is used, or one line says what to use instead; the files are our rows written once more, in msprobe's
columns and words. What release 26.2 reads decides two things: an empty cell is one space, and of a float16, bfloat16 or
float32 output ``相对误差错误率`` stays empty. Its lists name APIs (``linear``), not places; calls whose operator,
arguments, shapes and dtypes are equal are checked once. Sources: msprobe's documents and the headers that 26.2 writes.
Elsewhere: the options' names (cli/aliases.py), reading and judging (opcheck/diff.py).
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.dump.decode import Text, fits
from vllm_accprobe.opcheck.compat import CompatError
from vllm_accprobe.opcheck.plain_csv import inert
from vllm_accprobe.standards.msprobe import api_of
from vllm_accprobe.whole_file import write_csv_lines

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls

_MOST_DEVICES = 64


@dataclass(frozen=True)
class Precheck:
    """What msprobe's words require. msprobe: whether its limits and files are meant where nothing else is
    named; stamp: the time in the names of its files; out: where those are that are continued, None for a new check;
    save: where failed calls go, None for nowhere."""

    dump: Path | None
    msprobe: bool = False
    devices: tuple[str, ...] = ()
    once: bool = False
    stamp: str = ""
    out: Path | None = None
    save: Path | None = None
    jit: bool = False
    config: CheckConfig = field(default_factory=lambda: CheckConfig())
    notes: tuple[str, ...] = ()

    @property
    def resumed(self) -> bool:
        return self.out is not None


def read_options(dump: Path | None, words: Any) -> Precheck:
    """words: cli/opcheck.MsprobeOptions. Raises CompatError."""
    api_info, csv_path = words.api_info, words.csv_path
    if api_info is not None:
        if dump is not None:
            raise CompatError("-api_info and DUMP: name the dump once")
        dump = api_info
    stamp, out = time.strftime("%Y%m%d%H%M%S"), None
    if csv_path is not None:
        found = stamp_of(csv_path)
        if found is None:
            raise CompatError(f"-csv_path: {csv_path} is not called accuracy_checking_result_<14 digits>.csv")
        if not csv_path.is_file():
            raise CompatError(f"-csv_path: {csv_path} does not exist")
        stamp, out = found, csv_path.parent
    config = read_config(words.config) if words.config is not None else CheckConfig()
    where = Path(config.error_data_path) / f"ut_error_data{stamp}" if words.save_error else None
    notes = tuple(f"-config: {note}" for note in config.notes)
    msprobe = api_info is not None or csv_path is not None
    return Precheck(dump, msprobe, _devices(words.device), words.once, stamp, out, where, words.jit, config, notes)


def _devices(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not found:
        raise CompatError("--device: name devices, e.g. cpu, cuda:1, or 0,1")
    for name in found:
        if not re.fullmatch(r"\d{1,4}|[a-z]+(?::\d{1,4})?", name, re.ASCII):
            raise CompatError(f"--device: {name[:40]!r} is no device: cpu, cuda:1, or a number")
    if len(set(found)) != len(found) or len(found) > _MOST_DEVICES:
        raise CompatError(f"--device: each device once, and at most {_MOST_DEVICES} of them")
    return found


Place = tuple[int, str, "int | None", int]
"""Rank, tap, step, ordinal."""
_VALUES = ("count", "min", "max", "mean", "l2", "nan", "inf", "hash", "after")
"""Of a tensor's VALUE (dump/journal.py): what its elements tell."""


def names_of(cls: str) -> set[str]:
    """The API names of a class or operator: ``Functional.linear`` is linear, ``aten.mm.default`` mm."""
    rest = cls.removeprefix("torch.ops.").partition(".")[2]
    return {cls, api_of(cls), *([rest, rest.partition(".")[0]] if rest else [])}


def left_out(cls: str, white: Sequence[str], black: Sequence[str]) -> str:
    """Why the lists leave an API out, "" where they do not. One that is in both lists is left out."""
    names = names_of(cls)
    if names & set(black):
        return "in black_list"
    return "" if not white or names & set(white) else "not in white_list"


def duplicates(calls: Calls) -> dict[Place, str]:
    """Each call that an earlier one stands for, and that one's name."""
    first: dict[str, str] = {}
    found: dict[Place, str] = {}
    for _, place, cls, signature in sorted(_signatures(calls), key=lambda s: s[0]):
        key = f"{place[0]}|{cls}|{signature}"
        name = f"{place[1]}, step {place[2]}, call {place[3]}"
        if key in first:
            found[place] = first[key]
        else:
            first[key] = name
    return found


def _signatures(calls: Calls) -> list[tuple[tuple[int, int, int], Place, str, str]]:
    found = []
    for (rank, tap), ops in calls.ops.items():
        for op in ops:
            text = json.dumps([[_plain(a) for a in op.args], {k: _plain(v) for k, v in op.kwargs.items()}], default=str)
            found.append(((rank, op.step or 0, op.seq), (rank, tap, op.step, op.call), op.op, text))
    for (rank, tap), by_call in calls.by_tap.items():
        module = calls.modules.get(rank, {}).get(tap)
        cls = calls.cls_of(rank, tap)
        backward = tap.startswith("backward.")
        for (step, call), records in by_call.items():
            goes_in = sorted((r.role, r.dtype, r.shape) for r in records.values() if backward or r.role[:5] == "input")
            text = json.dumps([backward, goes_in, module.attrs if module else {}], default=str, sort_keys=True)
            seq = min(r.seq for r in records.values())
            found.append(((rank, step or 0, seq), (rank, tap, step, call), cls, text))
    return found


def _plain(value: Any) -> Any:
    """A VALUE without what its tensors' elements tell."""
    if not isinstance(value, Mapping):
        return value
    if "list" in value:
        return {"list": [_plain(v) for v in value["list"]]}
    inner = value.get("tensor", value)
    kept = {k: v for k, v in inner.items() if k not in (*_VALUES, "param", "skipped")}
    return {"tensor": kept} if "tensor" in value or "skipped" in value else kept


TASKS = ("acc_check", "run_ut")
_MOST = 1 << 20
_LIST = ("white_list", "black_list")
_ONLINE = ("nfs_path", "host", "port", "rank_list", "tls_path", "is_benchmark_device", "online_run_ut")
_CAPTURE = ("dump_path", "rank", "step", "level", "async_dump", "extra_info", "tensor", "statistics", "overflow_check",
            "seed", "is_deterministic", "enable_dataloader", "free_benchmark", "grad_probe", "structure")  # fmt: skip
DIGITS = 14
"""msprobe's default of ``precision``."""


class CheckConfigError(CompatError):
    """One line: which file, which key, what is wrong. Exit code 2."""


@dataclass(frozen=True)
class CheckConfig:
    """white_list, black_list: API names that alone are checked, and that are not; error_data_path: under which failed
    calls are saved; precision: decimal places of a number in msprobe's csv files; notes: a line for each key that has
    no effect."""

    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    error_data_path: str = "./"
    precision: int = DIGITS
    notes: tuple[str, ...] = ()


def read_config(path: Path) -> CheckConfig:
    """The file's settings. Raises CheckConfigError."""
    tree = _tree(path)
    task = tree.get("task")
    blocks = [t for t in TASKS if isinstance(tree.get(t), Mapping)]
    notes = []
    if task is not None and task not in TASKS:
        if not blocks:
            raise CheckConfigError(f"{path}: task is {str(task)[:40]!r}, which captures; a pre-check's is acc_check")
        notes.append(f"task {str(task)[:40]!r} captures: only the block {blocks[0]} is read")
    block = dict(tree[task if task in blocks else blocks[0]]) if blocks else {}
    block |= {k: v for k, v in tree.items() if k not in (*TASKS, "task") and k not in block}
    if block.get("is_online") or block.get("online_run_ut"):
        raise CheckConfigError(f"{path}: is_online is set: `accprobe online serve -config {path}` checks calls as they "
                               "come; without is_online a dump is checked")  # fmt: skip
    found: dict[str, Any] = {}
    for key, value in block.items():
        if key in _LIST:
            found[key] = _names(path, key, value)
        elif key == "error_data_path":
            if not isinstance(value, str) or not value or "\0" in value:
                raise CheckConfigError(f"{path}: error_data_path is no path")
            found[key] = value
        elif key == "precision":
            if type(value) is not int or not 0 <= value <= 20:
                raise CheckConfigError(f"{path}: precision is {str(value)[:20]!r}: decimal places, from 0 to 20")
            found[key] = value
        else:
            notes.append(_note(key))
    return CheckConfig(**found, notes=tuple(n for n in notes if n))


def _note(key: str) -> str:
    key = str(key)[:60]
    for names, note in (
        (("is_online",), ""),  # false, which is what it is here
        (_ONLINE, f"{key}: of an online pre-check, without effect here; see `accprobe online`"),
        (_CAPTURE, f"{key}: of capture, without effect here; PrecisionDebugger takes it"),
        (("quantization_api_list",), f"{key}: msprobe 26.2's own list holds here, whatever the file says"),
    ):
        if key in names:
            return note
    return f"{key}: not known here, without effect"


def _names(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if not fits(list[Text], value):
        raise CheckConfigError(f'{path}: {key} is no list of API names; for example ["conv1d", "linear"]')
    return tuple(value)


def _tree(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST:
            raise CheckConfigError(f"{path}: larger than a configuration is")
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix in (".yaml", ".yml"):
            tree = _yaml(path, text)
        else:
            tree = json.loads(text)
    except OSError as e:
        raise CheckConfigError(f"-config {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        if isinstance(e, CheckConfigError):
            raise
        raise CheckConfigError(f"{path} is no JSON: {str(e)[:100]}") from None
    if not isinstance(tree, dict):
        raise CheckConfigError(f"{path}: not the settings of a pre-check, which are a JSON object")
    return tree


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise CheckConfigError(f"{path}: no YAML reader is installed (PyYAML); write the same keys as JSON") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as e:
        raise CheckConfigError(f"{path} is no YAML: {' '.join(str(e).split())[:100]}") from None


CHECK_RESULT = ("API name", "Forward Test Success", "Backward Test Success", "Message")
SPELLINGS: dict[str, tuple[str, ...]] = {
    "cosine": ("余弦相似度", "Cosine similarity"),
    "max_abs_err": ("最大绝对误差", "Maximum absolute error"),
    "dual_100": ("双百指标", "Dual-100 metric"),
    "dual_1000": ("双千指标", "Dual-1000 metric"),
    "dual_10000": ("双万指标", "Dual-10000 metric"),
    "binary_err_ratio": ("二进制一致错误率", "Binary consistency error rate"),
    "error_balance": ("误差均衡性", "Error balance"),
    "normal_rmse": ("均方根误差", "Root-mean-square error (RMSE)"),
    "small_value_err_ratio": ("小值域错误占比", "Error ratio in small value range"),
    "normal_max_rel_err": ("相对误差最大值", "Maximum relative error"),
    "normal_mean_rel_err": ("相对误差平均值", "Mean relative error"),
    "inf_nan_err_ratio": ("inf/nan错误率", "inf/nan error rate"),
    "rel_err_ratio": ("相对误差错误率", "Relative error rate"),
    "abs_err_ratio": ("绝对误差错误率", "Absolute error rate"),
    "ulp_max": ("ULP误差最大值", "Maximum ULP error"),
    "ulp_mean": ("ULP误差平均值", "Mean ULP error"),
    "ulp_share": ("ULP误差大于阈值占比", "Proportion of ULP errors greater than the threshold"),
}
"""Of a measure: msprobe's columns, the one that is written first."""
_LABELS = {name: spellings[0] for name, spellings in SPELLINGS.items()}
CHECK_DETAILS = ("API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *_LABELS.values(), "Status", "Message")
_MINDSPORE = {"cosine": "Cosine", "max_abs_err": "MaxAbsErr", "max_rel_err": "MaxRelativeErr"}
MINDSPORE_RESULT = ("API Name", *CHECK_RESULT[1:])
MINDSPORE_DETAILS = ("API Name", "Bench Dtype", "Tested Dtype", "Shape", *_MINDSPORE.values(), "Status", "Message")
EMPTY = " "
"""msprobe's cell that holds nothing; its readers require a string of spaces."""
_STATUS = {"pass": "pass", "warning": "warning", "fail": "error", "error": "error", "skip": "SKIP"}
_WORST = ("error", "warning", "pass")
_FLOATS = ("float16", "bfloat16", "float32")
_NAMED = re.compile(r"(.+\.\d+)\.(?:forward|backward)\b")
_STAMP = re.compile(r"accuracy_checking_result_(\d{14})\.csv", re.ASCII)
_ODD = re.compile(r"[^A-Za-z0-9_]")
CallKey = tuple[str, str, str, str]
"""Rank, step, tap, ordinal, as the csv has them."""


def stamp_of(path: Path) -> str | None:
    """The time in the name of a result file; None where the name is none of msprobe's."""
    match = _STAMP.fullmatch(path.name)
    return match[1] if match else None


def check_paths(out: Path, stamp: str) -> tuple[Path, Path]:
    """The result file and the details file of one check. stamp: the time, and of an online check ``_rankN``."""
    return out / f"accuracy_checking_result_{stamp}.csv", out / f"accuracy_checking_details_{stamp}.csv"


def recorded_names(records: Iterable[Any]) -> dict[CallKey, str]:
    """The names that msprobe gave to calls, from a dump's records."""
    found: dict[CallKey, str] = {}
    for r in records:
        if match := _NAMED.match(r.name):
            found[str(r.rank), "" if r.step is None else str(r.step), r.tap, str(r.call)] = match[1]
    return found


def begin_check(out: Path, stamp: str, mindspore: bool) -> list[Path]:
    """Both files with their headers alone, so that an interrupted check can be named and gone on with; those that were
    not there. Raises OSError."""
    result, details = check_paths(out, stamp)
    made = []
    for path, header in ((result, _result_header(mindspore)), (details, _details_header(mindspore))):
        if not path.exists():
            write_csv_lines(path, header, ())
            made.append(path)
    return made


def write_by_rank(out: Path, dump: str) -> list[Path]:
    """Both files of each rank, as msprobe's online check names them, from the opcheck.csv in ``out``. Raises OSError,
    DumpError."""
    from vllm_accprobe.formats.common.sniff import open_dump

    names, stamp = recorded_names(open_dump(Path(dump)).records), time.strftime("%Y%m%d%H%M%S")
    with (out / "opcheck.csv").open(encoding="utf-8", newline="") as f:
        ranks = sorted({row["rank"] for row in csv.DictReader(f)}, key=int)
    for rank in ranks:
        write_check(out / "opcheck.csv", out, f"{stamp}_rank{rank}", names, DIGITS, False, rank)
    return [path for rank in ranks for path in check_paths(out, f"{stamp}_rank{rank}")]


def write_check(
    table: Path, out: Path, stamp: str, names: Mapping[CallKey, str], digits: int, mindspore: bool, rank: str = ""
) -> None:
    """Both files from opcheck.csv. digits: decimal places; rank: of this rank alone. Raises OSError."""
    named = _Names(names)
    result, details = check_paths(out, stamp)
    calls: dict[str, _CallWords] = {}
    with table.open(encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            if row["step"] == "" or (rank and row["rank"] != rank):
                continue  # a stored parameter is no call
            name, backward = named.of(row)
            call = calls.setdefault(name, _CallWords())
            status = _STATUS.get(row["status"], "error")
            way = call.backward if backward else call.forward
            if status != "pass" and row["message"]:
                call.messages.append(row["message"])
            full = f"{name}.{'backward' if backward else 'forward'}.output.{len(way)}"
            way.append((status, _details(full, row, status, digits, mindspore)))
    # msprobe's second stage takes all rows of a call from one place, its gradients behind it
    rows = (r for c in calls.values() for _, r in (*c.forward, *c.backward))
    write_csv_lines(details, _details_header(mindspore), rows)
    lines = ([name, _worst(c.forward), _worst(c.backward), "; ".join(dict.fromkeys(c.messages))[:1000]]
             for name, c in calls.items())  # fmt: skip
    write_csv_lines(result, _result_header(mindspore), lines)


class _CallWords:
    """The status and the row of each of a call's outputs, and the messages of those that did not pass."""

    def __init__(self) -> None:
        self.forward: list[tuple[str, list[str]]] = []
        self.backward: list[tuple[str, list[str]]] = []
        self.messages: list[str] = []


class _Names:
    """A name of msprobe's form for each call, the same for all its rows."""

    def __init__(self, recorded: Mapping[CallKey, str]):
        self._recorded = recorded
        self._named: dict[CallKey, str] = {}
        self._count: Counter[str] = Counter()

    def of(self, row: Mapping[str, str]) -> tuple[str, bool]:
        """(name, whether it is of gradients)."""
        backward = row["role"].startswith("grad") or row["tap"].startswith("backward.")
        call = row["rank"], row["step"], row["tap"], row["call"]
        if call in self._recorded:
            return self._recorded[call], backward
        if call not in self._named:
            op = row["op"]
            kind = "Aten" if op.startswith("aten.") else "NPU" if ".npu" in op or op.startswith("npu.") else "Module"
            kind = "Torch" if "." in op and kind == "Module" else kind
            base = f"{kind}.{_ODD.sub('_', api_of(op)) or 'call'}"
            self._named[call] = f"{base}.{self._count[base]}"
            self._count[base] += 1
        return self._named[call], backward


def _details(name: str, row: Mapping[str, str], status: str, digits: int, mindspore: bool) -> list[str]:
    dtype = f"torch.{row['dtype']}" if row["dtype"] else EMPTY
    bench = "torch.float64" if "float" in row["dtype"] else dtype
    shape = f"({row['shape'].strip('[]')}{',' * (row['shape'].count(',') == 0 and row['shape'] != '[]')})"
    measured = row["elements"] != ""
    labels = _MINDSPORE if mindspore else _LABELS
    cells = []
    for label in labels:
        text = row.get(label, "")
        left = label == "rel_err_ratio" and row["dtype"] in _FLOATS
        left = left or (not mindspore and "float" not in row["dtype"] and label != "binary_err_ratio")
        cells.append(EMPTY if left or not measured or text == "" else f"{float(text):.{digits}f}")
    described = f"{row['tap']}, step {row['step']}" + (f": {row['message']}" if row["message"] else "")
    return [name, bench, dtype, shape if measured else EMPTY, *cells, status, described]


def _worst(rows: Sequence[tuple[str, list[str]]]) -> str:
    statuses = [status for status, _ in rows]
    if not statuses:
        return EMPTY
    return next((s for s in _WORST if s in statuses), "SKIP")


def _result_header(mindspore: bool) -> tuple[str, ...]:
    return MINDSPORE_RESULT if mindspore else CHECK_RESULT


def _details_header(mindspore: bool) -> tuple[str, ...]:
    return MINDSPORE_DETAILS if mindspore else CHECK_DETAILS


_PAIRS = {
    "small_value_ratio": ("小值域错误比值", "小值域判定结果"), "rmse_ratio": ("均方根误差比值", "均方根误差判定结果"),
    "max_rel_ratio": ("相对误差最大值比值", "相对误差最大值判定结果"),
    "mean_rel_ratio": ("相对误差平均值比值", "相对误差平均值判定结果"),
    "error_balance_ratio": ("误差均衡性比值", "误差均衡性判定结果"),
    "inf_nan_err_ratio": ("inf/nan错误率", "inf/nan判定结果"), "rel_err_ratio": ("相对误差错误率", "相对误差判定结果"),
    "abs_err_ratio": ("绝对误差错误率", "绝对误差判定结果"),
    "binary_err_ratio": ("二进制一致错误率", "二进制一致错误率判定结果"),
}  # fmt: skip
_ULP = {"ulp_mean": "ULP误差平均值", "ulp_share": "ULP误差大于阈值占比", "ulp_share_ratio": "ULP误差大于阈值占比比值"}
_ULP_STATUS = "ULP误差判定结果"
_DUAL = ("双千指标", "双千指标判定结果")
COMPARE_DETAILS = (
    "API Name", *(c for pair in _PAIRS.values() for c in pair), *_ULP.values(), _ULP_STATUS, *_DUAL, "比对结果",
    "比对算法", "Message",
)  # fmt: skip
COMPARE_RESULT = ("API Name", "Forward Test Success", "Backward Test Success", "Message")
_ALGORITHMS = {
    "absolute threshold": "绝对阈值法", "benchmark ratio": "标杆比对法", "binary consistency": "二进制一致法",
    "ULP": "ULP误差比对法", "dual-1000": "双千指标法", "accumulative error": "累积误差比对法",
}  # fmt: skip
_WORD = {"skip": "SKIP"}


class CompareFiles:
    """Gathers what is judged, and writes both files in ``out``. name: how the API of a row is called."""

    def __init__(self, out: Path, stamp: str, digits: int = 14):
        self.paths = tuple(out / f"api_precision_compare_{kind}_{stamp}.csv" for kind in ("result", "details"))
        self._digits = digits
        self._rows: list[list[str]] = []

    def add(self, c: Any) -> None:
        """c: diff/verdicts.Compared. An output that one file alone has is no row of msprobe's."""
        if c.side:
            return
        judged = {j.name: j for j in c.finding.judged}
        cells = []
        for name in _PAIRS:
            found = judged.get(name)
            cells += [self._number(found), _word(found.status) if found else EMPTY]
        cells += [self._number(judged.get(name)) for name in _ULP]
        share = judged.get("ulp_share")
        cells.append(_word(share.status) if share else EMPTY)
        dual = judged.get("dual_1000")
        cells += [self._number(dual), _word(dual.status) if dual else EMPTY]
        algorithm = _ALGORITHMS.get(c.finding.algorithm, c.finding.algorithm) or EMPTY
        end = [_word(c.finding.status), algorithm, c.finding.message]
        self._rows.append([inert(x) for x in (".".join(c.row.key), *cells, *end)])

    def _number(self, judged: Any) -> str:
        if judged is None or judged.value is None:
            return EMPTY
        return f"{judged.value:.{self._digits}f}" if math.isfinite(judged.value) else str(judged.value)

    def write(self, totals: Any) -> Sequence[Path]:
        """totals: diff/verdicts.DiffTotals. Raises OSError."""
        result, details = self.paths
        write_csv_lines(details, COMPARE_DETAILS, self._rows)
        calls = ([inert(".".join(key)), *(_word(s) for s in call.statuses), call.message]
                 for key, call in totals.calls.items())  # fmt: skip
        write_csv_lines(result, COMPARE_RESULT, calls)
        return self.paths


def _word(status: str) -> str:
    return _WORD.get(status, status) or EMPTY


STANDARDS = ("msprobe", "msprobe-1.0", "mindspore")
_HEAD = 1 << 20


@dataclass(frozen=True)
class PrecheckFiles:
    """dump: its path, "" for no files; mindspore: whether they are MindSpore's."""

    dump: str = ""
    stamp: str = ""
    digits: int = DIGITS
    mindspore: bool = False

    @contextlib.contextmanager
    def begun(self, out: Path, going_on: Path) -> Iterator[None]:
        """The files' headers while a check runs. A check that is refused before it has begun leaves none of them: a
        header alone would be taken for a check to go on with. going_on: what a begun check has left. Raises OSError."""
        if not self.dump:
            yield
            return
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        made = begin_check(out, self.stamp, self.mindspore)
        try:
            yield
        except BaseException:
            if not going_on.exists():
                for path in made:
                    path.unlink(missing_ok=True)
                if new:
                    with contextlib.suppress(OSError):  # not empty: something else came
                        out.rmdir()
            raise

    def write(self, out: Path) -> list[Path]:
        """What was written. Raises OSError, DumpError."""
        if not self.dump:
            return []
        from vllm_accprobe.formats.common.sniff import open_dump

        names = recorded_names(open_dump(Path(self.dump)).records)
        write_check(out / "opcheck.csv", out, self.stamp, names, self.digits, self.mindspore)
        return list(check_paths(out, self.stamp))


def of(check: Any, standard: str, dump: str) -> PrecheckFiles:
    """check: cli/spelling/precheck_options.Precheck; dump: the dump's path, "" where there is none."""
    if standard not in STANDARDS or not dump:
        return PrecheckFiles()
    digits = check.config.precision
    return PrecheckFiles(dump, check.stamp, digits, standard == "mindspore")


def framework_of(dump: Path | None) -> str:
    """``pytorch`` or ``mindspore``, as the first dump.json says; "" where there is none that says so."""
    if dump is None:
        return ""
    file = dump if dump.is_file() else next(iter(sorted(dump.rglob("dump.json"))), None)
    try:
        if file is None:
            return ""
        with file.open(encoding="utf-8", errors="replace") as f:
            head = f.read(_HEAD)
        at = head.find('"framework"')
        return str(json.JSONDecoder().raw_decode(head[head.index(":", at) + 1 :].lstrip())[0]) if at >= 0 else ""
    except (OSError, ValueError, StopIteration):
        return ""
