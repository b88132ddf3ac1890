"""accprobe opdiff: two machines' csv joined and judged, in all formats, and everything that can be wrong with them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from opcheck.opdiff_files import CHINESE, ENGLISH, bfloat16, cells_of, details, row, unmeasured, write
from support.csv_rows import csv_rows as read

from vllm_accprobe import cli
from vllm_accprobe.opcheck.diff import Sheet, SheetError, gathered
from vllm_accprobe.opcheck.measures import Measures, measure


class Out:
    """What a run printed and wrote."""

    def __init__(self, tmp_path, capsys, *options):
        self.dir = tmp_path / "out"
        self.code = cli.main(["opdiff", *map(str, options), "--out", str(self.dir)])
        self.stdout, self.stderr = capsys.readouterr()
        note, _, self.stderr = self.stderr.partition("\n")
        assert note == "note: `accprobe opdiff` is now `accprobe compare GOLDEN.csv MINE.csv`"

    def __getattr__(self, name):
        return read(self.dir / f"{name}.csv")


@pytest.fixture
def opdiff(tmp_path, capsys):
    """Judges rows, or two files, and gives what came of it."""

    def run(golden, mine, *options):
        files = [
            side if isinstance(side, Path) else write(tmp_path / f"{name}.csv", side)
            for name, side in (("gpu", golden), ("npu", mine))
        ]
        if files[0] == files[1]:  # one file given twice is refused; a copy is another machine that got the same
            files[1] = tmp_path / "same" / files[1].name
            shutil.rmtree(files[1].parent, ignore_errors=True)
            copy = shutil.copytree if files[0].is_dir() else shutil.copy
            files[1].parent.mkdir()
            copy(files[0], files[1])
        return Out(tmp_path, capsys, *files, *options)

    return run


def test_outputs_of_a_call_become_one_row_of_result(opdiff):
    def side(*factors):
        roles = ("output.0", "output.1", "grad.input.x")
        return [row(role=r, factor=f) for r, f in zip(roles, factors, strict=True)] + [row(call=1)]

    out = opdiff(side(1, 1, 1), side(1, 1.1, 1))
    assert [(r["call"], r["forward"], r["backward"], r["outputs"]) for r in out.result] == [
        ("0", "error", "pass", "3"), ("1", "pass", "", "1")
    ]  # fmt: skip
    assert "times golden's" in out.result[0]["message"]
    assert opdiff(side(1, 1, 1), side(1, 1, 1.1)).result[0]["backward"] == "error"


def test_rows_of_one_side_are_counted_and_decide_nothing(opdiff):
    out = opdiff([row("a.b"), row("a.c"), row("a.d")], [row("a.b"), row("a.e")])
    assert out.code == 0
    assert [(r["op"], r["status"], r["message"]) for r in out.details[1:]] == [
        ("a.e", "skip", "only in mine"), ("a.c", "skip", "only in golden"), ("a.d", "skip", "only in golden")
    ]  # fmt: skip
    assert "2  outputs: only in" in out.stdout
    assert "gpu.csv (golden)" in out.stdout
    assert {r["op"]: r["forward"] for r in out.result}["a.e"] == "skip"


def test_a_call_that_was_made_twice_meets_its_own_turn(opdiff):
    out = opdiff([row(), row(factor=1.1)], [row(), row(factor=1.1), row()])
    assert [r["status"] for r in out.details] == ["pass", "pass", "skip"]


def test_what_has_no_measures_says_why(opdiff):
    good = row("a.good")
    golden = [good, row("a.crash"), unmeasured("a.both", "error", "boom"), row("a.skip"), row("a.shape"),
              unmeasured("a.gone", "skip", "no reference")]  # fmt: skip
    mine = [
        good, unmeasured("a.crash", "error", "RuntimeError: no kernel"), unmeasured("a.both", "error", "bang"),
        row("a.skip", status="skip", message="an approximation"), row("a.shape", shape="[800]"), row("a.gone"),
    ]  # fmt: skip
    out = opdiff(golden, mine)
    assert out.code == 1
    assert [(r["status"], r["message"]) for r in out.details] == [
        ("pass", ""),
        ("error", "mine has no result: RuntimeError: no kernel"),
        ("skip", "golden has no result: boom"),
        ("skip", "mine: an approximation"),
        ("skip", "shapes differ: golden [8, 100], mine [800]"),
        ("skip", "golden: no reference"),
    ]
    assert "1  outputs: mine: an approximation" in out.stdout


def test_dtypes_that_differ_are_said(opdiff):
    """A float32 kernel's errors are no measure of a bfloat16 kernel's; what mine alone decides is judged."""
    golden = [row(op, dtype="float32") for op in ("aten.exp.default", "aten.mm.default", "aten.convolution.default")]
    out = opdiff(golden, [row(r["op"]) for r in golden])
    assert [(r["status"], r["message"]) for r in out.details] == [
        ("skip", "dtypes differ: golden float32, mine bfloat16; errors have no ratio"),
        ("pass", "golden is float32, mine bfloat16"),
        ("error", out.details[2]["message"]),
    ]
    lucky = row("aten.mm.default", dtype="float32", ulp_share=0.9)
    assert opdiff([lucky], [row("aten.mm.default", ulp_share=0.5)]).details[0]["status"] == "error"
    out = opdiff([row(dtype="float64")], [row(dtype="float64")])
    assert (out.code, out.details[0]["message"]) == (3, "float64 is not judged by this standard")
    assert out.stderr.startswith("accprobe: nothing could be judged: float64 is not judged by this standard (")


def test_an_algorithm_for_an_operator(opdiff):
    golden, mine = [row("vendor.norm.default")], [row("vendor.norm.default", factor=1.03)]
    assert opdiff(golden, mine).details[0]["algorithm"] == "benchmark ratio"
    for name, said in (("ulp", "ULP"), ("absolute", "absolute threshold"), ("accumulative", "accumulative error"),
                       ("dual-1000", "dual-1000"), ("binary", "binary consistency")):  # fmt: skip
        assert opdiff(golden, mine, "--algorithm", f"no*={name}").details[0]["algorithm"] == said
        assert opdiff(golden, mine, "--algorithm", f"vendor.*={name}").details[0]["algorithm"] == said


@pytest.mark.parametrize("header", [CHINESE, ENGLISH])
@pytest.mark.parametrize("standard", ["msprobe", "msprobe-1.0"])
def test_msprobes_details(opdiff, tmp_path, header, standard):
    gpu, npu = details(tmp_path, "a.csv", header, 1), details(tmp_path, "b.csv", header, 30)
    out = opdiff(gpu, gpu, "--standard", standard)
    assert out.code == 0
    expected = [
        ("softmax", "benchmark ratio"), ("mm", "ULP"), ("mm", "ULP"), ("mm", ""), ("mul_", "absolute threshold"),
        ("sort", "binary consistency"), ("conv2d", "dual-1000"), ("linalg.inv", ""),
    ]  # fmt: skip
    assert [(r["api"], r["algorithm"]) for r in out.details] == expected
    assert [r["status"] for r in out.details] == ["pass", "pass", "pass", "skip", "pass", "pass", "pass", "skip"]
    out = opdiff(gpu, npu, "--standard", standard)
    assert [r["status"] for r in out.details] == ["error", "error", "pass", "skip", "error", "error", "error", "skip"]
    assert out.details[3]["message"] == "golden: requires_grad is False"
    assert [(r["api_name"], r["forward"], r["backward"]) for r in out.result] == [
        ("Functional.softmax.0", "error", ""), ("Torch.mm.3", "error", "pass"), ("Tensor.mul_.1", "error", ""),
        ("Torch.sort.0", "error", ""), ("Functional.conv2d.0", "error", ""), ("Torch.linalg.inv.0", "skip", ""),
    ]  # fmt: skip
    assert out.code == 1


def test_a_csv_without_some_identifying_columns(opdiff, tmp_path):
    """A generated test may know less of a call than opcheck did."""
    golden = write(tmp_path / "a.csv", [row("a.b"), row("a.c")])
    mine = write(tmp_path / "b.csv", [row("a.c")], ("step", "rank"))
    out = opdiff(golden, mine)
    assert [(r["op"], r["status"]) for r in out.details] == [("a.c", "pass"), ("a.b", "skip")]
    assert "step" not in out.details[0]


def test_names_that_cannot_be_parsed_are_counted(opdiff, tmp_path):
    files = [details(tmp_path, name, CHINESE, 1) for name in ("a.csv", "b.csv")]
    text = files[1].read_text(encoding="utf-8")
    files[1].write_text(text.replace("Torch.sort.0.forward.output.1", "free text"), encoding="utf-8")
    out = opdiff(*files)
    assert f"names in {files[1]} that cannot be parsed, each its own operator: 1, the first 'free text'" in out.stdout
    assert f"names in {files[0]} that cannot" not in out.stdout


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "the file is empty"),
        (b"\n1,2\n", "the first line is empty; a header is needed"),
        (b"a,b\n1,2\n", "it has no column 'op'"),
        (b"op,b\nmm,2\n", "it has no column 'dtype'"),
        (b"op,dtype\nmm,float32\n", "it has no column of measures"),
        (b"dtype,cosine\nfloat32,1\n", "it has no column 'op'"),
        (b"op,op,dtype,cosine\n", "two columns are called 'op'"),
        (b"op,dtype,cosine\nmm,float32\n", "line 2 has 2 cells instead of 3; is it whole?"),
        (b"op,dtype,cosine\nmm,float32,1\nmm,float32,high\n", "line 3: cosine is 'high', which is no number"),
        (b"op,dtype,cosine\nmm,\xff\xfe,1\n", "not UTF-8 text"),
        (b"op,dtype,cosine\n" + b"m" * (1 << 21) + b",float32,1\n", "line 2 is no csv: field larger than field limit"),
        (b"PK\x03\x04\x00\x00\x00", "tables that are compared are opcheck.csv"),
        (b"API Name,Status\nx,pass\n", "it has no column 'DEVICE Dtype'"),
        ("op,dtype,cosine,rmse,均方根误差\nmm,float32,1,0,0\n".encode(), "of accprobe (cosine) and of msprobe"),
        (b"API name,DEVICE Dtype,Status,normal_rmse,Root-mean-square error (RMSE)\n", "and of msprobe (Root-mean-"),
    ],
)
def test_bad_files_are_one_clear_line(opdiff, tmp_path, content, line):
    bad = tmp_path / "bad.csv"
    bad.write_bytes(content)
    good = write(tmp_path / "good.csv", [row()])
    for pair in ((bad, good), (good, bad)):
        out = opdiff(*pair)
        assert out.code == 2
        assert line in out.stderr
        assert str(bad) in out.stderr
        assert out.stderr.count("\n") == 1
        assert not list(tmp_path.glob("out/*"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 1 << 30), st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=6)), max_size=6), st.booleans()
)
def test_spoilt_files_are_read_or_refused_in_one_line(tmp_path, cut, edits, theirs):
    """Bytes overwritten anywhere, the end cut off: rows, or a SheetError with the file's name."""
    path = tmp_path / "spoilt.csv"
    if not path.exists():
        write(path, [row(), row(op='a,"b')])
        details(tmp_path, "theirs.csv", CHINESE, 2)
        (tmp_path / "ours").write_bytes(path.read_bytes())
    data = bytearray((tmp_path / ("theirs.csv" if theirs else "ours")).read_bytes())
    for at, what in edits:
        data[at % len(data) : at % len(data) + len(what)] = what
    path.write_bytes(data[: cut % (2 * len(data))])
    said = ""
    try:
        assert all(len(r.numbers) == len(Measures.FIELDS) for r in Sheet(path).rows())
    except SheetError as e:
        said = str(e)
    assert not said or (str(path) in said and "\n" not in said)


