"""Two machines' csv files for opdiff: rows as opcheck writes them, and msprobe's details."""

import csv
from pathlib import Path

import numpy as np

from vllm_accprobe.opcheck.measures import Measures, measure

ID = ("op", "class", "tap", "call", "role", "step", "rank", "dtype", "shape")
REFERENCE = np.random.default_rng(1).standard_normal((8, 100))


def bfloat16(x):
    """Rounded to nearest, ties to even; float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def row(op="aten.exp.default", *, factor=1.0, role="output.0", call=0, dtype="bfloat16", status="pass", message="",
        cls=None, **changes):  # fmt: skip
    """A row of opcheck.csv: REFERENCE times ``factor``, rounded to ``dtype``, measured."""
    g = np.round(REFERENCE * 10) if dtype == "int64" else REFERENCE
    m = g * factor
    m = {"bfloat16": bfloat16, "float32": np.float32, "int64": np.int64, "float64": np.float64}[dtype](m)
    if op in EXACT:  # what only moves values is exact: its reference is what the captured dtype holds
        g = bfloat16(g).astype(np.float64)
    found = measure(g, m, dtype)
    values = dict(zip(ID, (op, cls or op, "model.layers.0.x", call, role, 0, 0, dtype, "[8, 100]"), strict=True))
    values |= cells_of(found) | {"status": status, "message": message}
    return {k: "" if v is None else v for k, v in (values | changes).items()}


EXACT = ("aten.sort.default",)


def cells_of(m):
    return {n: "" if getattr(m, n) is None else getattr(m, n) for n in Measures.FIELDS}


def unmeasured(op, status, message, **changes):
    return row(op, status=status, message=message, **dict.fromkeys(Measures.FIELDS, "")) | changes


def write(path: Path, rows, drop=()):
    names = [n for n in rows[0] if n not in drop]
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


FIVE = {
    "absolute threshold": "aten.mul.Tensor", "benchmark ratio": "RMSNorm", "binary consistency": "aten.sort.default",
    "ULP": "aten.mm.default", "dual-1000": "aten.convolution.default",
}  # fmt: skip
CHINESE = (
    "API Name", "Bench Dtype", "DEVICE Dtype", "Shape", "余弦相似度", "最大绝对误差", "双百指标", "双千指标",
    "双万指标", "二进制一致错误率", "误差均衡性", "均方根误差", "小值域错误占比", "相对误差最大值",
    "相对误差平均值", "inf/nan错误率", "相对误差错误率", "绝对误差错误率", "ULP误差最大值", "ULP误差平均值",
    "ULP误差大于阈值占比", "Status", "Message",
)  # fmt: skip
ENGLISH = (
    "API name", "Bench Dtype", "DEVICE Dtype", "Shape", "Cosine similarity", "Maximum absolute error",
    "Dual-100 metric", "Dual-1000 metric", "Dual-10000 metric", "Binary consistency error rate", "Error balance",
    "Root-mean-square error (RMSE)", "Error ratio in small value range", "Maximum relative error",
    "Mean relative error", "inf/nan error rate", "Relative error rate", "Absolute error rate", "Maximum ULP error",
    "Mean ULP error", "Proportion of ULP errors greater than the threshold", "Status", "Message",
)  # fmt: skip
SMALL, RMSE, TOP, MEAN, BALANCE = "小值域错误占比", "均方根误差", "相对误差最大值", "相对误差平均值", "误差均衡性"
ULP, ULPS, BINARY, DUAL = "ULP误差平均值", "ULP误差大于阈值占比", "二进制一致错误率", "双千指标"
INF, REL, ABS = "inf/nan错误率", "相对误差错误率", "绝对误差错误率"


def details(tmp_path, name, header, f):
    """What release 1.0.4 writes: each API has its own algorithm's columns, the others are a space. f: 1 is right."""
    bad = f != 1
    lines = (
        ("Functional.softmax.0.forward.output.0", "bfloat16", {SMALL: 0.01 * f, RMSE: 0.1 * f, TOP: 0.1 * f,
                                                               MEAN: 0.1 * f, BALANCE: 0.1, "Message": "fine\n"}),
        ("Torch.mm.3.forward.output.0", "float32", {ULP: 50 * f, ULPS: 0.06 * f}),
        ("Torch.mm.3.backward.output.0", "float32", {ULP: 1, ULPS: 0}),
        ("Torch.mm.3.backward.output.1", None, {"Status": "SKIP", "Message": "requires_grad is False"}),
        ("Tensor.mul_.1.forward.output.0", "float16", {INF: 0, REL: 0.1 * bad, ABS: 0}),
        ("Torch.sort.0.forward.output.1", "int64", {BINARY: 0.2 * bad}),
        ("Functional.conv2d.0.forward.output.0", "bfloat16", {DUAL: 0.9 if bad else 0.9995}),
        ("Torch.linalg.inv.0.forward.output.0", "float64", {"余弦相似度": 1}),
    )  # fmt: skip
    path = tmp_path / name
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for api, dtype, values in lines:
            known = {"API Name": api, "DEVICE Dtype": f"torch.{dtype}" if dtype else " ", "Shape": "(4, 5)"}
            known |= {"Status": "pass", **values}
            writer.writerow([known.get(c, " ") for c in CHINESE])
    return path
