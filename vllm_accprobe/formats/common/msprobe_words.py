"""The words of msprobe's dumps: names of files, sections and statistics, and of operators.

Not here: what is made of them (formats/msprobe.py, msprobe_records.py, msprobe_calls.py).
"""

from __future__ import annotations

DUMP, DEBUG, STACK, CONSTRUCT = "dump.json", "debug.json", "stack.json", "construct.json"
DATA = "dump_tensor_data"
"""The folder of payloads, beside the dump.json that names them."""
INPUTS, KEYWORDS, OUTPUTS, PARAMETERS = "input_args", "input_kwargs", "output", "parameters"
SECTIONS = {
    PARAMETERS: ("param", "parameters"),
    INPUTS: ("input", "input"),
    "input": ("input", "input"),
    KEYWORDS: ("input", "kwargs"),
    OUTPUTS: ("output", "output"),
}
"""Section of a record → (what a role begins with, what the name of its tensors has), in the order of execution."""
STATS = {"max": "Max", "min": "Min", "mean": "Mean", "l2": "Norm"}
"""Our statistics → msprobe's, in the order in which it writes them."""
BACKWARD = "backward."
"""What the places of backward runs begin with."""
MINDSPORE = "mindspore"
_OF_MINDSPORE = {"Tensor": "mindspore.Tensor", "Functional": "mindspore.ops"}


def operator_name(api: str, framework: str) -> str:
    """The name of an API in ``OpCall.op``: msprobe's own, ``Functional.linear``, ``Mint.add``; of ``Aten.mm.default``
    the operator's, ``aten.mm.default``; of MindSpore's
    ``Tensor.add`` and ``Functional.add`` ``mindspore.Tensor.add`` and ``mindspore.ops.add``."""
    head, dot, rest = api.partition(".")
    if head == "Aten" and rest:
        return f"aten.{rest}"
    return f"{_OF_MINDSPORE[head]}.{rest}" if framework == MINDSPORE and dot and head in _OF_MINDSPORE else api
