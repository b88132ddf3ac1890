"""A vLLM plugin that stands in for a model file in which somebody has labelled an accelerator's own layers.

Every ``mlp`` of the model is labelled by name: the reference is its output; the accelerator's own is the same through
float32, given as a tensor in even layers and, in odd ones, written later into a file as ATB does it. What
``ACCPROBE_LABELLED`` says is wrong: ``layer=2,rank=1`` scales the last row there by 1.05. Beside it, torch_xray's guide
was followed: where ``ACCPROBE_XRAY`` names a directory, execute_model makes and starts a PrecisionDebugger each time.
"""

import os
import sys
from pathlib import Path
from typing import Any

PATH = "0_Model/{layer}_Mlp/after/outTensor0.bin"


def register() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load = BaseModelLoader.load_model
    if getattr(load, "_labelled", False):
        return

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, *args, **kwargs)
        layers = [m for path, m in model.named_modules() if path.endswith(".mlp")]
        for number, mlp in enumerate(layers):
            mlp.forward = labelled(mlp.forward, number)
        return model

    load_model._labelled = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model
    if os.environ.get("ACCPROBE_XRAY"):
        follow_the_guide()


def follow_the_guide() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_accprobe import PrecisionDebugger

    execute = GPUModelRunner.execute_model

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        debugger = PrecisionDebugger(
            dump_path=os.environ["ACCPROBE_XRAY"], hook_name="dump", rank=[0], step=[1],
            model=self.model.model.layers[0], dump_torch_api=False,
        )  # fmt: skip
        debugger.start()
        return execute(self, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


def labelled(forward: Any, layer: int) -> Any:
    from vllm.distributed import get_tensor_model_parallel_rank

    from vllm_accprobe import gen_id, set_label

    rank = get_tensor_model_parallel_rank()
    wrong = os.environ.get("ACCPROBE_LABELLED") == f"layer={layer},rank={rank}"
    executions = 0

    def around(x: Any) -> Any:
        nonlocal executions
        out = forward(x)
        own = out.float()
        if wrong:
            own[-1] *= 1.05
        data_id = gen_id(f"mlp.{layer}")
        set_label("pta", data_id, out)
        if layer % 2 == 0:
            set_label("acl", data_id, own)
        else:
            set_label("acl", data_id, tensor_path=PATH.format(layer=layer))
            write_atb(own, rank, executions, layer)
            executions += 1
        return out

    return around


def write_atb(tensor: Any, rank: int, execution: int, layer: int) -> None:
    output = os.environ.get("ATB_OUTPUT_DIR")
    if output:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from atb_file import write

        place = Path(output, "tensors", f"{rank}_{os.getpid()}", str(execution))
        write(place / PATH.format(layer=layer).replace("outT", "outt"), tensor.numpy(), 0)
