"""Other tools' tables of results that people bring in place of a dump: recognised, read, answered in their words."""

import csv
import io
import json
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from vllm_accprobe.cli import main
from vllm_accprobe.formats.common import result_tables, sglang_logs

Rows = list[list[str]]
BASIC = ["NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"]
MLP = "Module.model.layers.0.mlp.Qwen2MLP.forward.0"


def compared(columns: str, *rows: str, name: str = "NPU Dtype") -> Rows:
    """A compare_result: its header, and rows as ``name|further cells``; ``-name`` has no tensor on the other side."""
    header = [*BASIC[:2], name, *BASIC[3:], *columns.split("|")]
    out = [header]
    for row in rows:
        own, *cells = row.split("|")
        bench = "N/A" if own.startswith("-") else own
        out.append([own.removeprefix("-"), bench, "torch.bfloat16", "torch.bfloat16", "[1, 8]", "[1, 8]", *cells])
    return out


def table(text: str) -> Rows:
    return [line.split("|") for line in text.strip().splitlines()]


TENSORS = compared(
    "Cosine|MaxAbsErr|Result|Err_message|NPU_Stack_Info",
    f"{MLP}.input.0|1.0|0.0|pass|[]|File a, line 1,\n x",
    "Functional.linear.3.forward.input.0|0.8|0.1|warning|cos|None",
    f"{MLP}.output.0|0.9987|0.25|error|[ratio 0.033, too small]|None",
    "-Tensor.add.7.forward.output.0|N/A|N/A|pass|[]|",
    "free text|1.0|0|pass|[]|",
)  # fmt: skip
SAID = ("row 3: " + MLP + ".output.0 (tap model.layers.0.mlp output.0): Result error, Cosine 0.9987, MaxAbsErr 0.25, "
        "Err_message [ratio 0.033, too small]")  # fmt: skip
COUNTED = ("1 row without a Bench Name: nothing was compared there",
           "1 name that cannot be parsed, the first 'free text'", "`accprobe compare BENCH_DUMP NPU_DUMP`")  # fmt: skip
Case = tuple[Rows, int, str, tuple[str, ...]]
TABLES: dict[str, Case] = {
    "compare_result": (
        TENSORS, 1, "msprobe's compare_result: 5 rows; Result: 3 pass, 1 warning, 1 error", (SAID, *COUNTED)
    ),
    "compare_result, of old": (
        compared("Cosine|Accuracy Reached or Not|Err_message", f"{MLP}.output.0|0.5|No|", name="NPU Tensor Dtype"), 1,
        "msprobe's compare_result: 1 row; Accuracy Reached or Not: 1 No", ("Accuracy Reached or Not No, Cosine 0.5",),
    ),
    "compare_result, md5": (
        compared("NPU MD5|BENCH MD5|Result", f"{MLP}.output.0|0a|0b|Different", f"{MLP}.input.0|0a|0a|pass"),
        1, "msprobe's compare_result: 2 rows; Result: 1 Different, 1 pass", ("NPU MD5 0a, BENCH MD5 0b",),
    ),
    "compare_result, nothing matched": (
        compared("Cosine|Result|Err_message", f"-{MLP}.output.0|N/A|pass|[]"), 3,
        "msprobe's compare_result: 1 row; Result: 1 pass: no verdict", ("1 row without a Bench Name",),
    ),
    "acc_check": (
        table("API name|Forward Test Success|Backward Test Success|Message\nFunctional.linear.0|pass|SKIP|\n"
              "Torch.mm.1|pass|error|far"),
        1, "a result of msprobe's acc_check or api_precision_compare: 2 rows; Forward Test Success: 2 pass; Backward "
        "Test Success: 1 SKIP, 1 error", ("row 2: Torch.mm.1 (tap Torch:mm): Forward Test Success pass, Backward",),
    ),
    "acc_check, earlier": (
        table("API Name|Forward Test Success|Backward Test Success|Message\nFunctional.linear.0|True|SKIP|\n"
              "Torch.mm.1|False|SKIP|far"),
        1, "a result of msprobe's acc_check or api_precision_compare: 2 rows; Forward Test Success: 1 True, 1 False; "
        "Backward Test Success: 2 SKIP",
        ("row 2: Torch.mm.1 (tap Torch:mm): Forward Test Success False",),
    ),
    "acc_check, details": (
        table("API Name|Bench Dtype|DEVICE Dtype|Shape|余弦相似度|最大绝对误差|Status|Message\n"
              "Functional.linear.0.forward.output.0|torch.float32|torch.float16|(1,)|1| |pass|\n"
              "x|y|z||0.8|0.4|error|cos"),
        1, "msprobe's accuracy_checking_details: 2 rows; Status: 1 pass, 1 error",
        ("row 2: x: Status error, 余弦相似度 0.8, 最大绝对误差 0.4, Message cos", "1 name that cannot be parsed"),
    ),
    "api_precision_compare, details": (
        table("API Name|比对结果|比对算法|Message\nTensor.add.0.forward.output.0|pass|标杆比对法|"), 0,
        "msprobe's api_precision_compare_details: 1 row; 比对结果: 1 pass", (),
    ),
    "compare.csv": (
        table("golden|mine|step|dtype_golden|dtype_mine|cosine|status|message\nx|x/out|0|f|f|0.5|fail|far"), 1,
        "a compare.csv of accprobe: 1 row; status: 1 fail", ("row 1: x/out: status fail, cosine 0.5", "--rejudge DIR"),
    ),
}  # fmt: skip
"""Name → (lines, exit code of compare, the first line, what further lines say)."""