def test_bad_usage(opdiff, tmp_path):
    good, theirs = write(tmp_path / "good.csv", [row()]), details(tmp_path, "theirs.csv", CHINESE, 1)
    (tmp_path / "empty").mkdir()
    for pair, options, line in (
        ((good, tmp_path / "none.csv"), (), "none.csv does not exist: name an opcheck.csv"),
        ((good, tmp_path), (), "2 files may be meant (good.csv, theirs.csv); name one"),
        ((good, tmp_path / "empty"), (), "no csv file is in this folder"),
        ((good, theirs), (), "theirs.csv is msprobe's: two files of one kind are needed"),
        ((good, good), ("--algorithm", "mm=fast"), "'mm=fast' is not GLOB=NAME with NAME one of absolute, benchmark"),
        ((good, good), ("--algorithm", "mm=ulp", "--standard", "xray"), "xray has no algorithms to choose from"),
        ((good, good), ("--by", "layer"), "--by: 'layer' is none of call, tap, operator"),
        ((theirs, theirs), ("--by", "tap"), "--by tap: msprobe's files name calls, not modules"),
    ):
        out = opdiff(*pair, *options)
        assert (out.code, out.stderr.count("\n")) == (2, 1)
        assert line in out.stderr


def test_runs_that_batched_differently_meet_by_tap_and_by_operator(opdiff):
    """Nothing of the two meets call by call; all calls of a module together do, and a failed call is not lost."""

    def side(rows, factor=1.0, fail=()):
        made = []
        for layer in range(2):
            for step, n in enumerate(rows):
                f = factor if layer else 1.0
                r = row("RMSNorm", tap=f"layers.{layer}.norm", step=step, shape=f"[{n}, 100]", factor=f)
                made.append(unmeasured("RMSNorm", "error", "boom", tap=r["tap"], step=step) if step in fail else r)
        return made

    golden, mine = side([8, 1, 1]), side([4, 2, 2, 3], factor=1.03)
    apart = opdiff(golden, mine)
    assert apart.code == 3
    assert "6  outputs: shapes differ" in apart.stdout
    assert "few calls meet; did the runs batch differently? --by tap" in apart.stdout
    by_tap = opdiff(golden, mine, "--by", "tap")
    assert by_tap.code == 1
    assert [(r["tap"], r["status"]) for r in by_tap.details] == [("layers.0.norm", "pass"), ("layers.1.norm", "error")]
    assert [(r["tap"], r["forward"], r["outputs"]) for r in by_tap.result] == [
        ("layers.0.norm", "pass", "1"), ("layers.1.norm", "error", "1")
    ]  # fmt: skip
    by_operator = opdiff(golden, mine, "--by", "operator")
    assert [(r["op"], r["status"]) for r in by_operator.details] == [("RMSNorm", "error")]
    failed = opdiff(golden, side([4, 2, 2, 3], fail=(2,)), "--by", "tap")
    assert {r["message"] for r in failed.details} == {"mine has no result: 1 of 4 calls: boom"}
    assert failed.code == 1


