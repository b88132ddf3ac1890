"""Runners of other releases, as far as capture reads them; each names the release and the file that it mirrors.

A CPU engine cannot show these: there both sides of a buffer pair are one tensor, and releases before 0.23 do not
load beside the torch that the tests run with.
"""

import contextlib
from dataclasses import dataclass, field, fields
from types import SimpleNamespace as Plain
from typing import Any

import numpy as np
import pytest
import torch

from vllm_accprobe.capture.vllm import capturing, runner as capture_runner
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.config import ProbeConfig

PARALLEL = {"rank": 0, "world_size": 1, "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]}


def without_vllm(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Nothing of vLLM is needed for a dump's facts and for loading a model. modules: that write facts, besides."""
    for module in (capturing, *modules):
        monkeypatch.setattr(module, "run_info", lambda *_: {"tool": "accprobe", "engine": {"eager": False}})
    monkeypatch.setattr(capture_runner, "before_packing", lambda *looks: contextlib.nullcontext())


def captured(runner: Any, config: ProbeConfig) -> tuple[CaptureObserver, Any]:
    """The capture around ``runner``, as a worker makes it, and the worker; the model is loaded."""
    worker = Plain(model_runner=runner, execute_dummy_batch=lambda: runner._dummy_run())
    adapter = RunnerAdapter(worker, runner, PARALLEL)
    probe = CaptureObserver(config, adapter)
    adapter.add(probe)
    runner.load_model()
    return probe, worker


@dataclass
class Output:
    """SchedulerOutput, as far as capture reads it."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: tuple[str, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def new(**requests: int) -> Output:
    """Requests that begin, by name: how many tokens their prompts have, all in this step."""
    named = [Plain(req_id=k, num_computed_tokens=0, prompt_token_ids=list(range(n)), mm_features=[])
             for k, n in requests.items()]  # fmt: skip
    return Output(named, Plain(req_ids=[], num_computed_tokens=[]), requests)


def more(**computed: int) -> Output:
    """Requests that go on with one token each, by name: how many are computed."""
    cached = Plain(req_ids=list(computed), num_computed_tokens=list(computed.values()))
    return Output([], cached, dict.fromkeys(computed, 1))


class BufferPair:
    """``CpuGpuBuffer`` of vLLM 0.11 to 0.18 (v1/utils.py) on a device: two memories, the device's starts with zeros."""

    def __init__(self, *size: int) -> None:
        self.cpu = torch.zeros(size, dtype=torch.int64)
        self.gpu = torch.zeros(size, dtype=torch.int64)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int) -> None:
        self.gpu[:n].copy_(self.cpu[:n])


class HostPositions:
    """V1 of vLLM 0.11.0, 0.13, 0.15.1, 0.18 (v1/worker/gpu_model_runner.py), vllm-kunlun 0.11.1 and vllm-ascend 0.18
    (worker/model_runner_v1.py): ``_prepare_inputs`` computes positions on the host, and copies ``mrope_positions``
    to the device INSTEAD of them where the model uses M-RoPE."""

    def __init__(self, names: list[str], known: dict[str, int], uses_mrope: bool) -> None:
        self.input_batch = Plain(req_ids=names)
        self.requests = {name: Plain(num_tokens=n, mm_features=[]) for name, n in known.items()}
        self.uses_mrope = uses_mrope
        self.input_ids = BufferPair(16)
        self.positions = BufferPair(16)
        self.mrope_positions = BufferPair(3, 17)

    def prepare(self, computed: dict[str, int], counts: dict[str, int]) -> None:
        """The lines of ``_prepare_inputs`` that fill positions (0.18.0: 1698 to 1703, 1815 to 1830)."""
        n = 0
        for name in self.input_batch.req_ids:
            self.positions.np[n : n + counts[name]] = computed[name] + np.arange(counts[name])
            n += counts[name]
        self.input_ids.np[:n] = 100 + np.arange(n)
        self.input_ids.copy_to_gpu(n)
        if self.uses_mrope:
            self.mrope_positions.gpu[:, :n].copy_(self.mrope_positions.cpu[:, :n])
        else:
            self.positions.copy_to_gpu(n)


@dataclass
class EarlyBatch:
    """``InputBatch`` of the V2 runner of vLLM 0.22.1 (v1/worker/gpu/input_batch.py: 38 to 85) and, with two fields
    fewer, of 0.13 to 0.18 and vllm-ascend 0.18 (worker/v2/input_batch.py): no ``num_computed_tokens_np``, no
    ``prefill_len_np``. Fields that capture does not read are left out."""

    req_ids: list[str]
    num_reqs: int
    idx_mapping_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_tokens: int
    num_tokens_after_padding: int
    query_start_loc_np: np.ndarray
    input_ids: torch.Tensor
    positions: torch.Tensor


@dataclass
class LaterBatch(EarlyBatch):
    """``InputBatch`` of the V2 runner of vLLM 0.23 to 0.32."""

    num_computed_tokens_np: np.ndarray = field(default_factory=lambda: np.zeros(0))
    prefill_len_np: np.ndarray = field(default_factory=lambda: np.zeros(0))


class EarlyV2:
    """V2 of vLLM 0.13 to 0.22.1 (v1/worker/gpu/model_runner.py: prepare_inputs): fewest tokens first; its request
    states (v1/worker/gpu/states.py) hold ``prefill_len`` with a host side, by slot and not by row."""

    batch_class: type[EarlyBatch] = EarlyBatch

    def __init__(self, slots: dict[str, int], prefill: dict[str, int]) -> None:
        lengths = np.zeros(8, dtype=np.int32)
        for name, slot in slots.items():
            lengths[slot] = prefill[name]
        self.req_states = Plain(req_id_to_index=slots, prefill_len=Plain(np=lengths))

    def prepare_inputs(self, out: Any) -> EarlyBatch:
        counts = out.num_scheduled_tokens
        names = sorted(counts, key=counts.get)
        scheduled = np.array([counts[name] for name in names], dtype=np.int32)
        slots = np.array([self.req_states.req_id_to_index[name] for name in names], dtype=np.int32)
        begins = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        begins |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        positions = torch.cat([begins[name] + torch.arange(counts[name]) for name in names])
        n = int(scheduled.sum())
        values: dict[str, Any] = {
            "req_ids": names, "num_reqs": len(names), "idx_mapping_np": slots, "num_scheduled_tokens": scheduled,
            "num_tokens": n, "num_tokens_after_padding": n,
            "query_start_loc_np": np.concatenate([[0], np.cumsum(scheduled)]), "input_ids": 100 + torch.arange(n),
            "positions": positions, "num_computed_tokens_np": np.array([begins[name] for name in names]),
            "prefill_len_np": self.req_states.prefill_len.np[slots],
        }  # fmt: skip
        return self.batch_class(**{f.name: values[f.name] for f in fields(self.batch_class)})


class LaterV2(EarlyV2):
    """V2 of vLLM 0.23 to 0.32."""

    batch_class = LaterBatch
