"""The dumps that the freeze runs every command on, made by the builders that the other tests have.

The problem: whoever moves or renames code must be able to show that no output changed, on dumps of every kind. The
idea: small dumps from fixed seeds, built anew each time, nothing of them committed; one function per kind, which writes
into the corpus directory what ``freeze_cases.py`` calls ``corpus/...``. This is the only module of the freeze that
imports anything of the package or of other tests but the command line. Not here: what is run on them (freeze_cases.py,
freeze_commands.py).

    python tests/freeze/freeze_corpus.py HOME    makes HOME/corpus
"""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS / "formats", TESTS / "opcheck", TESTS / "comparison", TESTS):  # some name neighbours without it
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import machines  # noqa: E402
import numpy as np  # noqa: E402
import picture_runs  # noqa: E402
import synthetic_model  # noqa: E402
import torch  # noqa: E402
from cli import cli_dumps  # noqa: E402
from comparison.plan.test_operators import Model  # noqa: E402
from dump.errcheck_reports import FOUND, report  # noqa: E402
from formats import test_atb, test_msit, test_msprobe, test_sglang, test_torchair  # noqa: E402
from formats.test_damaged_files import empty, garbage, truncated  # noqa: E402
from formats.test_hostile_formats import _more as hostile  # noqa: E402
from formats.test_named_files import arrays  # noqa: E402
from labels import atb_file  # noqa: E402
from opcheck import opdiff_files  # noqa: E402
from opcheck.layer_dumps import build as layer_calls  # noqa: E402
from opcheck.operator_dumps import OpMaker, W, X, Y  # noqa: E402
from opcheck.proof.test_replay_process import GAIN, dump as two_norms  # noqa: E402
from support.peer_dumps import unpack  # noqa: E402
from synthetic_model import capture, scaled, write  # noqa: E402

from vllm_accprobe import labels, set_label, set_task_id  # noqa: E402
from vllm_accprobe.capture.torch_model import Probe  # noqa: E402
from vllm_accprobe.cli import main  # noqa: E402
from vllm_accprobe.dump.findings import write as write_findings  # noqa: E402
from vllm_accprobe.dump.schema import Mask  # noqa: E402

ASK: dict[str, Any] = {"prompts": {"a": [3, 14, 15], "b": [2, 7]}, "tokens": 2}
DOWN, NORM = "model.layers.1.mlp.down_proj", "model.layers.1.input_layernorm"
ARCHIVES = ("a_msprobe_stat", "a_msprobe_tensor", "b_sglang_tp", "c_msit_torch", "d_xray_h5", "d_xray_h5_renamed",
            "e_atb", "e_atb_vs_torch", "f_torchair", "g_single", "h_hostile", "mindspore")  # fmt: skip


def build(home: Path) -> Path:
    """Makes ``home``/corpus, which must not be there, and returns it. Nobody waits for the disk: no dump of these needs
    to outlive the machine."""
    root = home / "corpus"
    root.mkdir(parents=True)
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], mock.patch.multiple(os, fsync=_no_sync, fdatasync=_no_sync):
        for make in (
            ours,
            of_tiny_models,
            of_operators,
            of_labels,
            killed,
            damaged,
            of_others,
            of_findings,
            of_machines,
        ):
            make(root)
    return root


def _no_sync(fd: int) -> None:
    pass


