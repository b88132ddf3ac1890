"""Kernels with a fault of timing, memory or batch, and their honest twins, as files that `--op FILE.py:NAME` loads.

Real ones: threads that add into one place without a lock, compiled and released from the interpreter's lock; outputs of
``torch.empty`` that are written in part; sums whose blocking follows the number of rows.
"""

import threading

import numba
import numpy as np
import torch

PASSES = 40
"""So that two threads are at it at the same time on a machine that has other things to do as well."""


@numba.njit(parallel=True)
def _add_columns_unlocked(x, out):  # type: ignore[no-untyped-def]
    for i in numba.prange(x.shape[0]):
        for _ in range(PASSES):
            for j in range(x.shape[1]):
                out[j] = out[j] + x[i, j]


@numba.njit(parallel=True)
def _add_columns(x, out):  # type: ignore[no-untyped-def]
    for j in numba.prange(x.shape[1]):
        total = np.float32(0)
        for i in range(x.shape[0]):
            total += x[i, j]
        out[j] = total


def column_sum_racy(x: torch.Tensor) -> torch.Tensor:
    """Several threads add rows into the same sums: additions are lost."""
    out = torch.zeros(x.shape[1])
    _add_columns_unlocked(x.float().numpy(), out.numpy())
    return out.to(x.dtype)


def column_sum(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[1])
    _add_columns(x.float().numpy(), out.numpy())
    return out.to(x.dtype)


def unordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Partial sums are added up as their threads finish, under a lock: another order each time, as atomics do."""
    total, lock = torch.zeros(x.shape[1]), threading.Lock()
    ready = threading.Barrier(8)

    def add(part: torch.Tensor) -> None:
        mine = part.float().sum(0)
        ready.wait()
        with lock:
            total.add_(mine)

    threads = [threading.Thread(target=add, args=(p,)) for p in x.chunk(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return total


def double_partly(x: torch.Tensor) -> torch.Tensor:
    """The last of its rows is never written."""
    out = torch.empty_like(x)
    out[:-1] = 2 * x[:-1]
    return out


def double(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.mul(x, 2, out=out)
    return out


def accumulate_into_empty(x: torch.Tensor) -> torch.Tensor:
    """Adds to a workspace that was never set to zero, where the memory's numbers are small."""
    out = torch.empty(x.shape[1], dtype=torch.int32)
    out %= 7
    out += x.int().sum(0, dtype=torch.int32)
    return out


def matmul_by_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Few rows: the products are summed in two halves; many rows: in one go."""
    a, b = x.float(), w.float()
    if len(x) < 4:
        k = a.shape[1] // 2
        return a[:, k:] @ b[k:] + a[:, :k] @ b[:k]
    return (a.double() @ b.double()).float()


def matmul_by_rows_coarse(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Few rows: partial sums are rounded to bfloat16 for every eight products, which float32 does not explain."""
    if len(x) >= 4:
        return (x.float() @ w.float()).bfloat16()
    out = torch.zeros(len(x), w.shape[1], dtype=torch.bfloat16)
    for k in range(0, x.shape[1], 8):
        out = (out.float() + x[:, k : k + 8].float() @ w[k : k + 8].float()).bfloat16()
    return out


def matmul_row_by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([(r.float()[None] @ w.float())[0] for r in x]).to(x.dtype)