def test_gathered_measures_are_those_of_one_large_tensor(tmp_path):
    """Of three calls as if they had been one; what a csv cannot know stays within the calls' own range."""
    r = np.random.default_rng(5)
    parts = [(g, bfloat16(g * 1.004)) for g in (r.standard_normal(n) * s for n, s in ((50, 1), (7, 30), (200, 0.1)))]
    rows = [row("a.b", step=i) | cells_of(measure(*p, "bfloat16")) for i, p in enumerate(parts)]
    whole = measure(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), "bfloat16")
    sheet = Sheet(write(tmp_path / "a.csv", rows))
    (one,) = gathered(sheet.rows(("op", "role")))
    loose = {"cosine", "rel_l2", "error_balance", "mean_rel_err", "kl"}
    ends = ("rel_err_ratio", "abs_err_ratio", "small_value_err_ratio")
    loose |= {n for n in Measures.FIELDS if "normal_" in n or n.endswith(ends)}
    for name in Measures.FIELDS:
        single = [float(r[name]) for r in rows if r[name] != ""]
        if name in loose:
            low, high = min(single, default=0.0), max(single, default=0.0)
            assert low * (1 - 1e-9) <= (one.value(name) or 0.0) <= high * (1 + 1e-9), name
    assert one.value("normal_max_rel_err") == pytest.approx(whole.normal_max_rel_err)