def write_csv(path: Path, rows: Rows) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path.write_text("\ufeff" + text.getvalue(), encoding="utf-8", newline="")


def xlsx(rows: Rows, inline: bool = False, before: str = "", old: str = "", new: str = "") -> bytes:
    """An xlsx, its texts in a shared list or in the cells; empty cells are left out, as all writers do. before: the
    sheet; old, new: what is changed in it."""
    texts: list[str] = []

    def cell(column: int, row: int, text: str) -> str:
        at = f"{chr(65 + column)}{row}"
        if inline:
            return f'<c r="{at}" t="inlineStr"><is><t xml:space="preserve">{escape(text)}</t></is></c>'
        texts.append(text)
        return f'<c r="{at}" t="s"><v>{len(texts) - 1}</v></c>'

    lines = (
        f'<row r="{i}">{"".join(cell(c, i, text) for c, text in enumerate(row) if text)}</row>'
        for i, row in enumerate(rows, 1)
    )
    sheet = f'<?xml version="1.0"?>{before}<worksheet><sheetData>{"".join(lines)}</sheetData></worksheet>'
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("xl/worksheets/sheet1.xml", sheet.replace(old, new) if old else sheet)
        made.writestr("xl/sharedStrings.xml", f"<sst>{''.join(f'<si><t>{escape(t)}</t></si>' for t in texts)}</sst>")
    return out.getvalue()


