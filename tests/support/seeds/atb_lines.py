"""The lines of document 004 on the check of single operators, section 1.3: ``ait llm opcheck``."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from support.seeds.line import Line

TENSORS = "OUTPUT_DIR/ait_dump/tensors/0_71/0"
TABLE = "OUTPUT_DIR/ait_dump/operation_io_tensors/71/operation_tensors_0.csv"
NO_CARD = "ATB itself, which needs CANN and a card"
WHERE = f"-j 0 -i {TENSORS} -c {TABLE} -o xx/opcheck"


def prepare(home: Path) -> None:
    """A product at 2_3_5, at 24_1 an attention of which one number is wrong; in a table what they were made with."""
    import numpy as np
    import torch
    from atb_dumps import MadeCall, attend, bits, faulty, normal, wide, write_call

    rng = np.random.default_rng(4)
    x, w, q, k, v = (normal(rng, *s) for s in ((6, 16), (8, 16), (6, 4, 8), (6, 2, 8), (6, 2, 8)))
    right = bits(attend(wide(q), wide(k), wide(v), 0.25))
    calls = [
        ("2_Layer/3_Mlp", 5, MadeCall("LinearOperation", {"hasBias": False}, [x, w], [bits(wide(x) @ wide(w).T)])),
        ("24_Layer", 1, MadeCall("SelfAttentionOperation",
            {"headNum": 4, "kvHeadNum": 2, "qkScale": 0.25, "calcType": 3, "maskType": 0},
            [q, k, v, torch.tensor([6], dtype=torch.int32)], [faulty(right)])),
        ("24_Layer", 2, MadeCall("ElewiseOperation", {"elewiseType": 8}, [x, x], [bits(2 * wide(x))])),
    ]  # fmt: skip
    lines = ["CaseNum|CaseName|OpName|OpParam"]
    for above, number, call in calls:
        made = MadeCall(call.kind, None, call.inputs, call.outputs)
        write_call(home / "OUTPUT_DIR/ait_dump", made, number, above=above, process="0_71")
        ids = "_".join(part.split("_")[0] for part in above.split("/"))
        lines.append(f"{len(lines)}|{call.kind}|{call.kind}_{ids}_{number}|{json.dumps(call.param)}")
    (home / TABLE).parent.mkdir(parents=True)
    (home / TABLE).write_text("\n".join(lines) + "\n")


def _has(*ids: str, more: tuple[str, ...] = ()) -> Callable[[Path, str], None]:
    """The table of results has these operators and, besides the first nine columns, these."""

    def check(home: Path, said: str) -> None:
        with (home / "xx/opcheck/opcheck_result.csv").open(encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(f))
        assert [r["op_id"] for r in rows] == list(ids)
        assert tuple(rows[0])[9:-1] == more
        wrong = [r["op_id"] for r in rows if r["excuted_information"] == "execution failed"]
        assert wrong == [i for i in ids if i == "24_1"]

    return check


def _line(at: int, says: str, more: str = "", code: int = 1, check: Callable[[Path, str], None] | None = None) -> Line:
    prints = ("24_Layer.1_SelfAttentionOperation",) if code == 1 else ()
    return Line(at, says, ("opcheck", *f"{WHERE} {more}".split()), code, prints, check=check)


ALL = ("2_3_5", "24_1", "24_2")
LINES = [
    _line(163, "-i {tensor_dir} -c {op_csv_path} -o {output_dir}", check=_has(*ALL)),
    Line(170, "--input, -i", ("opcheck", "-j", "0", "--input", TENSORS, "--output", "xx/opcheck"), 1,
         ("24_Layer.1_SelfAttentionOperation",), check=_has(*ALL)),
    Line(171, "--csv-path, -c", ("opcheck", "-j", "0", "-i", TENSORS, "--csv-path", TABLE, "-o", "xx/opcheck"), 1,
         check=_has(*ALL)),
    _line(172, "--output, -o", check=_has(*ALL)),
    _line(173, "-ids 24_1,2_3_5", "-ids 24_1,2_3_5", check=_has("2_3_5", "24_1")),
    _line(173, "--operation-ids 2", "--operation-ids 2", 0, _has("2_3_5")),
    _line(174, "-opname self\uff0clinear", "-opname self\uff0clinear", check=_has("2_3_5", "24_1")),
    _line(174, "--operation-name linear", "--operation-name linear", 0, _has("2_3_5")),
    _line(175, "--metric kl cos_sim", "--metric kl cos_sim",
          check=_has(*ALL, more=("cosine_similarity", "kl_divergence"))),
    _line(175, "-metric abs", "-metric abs", check=_has(*ALL, more=("abs_precision_result(%)", "max_abs_error"))),
    _line(175, "--precision-metric abs", "--precision-metric abs",
          check=_has(*ALL, more=("abs_precision_result(%)", "max_abs_error"))),
    _line(176, "--device-id 0", "--device-id 0", check=_has(*ALL)),
    _line(176, "-device 0", "-device 0", check=_has(*ALL)),
    Line(177, "-rerun", ("opcheck", "-i", TENSORS, "-rerun"), 2, ("--rerun: ATB's operators run on an Ascend card",),
         ends_at=NO_CARD),
    Line(177, "--atb-rerun", ("opcheck", "-i", TENSORS, "--atb-rerun"), 2,
         ("--rerun: ATB's operators run on an Ascend card",), ends_at=NO_CARD),
]  # fmt: skip
