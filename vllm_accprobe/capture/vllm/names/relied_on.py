"""All places of vLLM that capture touches, in the order in which a report names them.

The problem, the words and who reads this: need.py. The idea: one list, for `accprobe doctor --wheel` and for the test
that holds it against capture's source. Not here: the declarations themselves.
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names import cache_names, engine_names, layer_names, lora, runners, weight_names
from vllm_accprobe.capture.vllm.names.need import VllmPlace

PLACES: tuple[VllmPlace, ...] = (
    *engine_names.PLACES, *runners.PLACES, *layer_names.PLACES, *lora.PLACES, *weight_names.PLACES,
    *cache_names.PLACES,
)  # fmt: skip
