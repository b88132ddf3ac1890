"""The worker of the captured platform: a CPUWorker that captures after its warm-up, as a card's does.

The problem: CPUWorker compiles while it looks how much memory there is, and never calls ``capture_model``, which wants
streams, a device's memory and its workspace. The idea: call vLLM's own, with these three taken away.
"""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.cpu_worker import CPUWorker

V1 = ("vllm.v1.worker.gpu_model_runner.graph_capture", "vllm.v1.worker.gpu_model_runner.lock_workspace")
V2 = ("vllm.v1.worker.gpu.cudagraph_utils.graph_capture", "vllm.v1.worker.gpu.model_runner.lock_workspace")


class CapturedWorker(CPUWorker):
    """Captures what the runner's dispatcher has keys for."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            streams, workspace = V2 if self.use_v2_model_runner else V1
            with (
                patch(streams, lambda device: nullcontext()),
                patch(workspace),
                patch.object(torch.accelerator, "get_memory_info", lambda *_: (0, 0)),
            ):
                self.model_runner.capture_model()
        return times