@contextlib.contextmanager
def small_and_the_same_everywhere() -> Iterator[None]:
    """Two layers instead of three. And ``exp`` and attention in float64: in float32 numpy and BLAS give other last bits
    with AVX-512 than with AVX2, which are other dumps; rounded from float64 they are the same."""
    attend = synthetic_model.Tiny._attend

    class Numpy:
        """numpy as that module alone sees it: numba, imported meanwhile, must find the real one."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def exp(self, x: np.ndarray) -> np.ndarray:
            return np.exp(np.asarray(x, np.float64)).astype(np.asarray(x).dtype)

    def wide_attend(q: np.ndarray, cache: dict[int, Any], at: int) -> np.ndarray:
        held = {p: tuple(np.asarray(t, np.float64) for t in kv) for p, kv in cache.items()}
        return attend(np.asarray(q, np.float64), held, at).astype(q.dtype)

    with (
        mock.patch.object(synthetic_model, "LAYERS", 2),
        mock.patch.object(synthetic_model, "np", Numpy()),
        mock.patch.object(synthetic_model.Tiny, "_attend", staticmethod(wide_attend)),
    ):
        yield


def ours(root: Path) -> None:
    """The synthetic transformer: clean, another batching, wrong in known ways, other dtypes, two ranks, a picture."""

    def heavier(weights: dict[str, np.ndarray]) -> None:
        weights["model.layers.0.mlp.down_proj"] *= 1.5

    def another(best: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.where(positions == 2, (best + 1) % synthetic_model.VOCAB, best)

    def broken(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
        values[positions == 1, 3] = np.nan
        return values

    mask = {2: (Mask(("a grammar",), "0" * 32), [5, 6, 7])}
    late = scaled(1.3, lambda positions, decode: positions >= 2)
    made: dict[str, dict[str, Any]] = {
        "clean": {}, "chunked": {"chunk": 2}, "alone": {"together": False}, "noisy": {"noise": 1e-3},
        "faulty": {"faults": {DOWN: scaled(1.2)}}, "late": {"faults": {NORM: late}},
        "two": {"faults": {NORM: scaled(1.3), DOWN: scaled(1.4)}}, "nan": {"faults": {NORM: broken}},
        "logits": {"faults": {"logits_processor": scaled(-1.0)}}, "flipped": {"sampler": another},
        "weights": {"weights": heavier}, "bare": {"params": False}, "masked": {"mask": mask},
        "float32": {"dtype": "float32"}, "float32-faulty": {"dtype": "float32", "faults": {DOWN: scaled(1.001)}},
        "float16-like": {"dtype": "float32", "noise": 3e-4},
        "tp2": {"tp": 2}, "tp2-faulty": {"tp": 2, "rank_fault": f"{DOWN}/output.0"},
        "tp2-same-fault": {"tp": 2, "faults": {DOWN: scaled(1.2)}},
    }  # fmt: skip
    with small_and_the_same_everywhere():
        for name, how in made.items():
            write(capture(**ASK, **how), root / name)
        for name, how in (("stats", {}), ("stats-faulty", {"faults": {DOWN: scaled(1.2)}})):
            write(capture(**ASK, **how), root / name, payloads=False)
        write(capture(prompts={"a": [9]}, tokens=2), root / "other-prompt")
        pixels = picture_runs.PIXELS
        with mock.patch.object(synthetic_model, "PROMPTS", ASK["prompts"]):
            for name, dtype, off in (("vision", "uint8", 0.0), ("vision-faulty", "uint8", 0.1)):
                write(picture_runs.seen(pixels, dtype, off=off), root / name)
            values = picture_runs.NORMALISED
            write(picture_runs.seen(values, "bfloat16", hashed="new"), root / "vision-normalised")


def of_tiny_models(root: Path) -> None:
    """Small whole numbers through the writer, of one and two ranks; two norms for the replay."""
    cli_dumps.make(root / "plain")
    cli_dumps.make(root / "plain-again")
    cli_dumps.make(root / "plain-two-ranks", ranks=2)
    cli_dumps.make(root / "plain-stats", stats=True)
    two_norms(root / "norms", noise=0)
    two_norms(root / "norms-faulty", GAIN)
    two_norms(root / "norms-worse", 1.2)


def of_operators(root: Path) -> None:
    """Calls of modules and of operators, honest and wrong; a whole capture with operators through the probe."""
    layer_calls(root / "calls")
    layer_calls(root / "calls-attention", "layers.0.self_attn.attn")
    layer_calls(root / "calls-norm", "layers.0.norm")
    layer_calls(root / "calls-projection", "layers.0.self_attn.o_proj")
    layer_calls(root / "calls-nan", "nan")
    layer_calls(root / "calls-headless", first=1, weights=False)
    for name, off in (("ops", 1.0), ("ops-faulty", 1.05)):
        m = OpMaker(root / name)
        m.module("layers.0.norm", "RMSNorm")
        m.request(0, 9)
        m.step(0, [(0, 0, 9)])
        product, total = (X.double() @ W.double()).bfloat16(), (X.double() + Y.double()).bfloat16()
        product[:, 5] *= off
        m.op("aten.mm.default", [X, W], {"output.0": product}, module="layers.0.norm")
        m.op("aten.add_.Tensor", [X, Y], {"output.0": total, "inplace.input.0": total}, mutates=("input.0",))
        m.op("aten.sum.dim_IntList", [X, {"list": [1]}, True], {"output.0": X.double().sum(1, keepdim=True).float()},
             kwargs={"dtype": {"dtype": "float32"}})  # fmt: skip
        m.op("aten.topk.default", [X, 3], dict(zip(("output.0", "output.1"), X.topk(3), strict=True)))
        m.op("their.own.default", [X], {"output.0": X})
        m.close()
    for name, slip in (("probed", 0.0), ("probed-faulty", 0.5)):
        with Probe(Model(slip), dir=root / name, ops=True) as probe:
            ids = torch.arange(18).reshape(2, 9)
            for start in range(2):
                probe.model(ids[start : start + 1], torch.ones(1, 9))


def of_machines(root: Path) -> None:
    """Machines that round and sum in ways of their own, for opcheck's habits; and two csv files of other runs."""
    machines.dump(root / "machine", machines.HONEST, only="norm linear")
    odd = machines.one_of(replace(machines.HONEST, last=machines.zero))
    machines.dump(root / "machine-odd", odd, only="norm linear")
    for name, factor in (("gpu", 1.0), ("npu", 1.03)):
        rows = [opdiff_files.row(op, factor=factor) for op in opdiff_files.FIVE.values()]
        rows.append(opdiff_files.unmeasured("their.own.default", "skip", "no reference"))
        (root / f"opdiff-{name}").mkdir()
        opdiff_files.write(root / f"opdiff-{name}" / "opcheck.csv", rows)
        file = f"accuracy_checking_details_{name}.csv"
        opdiff_files.details(root, file, opdiff_files.CHINESE, 1 if name == "gpu" else 2)


