"""A vLLM plugin: a CPU platform on which an engine compiles in pieces, pads, captures graphs and replays them.

The problem: a CPU engine traces and compiles, but captures nothing: CpuPlatform empties the capture sizes, turns
VLLM_COMPILE into DYNAMO_TRACE_ONCE and has no static graphs, so there are no pieces and no padding, and what goes wrong
with them can be tried on a card only. The idea: this directory is a distribution of its own (the dist-info beside this
file); on PYTHONPATH, and with ``ACCPROBE_CAPTURED=1``, it gives vLLM a platform out of the tree: CpuPlatform, but what
was asked for of the compilation stays, the graph wrapper is vLLM's own with recorded calls in place of CUDA graphs
(captured_wrapper.py), and the worker captures after its warm-up (captured_worker.py). Everything between, from the
dispatcher that pads to the wrapper that captures, is vLLM's code as it runs on a card.

Needs the eager backend: code that inductor has generated calls no operators that could be recorded. Captures
PIECEWISE only; the CPU's attention says that it supports no full graphs. Its MLA kernel takes no padded rows, so that
DeepSeek's models fail here. Dense and MoE models, both model runners and tensor parallelism run.
Not here: ``FULL``, breakable graphs, streams.
"""

import os

ENV = "ACCPROBE_CAPTURED"


def platform() -> str | None:
    """Entry point of group ``vllm.platform_plugins``: claims the platform while ``ACCPROBE_CAPTURED`` is 1."""
    return "captured_platform.CapturedPlatform" if os.environ.get(ENV) == "1" else None
