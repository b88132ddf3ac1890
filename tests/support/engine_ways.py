"""What the engines of the tests need of vLLM so that a CPU runs what it would refuse there.

The problem: the V2 runner, pipeline stages, asynchronous scheduling and cheap ranks work on a CPU but for a line or two
of vLLM's. The idea: each function changes that line, in the process of the engine, before vLLM is used. Not here: the
engines (engine_worker.py).
"""

from typing import Any


def prepare_v2_runner() -> None:
    """Lets the V2 model runner, which wants Triton, run on a CPU through Triton's interpreter."""
    from types import SimpleNamespace

    import triton.backends as backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def fork_the_ranks() -> None:
    """Ranks begin as copies of this process, as vLLM's ranks do where no device forbids it, and import nothing anew.

    On a CPU vLLM spawns them, so that OpenMP reads which cores are a rank's; here each computes with one thread.
    Measured: 47 s of processor time for the first engine of two ranks when spawned, 31 s when forked."""
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def make_room_between_stages() -> None:
    """vLLM 0.32's CPU runner asserts that the tensors between two pipeline stages have memory, which only a warm-up
    that it never runs would give them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    gather = Runner.sync_and_gather_intermediate_tensors

    def with_room(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    Runner.sync_and_gather_intermediate_tensors = with_room


def schedule_ahead() -> None:
    """Asynchronous scheduling, which vLLM switches off on a CPU: the next step is made before this one's tokens are
    known. A CPU's streams and events have nothing to wait for."""
    import contextlib
    from types import SimpleNamespace

    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(ahead)
    nothing = SimpleNamespace(**dict.fromkeys(("wait_stream", "record", "synchronize", "wait"), lambda *_, **__: None))
    torch.cuda.current_stream = lambda *_: nothing
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.Event = lambda **_: nothing