def typed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", TABLES)
def test_each_is_read_and_answered(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, code, first, more = TABLES[name]
    write_csv(tmp_path / "a.csv", rows)
    for inline in (False, True):
        (tmp_path / f"{inline}.xlsx").write_bytes(xlsx(rows, inline))
    for file in (tmp_path / "a.csv", tmp_path / "False.xlsx", tmp_path / "True.xlsx"):
        seen, judged = typed(capsys, "inspect", file), typed(capsys, "compare", file)
        assert (seen[0], judged[0], seen[2], judged[2]) == (0, code, "", ""), (seen, judged)
        assert seen[1] == judged[1]
        assert seen[1].splitlines()[0] == first
        assert not [m for m in more if m not in seen[1]], seen[1]
    found = json.loads(typed(capsys, "inspect", tmp_path / "a.csv", "--json")[1])
    assert (found["rows"], found["verdict"]) == (len(rows) - 1, {0: "pass", 1: "fail", 3: None}[code])
    write_csv(tmp_path / "b.csv", rows)
    refused = typed(capsys, "compare", tmp_path / "a.csv", tmp_path / "b.csv", "--out", tmp_path / "o")
    assert name == "acc_check, details" or (refused[0], refused[2].count("\n")) == (2, 1)


def record(kind: str, name: str, step: int = 0, **more: Any) -> dict[str, Any]:
    return {"errors": [], "infos": [], "location": {"step": step}, "type": kind, "name": name, **more}


def diff(passed: bool, value: float) -> dict[str, Any]:
    return {"rel_diff": value, "max_abs_diff": 1.0, "mean_abs_diff": 0.5, "passed": passed, "max_diff_coord": [0, 1]}


REPORT: list[dict[str, Any]] = [
    {"type": "config", "config": {"baseline_path": "/b", "target_path": "/t"}},
    {"type": "rank_info", "label": "baseline", "rows": []},
    record("comparison_tensor", "layers.0.attn", diff=diff(True, 1e-6), replicated_checks=[{"passed": True}]),
    record("comparison_tensor", "layers.1.mlp", 2, diff=diff(False, 0.02)),
    record("comparison_tensor", "layers.2.mlp", diff=diff(True, 0.0), replicated_checks=[{"passed": False}]),
    record("comparison_tensor", "layers.3.mlp", shape_mismatch=True, diff=None),
    record("comparison_skip", "topk_ids", reason="baseline_load_failed"),
    record("comparison_non_tensor", "top_k", values_equal=True),
    record("comparison_error", "logits", exception_type="ValueError"),
    {"type": "summary", "total": 7, "passed": 2, "failed": 3, "skipped": 1, "errored": 1},
]


@pytest.mark.parametrize("earlier", [False, True])
def test_sglangs_report(earlier: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """earlier: the types were called comparison, skip and non_tensor, and errors warnings."""
    names = {"comparison_tensor": "comparison", "comparison_skip": "skip", "comparison_non_tensor": "non_tensor"}
    lines = [line | {"type": names.get(line["type"], line["type"])} if earlier else line for line in REPORT]
    path = tmp_path / "comparator_report.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = typed(capsys, "compare", path)
    assert (code, err) == (1, "")
    first, *bad = out.splitlines()
    assert first == "a report of SGLang's comparator: 7 rows; category: 3 failed, 2 passed, 1 skipped, 1 errored"
    assert bad[0].startswith("  row 2: layers.1.mlp: category failed, step 2, rel_diff 0.02, max_abs_diff 1.0, mean")
    assert [line.split(":")[1] for line in bad[:4]] == [" layers.1.mlp", " layers.2.mlp", " layers.3.mlp", " logits"]
    assert bad[4] == "the dumps themselves are compared by `accprobe compare BASELINE_DUMP TARGET_DUMP`"


PLAIN = """Config: {'baseline_path': '/b', 'target_path': '/t', 'start_step': 0}
[step=0] Raw [shape] [4, 8] vs [4, 8]\t[dtype] torch.bfloat16 vs torch.bfloat16
After unify [shape] [4, 8] vs [4, 8]\t[dtype] torch.bfloat16 vs torch.bfloat16
[mean] 0.0123 vs 0.0123 (diff: 0.0000)
✅ rel_diff=1e-06\tmax_abs_diff=0.01\tmean_abs_diff=0.001
max_abs_diff happens at coord=[0, 1] with baseline=0.5 target=0.51
Raw [shape] [4, 8] vs [4, 8]\t[🟠dtype] torch.float32 vs torch.bfloat16
❌ rel_diff=0.02\tmax_abs_diff=1.0\tmean_abs_diff=0.5
When downcast to torch.bfloat16: ✅ rel_diff=0.0001\tmax_abs_diff=0.1\tmean_abs_diff=0.01
Raw [shape] [4, 8] vs [8, 8]\t[dtype] torch.bfloat16 vs torch.bfloat16
⚠️ Shape mismatch
Raw [shape] [4, 8] vs [4, 8]\t[dtype] torch.bfloat16 vs torch.bfloat16
✅ rel_diff=0.0\tmax_abs_diff=0.0\tmean_abs_diff=0.0
Replicated checks:
  ❌ axis=tp group=0 idx=1 vs 0: rel_diff=1.000000e-02 max_abs_diff=1.000000e+00 mean_abs_diff=1.000000e-01
Skip: topk_ids (step=1) (baseline_load_failed)
NonTensor: top_k = 8 (int) [equal]
NonTensor: scale (step=2)
  baseline = 1.0 (float)
  target   = 2.0 (float)
Summary: 2 passed, 4 failed, 1 skipped (total 7)
"""
RICH = """╭──────────────────── Comparator Config ────────────────────╮
│   baseline_path : /b                                      │
╰───────────────────────────────────────────────────────────╯

\x1b[32m✅\x1b[0m \x1b[1;32mlayers.0.attn\x1b[0m ── bfloat16  [4, 8]
   rel_diff=1.00e-06  max_abs=1.00e-02  mean_abs=1.00e-03
   Bundle
      baseline  1 files × [4, 8] bfloat16
[step=2] ❌ non_intrusive__model.layers.1.mlp.down_proj.output ──
bfloat16  [4, 8]
   rel_diff=2.00e-02  max_abs=1.00e+00  mean_abs=5.00e-01
   max_abs @ [0, 1]: baseline=0.5  target=1.5
   ✅ downcast to torch.bfloat16: rel_diff=1.00e-04
   Replicated Checks
      ❌ axis=tp  group=0  idx=1 vs 0  rel_diff=1.00e-02  max_abs=1.00e+00

✅ layers.3.attn                  rel_diff=1.00e-07
❌ layers.3.mlp                   shape mismatch
⊘ topk_ids (step=1) ── skipped (baseline_load_failed)
⊘ bad (step=1) ── skipped (x)
  ✗ no dims were found
═ top_k = 8 (int) ✓
═ scale
  baseline = 1.0 (float)
  target   = 2.0 (float)
[step=3] logits ── errored (ValueError)
Traceback (most recent call last):
ValueError: no

╭───────────────────────── SUMMARY ─────────────────────────╮
│ 3 passed │ 4 failed │ 1 skipped │ 1 errored │ 9 total     │
╰───────────────────────────────────────────────────────────╯
"""
CHECKS = """df_target shape: (3, 5)
Check:
target=/t/step=0___rank=0___dump_index=1___name=embed.pt (duplicate_index=0)
baseline=/b/step=0___rank=0___dump_index=1___name=embed.pt (duplicate_index=0)
Raw [shape] torch.Size([4, 8]) vs torch.Size([4, 8])\t[dtype] torch.bfloat16 vs torch.bfloat16
✅ rel_diff=1e-07\t❌ max_abs_diff=0.01\t✅ mean_abs_diff=0.0001
max_abs_diff happens at coord=(0, 1) with baseline=0.5 target=0.51

Check:
target=/t/step=3___rank=0___dump_index=2___name=mlp___layer_id=1.pt (duplicate_index=0)
baseline=/b/step=3___rank=0___dump_index=2___name=mlp___layer_id=1.pt (duplicate_index=0)
Raw [shape] torch.Size([4, 8]) vs torch.Size([8, 8])\t[dtype] torch.bfloat16 vs torch.bfloat16
⚠️ Shape mismatch

Skip: target=/t/step=3___rank=0___dump_index=3___name=head.pt since no baseline
"""
LOG = "a log of SGLang's comparator:"
LOGS = {
    "plain.txt": (PLAIN, f"{LOG} 7 rows; category: 4 failed, 2 passed, 1 skipped", [
        "row 2: category failed, rel_diff 0.02, max_abs_diff 1.0, mean_abs_diff 0.5", "row 3: category failed, reason "
        "Shape mismatch", "row 4: category failed, rel_diff 0.0", "row 7: scale: category failed, step 2"]),
    "rich": (RICH, f"{LOG} 9 rows; category: 4 failed, 3 passed, 1 skipped, 1 errored", [
        "row 2: non_intrusive__model.layers.1.mlp.down_proj.output: category failed, step 2, rel_diff 2.00e-02, "
        "max_abs_diff 1.00e+00", "row 4: layers.3.mlp: category failed", "row 6: bad: category failed, step 1, reason",
        "row 8: scale: category failed", "row 9: logits: category errored, step 3, reason ValueError"]),
    "torn.log": (PLAIN.partition("Skip: topk")[0], f"{LOG} 4 rows; category: 3 failed, 1 passed", [
        "the log has no summary: it was cut off, or the comparison ended early"]),
    "other.log": (PLAIN.replace("2 passed, 4", "3 passed, 4"), f"{LOG} 7 rows; category: 4 failed", [
        "the log's summary is 3 passed, 4 failed, 1 skipped: not all of its lines could be read"]),
    "check.out": (CHECKS, "a log of SGLang's dump_comparator: 3 rows; rel_diff mark: 1 ✅, 1 Shape mismatch, 1 Skip; "
        "max_abs_diff mark: 1 ❌; mean_abs_diff mark: 1 ✅", [
        "row 1: embed: rel_diff mark ✅, max_abs_diff mark ❌, mean_abs_diff mark ✅, step 0, rel_diff 1e-07",
        "row 2: mlp: rel_diff mark Shape mismatch, step 3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_sglangs_logs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As dump_comparator prints it, as plain text, and through rich; made up in the form of SGLang's sources."""
    text, first, more = LOGS[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, out, err = typed(capsys, "compare", tmp_path / name)
    assert (code, err) == (1, "")
    assert out.startswith(first)
    assert not [line for line in more if line not in out], out
    assert ("summary" in out) == (name in ("torn.log", "other.log"))
    assert out.endswith("`accprobe compare BASELINE_DUMP TARGET_DUMP`\n")


@pytest.mark.parametrize(("text", "name", "passed"), [
    ("Skip: target=" + "name=" * 20_000 + " since no baseline", "name=" * 20_000, 0),  # 20 s without a bound
    ("Check:\ntarget=" + "x" * 4096 + "name=y.pt", "target=" + "x" * 4096 + "name=y.pt", 0),
    ("Check:\ntarget=" + "x" * 4000 + "name=y.pt", "y", 0),
    ("Check:\n\nSummary: " + "9" * 5000 + " passed", "", 10**18 - 1),
], ids=("many names", "far", "near", "number"))  # fmt: skip
def test_a_log_with_long_lines_is_read_at_once(text: str, name: str, passed: int, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(text, encoding="utf-8")
    concluded: Counter[str] = Counter()
    start = time.monotonic()
    assert [row["name"] for row in sglang_logs.rows(tmp_path / "a.log", concluded)] == [name]
    assert concluded["passed"] == passed
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("text", ["✅ all tests passed\n", "Check:\nthe log\n", "Config: {}\n", "Skip: this one\n"])
def test_another_log_is_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(text, encoding="utf-8")
    code, _, err = typed(capsys, "inspect", tmp_path / "a.log")
    assert (code, err.count("\n")) == (2, 1)
    assert "no file of a kind that is known" in err


HEAD = ",".join([*BASIC, "Result", "Err_message"])
LINE = f"{MLP}.output.0,x,a,b,c,d,error,far"


def test_a_sheet_beyond_the_bound_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(result_tables, "_SHEET", 1500)
    (tmp_path / "x.xlsx").write_bytes(xlsx([HEAD.split(","), LINE.split(",")] * 3, True))
    code, out, err = typed(capsys, "inspect", tmp_path / "x.xlsx")
    assert (code, out, err.count("\n")) == (2, "", 1), (out, err)


def test_words_of_a_file_are_printed_as_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "../../../etc/passwd\x1b[31m\nrow"
    rows = compared("Cosine|Result|Err_message", f"{MLP}.output.0|1e999|error|x")
    rows[1][0] = name
    write_csv(tmp_path / "a.csv", rows)
    code, out, err = typed(capsys, "inspect", tmp_path / "a.csv")
    assert (code, err, out.count("\n")) == (0, "", 4), out
    assert "\x1b" not in out


def test_answers_of_an_evaluation_are_named(tmp_path, capsys, monkeypatch):
    for side in "ab":
        (tmp_path / side / "predictions/m").mkdir(parents=True)
        items = {str(i): {"origin_prompt": f"q {i}", "prediction": "p"} for i in range(3)}
        (tmp_path / side / "predictions/m/gsm8k.json").write_text(json.dumps(items))
    code, out, _ = typed(capsys, "inspect", tmp_path / "a")
    assert (code, out.splitlines()[:2]) == (0, ["OpenCompass: 3 answers", "  gsm8k: no score of 3"])
    code, _, err = typed(capsys, "compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "o")
    assert (code, err.count("\n")) == (2, 1)
    assert "answers of OpenCompass are no dumps: `accprobe eval-diff" in err
    monkeypatch.setattr("vllm_accprobe.cli.compare_other._NAMES", 2)  # a folder that is too large to be looked through
    code, _, err = typed(capsys, "inspect", tmp_path / "a")
    assert (code, "is no dump of a format that is known" in err) == (2, True)


def test_dumps_are_opened_without_the_readers_of_tables():
    code = "import sys, vllm_accprobe.formats as f; assert f.__name__ + '.common.result_tables' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
