"""An 8-bit cache of keys and values in a real engine on a CPU whose build of vLLM has no kernel for one.

The problem: vLLM 0.32's CPU kernels take fp8 caches only where the machine has AVX-512 or AMX; scheduler, runner,
metadata, the cache's own memory and the ledger's hooks do not care. The idea: where vLLM refuses, its three calls into
the kernels (write, plan, attend) are plain torch for caches of bytes, and vLLM's own for all others; where it does not
refuse, nothing is replaced. A code is x / scale rounded to the nearest number of the format, ties to even. Not here:
what is looked for in such a cache (scripts/state_cases.py, scripts/cache_pairs.py).
"""

from typing import Any

import torch

FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def allow() -> bool:
    """Lets engines of this process have fp8 caches; whether vLLM's own kernels are used."""
    from vllm.v1.attention.backends import cpu_attn

    chosen = cpu_attn._get_attn_isa
    try:
        chosen(torch.bfloat16, 32, 64, "fp8_e4m3")
        return chosen.__module__ == cpu_attn.__name__  # else allowed before
    except NotImplementedError:
        pass

    def isa(dtype: Any, block_size: int, head_size: int | None = None, kv_cache_dtype: str | None = None) -> str:
        return str(chosen(dtype, block_size, head_size, None if kv_cache_dtype in FORMATS else kv_cache_dtype))

    cpu_attn._get_attn_isa = isa
    ops = cpu_attn.ops
    for name, stand_in in (
        ("cpu_attn_reshape_and_cache", _write), ("cpu_attn_get_scheduler_metadata", _plan),
        ("cpu_attention_with_kv_cache", _attend),
    ):  # fmt: skip
        setattr(ops, name, _instead(getattr(ops, name), stand_in))
    return False


def _instead(original: Any, stand_in: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if kwargs.get("kv_cache_dtype") in FORMATS else original)(*args, **kwargs)

    return call


def _plan(**_: Any) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int8)


def _write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor,
    isa: str, k_scale: float, v_scale: float, kv_cache_dtype: str,
) -> None:  # fmt: skip
    slots = slots[: len(key)]
    real, size = slots >= 0, key_cache.shape[2]
    block, within = slots[real] // size, slots[real] % size
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        cache[block, :, within] = codes(rows[: len(slots)][real].float() / scale, kv_cache_dtype)


def codes(exact: torch.Tensor, kind: str) -> torch.Tensor:
    """Float32 as bytes of the format, saturating."""
    most = torch.finfo(FORMATS[kind]).max
    return exact.clamp(-most, most).to(FORMATS[kind]).view(torch.uint8)


def _attend(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, output: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, scale: float, block_table: torch.Tensor, k_scale: float,
    v_scale: float, kv_cache_dtype: str, **_: Any,
) -> None:  # fmt: skip
    """Causal attention of each request over its blocks, in float32."""
    heads, size = query.shape[1], key_cache.shape[2]
    share = heads // key_cache.shape[1]

    def held(cache: torch.Tensor, blocks: torch.Tensor, n: int, by: float) -> torch.Tensor:
        wide = cache[blocks].view(FORMATS[kv_cache_dtype]).float() * by  # [blocks, kv heads, slots, width]
        rows = wide.transpose(0, 1).flatten(1, 2)[:, :n]
        return rows.repeat_interleave(share, 0)

    for i, n in enumerate(seq_lens.tolist()):
        first, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        blocks = block_table[i, : -(-n // size)].long()
        k, v = held(key_cache, blocks, n, k_scale), held(value_cache, blocks, n, v_scale)
        q = query[first:end].float().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * scale
        at = torch.arange(n - (end - first), n)
        scores.masked_fill_(torch.arange(n)[None, None] > at[None, :, None], float("-inf"))
        output[first:end] = (scores.softmax(-1) @ v).transpose(0, 1).reshape(output[first:end].shape).to(output.dtype)
