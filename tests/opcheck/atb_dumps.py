"""A dump of one ATB operator, made by hand: its bins, its parameters, and what opcheck says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.opchecked import check

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.result_row import Checked

TABLE = default_references()
CODES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.int64: 9, torch.float64: 11,
    torch.bool: 12, torch.bfloat16: 27,
}  # fmt: skip
Array = np.ndarray[Any, Any]


@dataclass
class MadeCall:
    """kind: the operator's type; inputs, outputs: in order; inplace: inputs as they are behind it, by number; bump:
    what an integer is off by as a fault."""

    kind: str
    param: Mapping[str, Any] | None
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor] = ()
    inplace: Mapping[int, torch.Tensor] = field(default_factory=dict)
    bump: int = 1


def write_bin(path: Path, t: torch.Tensor) -> None:
    data = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    lines = ["$Version=1.0", "$Object.Count=1", f"$Object.Length={len(data)}", "format=2", f"dtype={CODES[t.dtype]}"]
    lines += [f"dims={','.join(map(str, t.shape))}", f"$Object.data=0,{len(data)}", "$End=1"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode() + data)


def write_call(
    root: Path,
    made: MadeCall,
    number: int = 0,
    *,
    process: str = "0_7",
    token: int = 0,
    above: str = "",
    after: bool = False,
) -> Path:
    """Writes a call into a dump; after: inputs as they are behind it, as ``-time 1`` keeps them. Gives its folder."""
    where = root / f"tensors/{process}/{token}" / above / f"{number}_{made.kind}"
    for k, t in enumerate(made.inputs):
        write_bin(where / ("after" if after else "before") / f"intensor{k}.bin", made.inplace.get(k, t) if after else t)
    for k, t in made.inplace.items():
        write_bin(where / f"after/intensor{k}.bin", t)
    for k, t in enumerate(made.outputs):
        write_bin(where / f"after/outtensor{k}.bin", t)
    if made.param is not None:
        (where / "op_param.json").write_text(json.dumps(made.param))
    return where


def rows_of(path: Path) -> list[Checked]:
    return list(check(Calls(open_dump(path), None), TABLE))


def judged(root: Path, made: MadeCall, **more: Any) -> dict[str, Checked]:
    """The rows of one call by role."""
    write_call(root, made, **more)
    return {row.role: row for row in rows_of(root)}


def faulty(t: torch.Tensor, bump: int = 1) -> torch.Tensor:
    """``t`` with one element wrong: the largest by a twentieth of itself, an integer by ``bump``."""
    flat = t.clone().reshape(-1)
    wide = torch.nan_to_num(flat.double(), posinf=0.0, neginf=0.0).abs()
    at = int(wide.argmax())
    if flat.dtype == torch.bool:
        flat[at] = ~flat[at]
    elif t.is_floating_point():
        flat[at] = flat[at] * 1.05 + (0.5 if not float(flat[at]) else 0.0)
    else:
        flat[at] = flat[at] - bump
    return flat.reshape(t.shape)


def bits(x: Any, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """numpy's float64 or integers rounded once to ``dtype``."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def wide(t: torch.Tensor) -> Array:
    """What a kernel is given, as numpy's float64."""
    return t.double().numpy()


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return bits(rng.standard_normal(shape), dtype)


def holds(root: Path, made: MadeCall) -> None:
    """What the definition gives passes; a fault in each output, and in each input that is written, is named."""
    right = judged(root / "right", made)
    roles = [f"output.{k}" for k in range(len(made.outputs))] + [f"inplace.{k}" for k in made.inplace]
    assert {r: right[r].status for r in roles} == dict.fromkeys(roles, "pass"), [
        (r, right[r].message, right[r].severity) for r in roles if right[r].status != "pass"
    ]
    for n, role in enumerate(roles):
        what, k = role.split(".")
        wrong = MadeCall(made.kind, made.param, made.inputs, list(made.outputs), dict(made.inplace), made.bump)
        held = wrong.outputs if what == "output" else wrong.inplace
        held[int(k)] = faulty(held[int(k)], made.bump)  # type: ignore[index]
        found = judged(root / f"wrong{n}", wrong)
        assert found[role].status == "fail", (role, found[role])
        assert (found[role].cls, found[role].tap) == (made.kind, f"0_{made.kind}")


def attend(
    q: Array, k: Array, v: Array, scale: float, added: Any = 0.0, clamp: tuple[float, float] | None = None
) -> Array:
    """q [n, heads, d], k and v [m, kv heads, d]; added broadcasts to [heads, n, m]."""
    added = np.broadcast_to(added, (q.shape[1], len(q), len(k)))
    out = np.zeros((len(q), q.shape[1], v.shape[2]))
    for h in range(q.shape[1]):
        own = h // (q.shape[1] // k.shape[1])
        s = q[:, h] @ k[:, own].T * scale
        s = np.clip(s, *clamp) if clamp else s
        s = s + added[h]
        e = np.exp(s - s.max(-1, keepdims=True))
        out[:, h] = e / e.sum(-1, keepdims=True) @ v[:, own]
    return out


def lower(n: int, m: int, far: float = -np.inf) -> Array:
    return np.where(np.arange(m)[None] > np.arange(m - n, m)[:, None], far, 0.0)


def slopes(heads: int) -> Array:
    return 2.0 ** (-8.0 / heads * np.arange(1, heads + 1))