def of_labels(root: Path) -> None:
    """Pairs of labels that agree, differ, lack a partner, and lie in files of ATB."""
    base = torch.linspace(-2, 3, 24).reshape(4, 6)
    wrong, nan = base.clone(), base.clone()
    wrong[2, 3], nan[0, 0] = 9.0, float("nan")
    given = {"same": (base, base.clone()), "half": (base, base.half()), "wrong": (base, wrong), "nan": (base, nan),
             "short": (base, base[:2])}  # fmt: skip
    atb_file.write(root / "atb-file/outtensor0.bin", base.numpy(), atb_file.FLOAT)
    with mock.patch.dict(os.environ, {"VLLM_ACCPROBE_DIR": str(root / "labels")}):
        set_task_id()
        try:
            for name, (pta, acl) in given.items():
                set_label("pta", name, pta)
                set_label("acl", name, acl)
            set_label("pta", "lonely", base)
            set_label("pta", "file", base)
            set_label("acl", "file", tensor_path=str(root / "atb-file/outtensor0.bin"))
        finally:
            labels.close()


def killed(root: Path) -> None:
    """Runs that ended in the middle: no end, a torn line, a segment that is gone, one that is cut."""
    cli_dumps.make(root / "killed", close=False)
    torn = cli_dumps.make(root / "torn") / "rank0000/journal.jsonl"
    text = torn.read_bytes()
    torn.write_bytes(text[: text.rindex(b'{"event":"end"')] + b'{"ev')
    segment = root / "torn/rank0000/seg-00000.safetensors"
    segment.rename(segment.with_name(segment.name + ".part"))
    (cli_dumps.make(root / "lost") / "rank0000/seg-00000.safetensors").unlink()
    cut = cli_dumps.make(root / "cut") / "rank0000/seg-00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:700])
    early = cli_dumps.make(root / "early") / "rank0000/journal.jsonl"
    lines = early.read_bytes().splitlines(keepends=True)
    early.write_bytes(b"".join(lines[: next(i for i, line in enumerate(lines) if b'"step"' in line)]))