def test_nan_is_not_lost_in_a_maximum(opdiff):
    golden, nan = [row(step=i) for i in range(3)], row(step=1, normal_max_rel_err="nan")
    for mine in ([nan, row(step=2)], [row(step=2), nan]):
        assert opdiff(golden, mine, "--by", "tap").details[0]["status"] == "error"


def test_hostile_text_stays_text(opdiff):
    evil = "=HYPERLINK(1)"
    golden = [row(evil, tap="a|b<script>\x1b[31m")]
    out = opdiff(golden, [row(evil, tap="a|b<script>\x1b[31m", factor=2)])
    assert out.details[0]["op"] == "'" + evil
    assert out.result[0]["op"] == "'" + evil
    assert "\x1b" not in out.stdout
    page = (out.dir / "opdiff.md").read_text(encoding="utf-8")
    assert "a\\|b&lt;script>\\x1b[31m" in page
    assert "\x1b" not in page


def test_no_torch_is_needed(tmp_path):
    path = write(tmp_path / "a.csv", [row()])
    code = (
        "import json, sys; from vllm_accprobe import cli; code = cli.main(sys.argv[1:]);"
        "print(json.dumps([code, sorted({n.split('.')[0] for n in sys.modules})]))"
    )
    copy = write(tmp_path / "b.csv", [row()])
    command = [sys.executable, "-c", code, "compare", str(path), str(copy), "-o", str(tmp_path / "o")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    code, modules = json.loads(out.stdout.splitlines()[-1])
    assert code == 0
    assert not {"torch", "vllm", "pandas", "numba"} & set(modules)