def damaged(root: Path) -> None:
    """What is no dump, or one that means harm; see tests/formats."""
    for name, spoil in (("truncated", truncated), ("empty", empty), ("garbage", garbage)):
        journal = cli_dumps.make(root / f"bad-{name}") / "rank0000/journal.jsonl"
        spoil(journal)
    (root / "bad-nothing").mkdir()
    (root / "bad-text.txt").write_text("no dump\n")
    (cli_dumps.make(root / "bad-run") / "run.json").write_text("[" * 1000)
    hostile(root / "hostile")


def of_others(root: Path) -> None:
    """Other tools' dumps: the packed ones, small ones that the tests of each format write, and ours converted."""
    for name in ARCHIVES:
        unpack(name, root)
    # msprobe, two steps of two ranks
    for side in ("golden", "mine"):
        for step in (0, 2):
            for rank in (0, 1):
                value = step * 10 + rank + 0.5 * (side == "mine" and (step, rank) == (2, 1))
                test_msprobe.write(root / f"msprobe-{side}/step{step}/rank{rank}", *test_msprobe.one(value))
    # msit, and a flat graph of ATB against it
    for device in (0, 1):
        for token in (0, 2):
            x = torch.full((1, 3), 10.0 * token + device)
            test_msit._module(root / "msit", f"{device}_77{device}", token, "root.a", input_0=x, output_0=x,
                              output_1=(x, x + 1))  # fmt: skip
    for name, fault in (("", False), ("-faulty", True)):
        test_atb._model(root / f"flat{name}-torch", root / f"flat{name}-atb", fault)
    # SGLang: two ranks of each of two groups
    whole = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    test_sglang._save(root / "sglang-one", "x", 0, whole, None, {})
    for cp, rows in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        for tp in range(2):
            info = {"cp_rank": cp, "cp_size": 2, "tp_rank": tp, "tp_size": 2}
            part = whole[rows][:, 2 * tp : 2 * tp + 2].contiguous()
            test_sglang._save(root / "sglang-four", "x", 2 * cp + tp, part, "t[cp:zigzag] h[tp]", info)
    # the graph engine's own files
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7, 8], np.int64)
    test_torchair.ge(root / "ge/0/Add.Add_1.3.6.1795200000000000", [a, b], [a * 2], "Add_1")
    test_torchair.ge(root / "ge-faulty/0/Add.Add_1.3.6.1795200000000000", [a, b], [a * 3], "Add_1")
    # plain files, with names that say places
    for side, factor in (("npy", 1.0), ("npy-faulty", 1.5)):
        for step in (1, 2):
            where = root / side / str(step)
            where.mkdir(parents=True)
            for name, value in arrays(step).items():
                wrong = factor if name.startswith("layers.0") and "output" in name else 1.0
                np.save(where / f"{name}.npy", value * np.float32(wrong))
    for kind in ("h5", "npz", "safetensors"):
        for name in ("plain", "faulty"):
            assert main(["convert", str(root / name), str(root / f"{name}.{kind}"), "--to", kind]) == 0
    shutil.copytree(root / "f_torchair/fx_golden", root / "fx-copy")


def of_findings(root: Path) -> None:
    """What `accprobe errcheck` leaves behind."""
    for name, reports in (
        ("found", [report(0), report(3, None, later=2, places={"a": 2}, parameters=("w: 1 NaN, 0 Inf",))]),
        ("found-later", [report(0), report(1, replace(FOUND, step=8, kind="Inf"))]),
        ("found-nothing", [report(0, None)]),
    ):
        (root / name).mkdir()
        for r in reports:
            write_findings(root / name, r)
    (root / "found-damaged").mkdir()
    (root / "found-damaged/errcheck-rank0000.json").write_text('{"schema": 1, "rank": "0"}')


if __name__ == "__main__":
    build(Path(sys.argv[1]))
