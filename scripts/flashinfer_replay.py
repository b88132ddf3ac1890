#!/usr/bin/env python3
"""Lets FlashInfer's own replay code read the folders that `accprobe gentest DUMP --flashinfer` wrote.

    pip install flashinfer-python==0.7.2.post1     # in an environment of its own; torch may be one for CPUs
    python scripts/flashinfer_replay.py FOLDERS [--device cuda]

Without a GPU no kernel can run, but all before it can: FlashInfer's loader (replay_from_dump) makes the arguments, they
are bound to the function's own signature, and the function runs as far as it gets: to the compiled module, which is
asked for and is not there (`kernel`), or to a check of its own that says no (`refused`). On a GPU, with --device cuda,
`flashinfer replay --dir FOLDERS` runs the kernels; this script then counts what its replay said. Prints a line for each
function; exit code 1 where a folder was not read, did not fit its function, or was refused before the kernel."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
KERNEL = "reached its kernel"


class KernelAsked(Exception):
    """A compiled module was asked for: everything before it was accepted."""


def stop_at_kernels() -> None:
    """No compiler, no GPU: where a compiled module would be built or looked up, KernelAsked is raised, and questions
    for the device's abilities get the answers of an H100."""
    import torch

    core = importlib.import_module("flashinfer.jit.core")

    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise KernelAsked(getattr(self, "name", ""))

    core.JitSpec.build_and_load = asked
    torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
    card = type("Card", (), {"multi_processor_count": 132, "major": 9, "minor": 0})
    torch.cuda.get_device_properties = lambda *a, **k: card()
    utils = importlib.import_module("flashinfer.utils")
    for name in ("get_compute_capability", "_get_compute_capability"):
        if hasattr(utils, name):
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("flashinfer") and hasattr(module, name):
                    setattr(module, name, lambda *a, **k: (9, 0))


def one(replay: Any, folder: Path, device: str, objects: dict[tuple[Any, Any], Any]) -> tuple[str, str]:
    """(function, what became of it)"""
    told = json.loads((folder / "metadata.jsonl").read_text().splitlines()[-1])
    name = told["function_name"]
    loaded = replay(str(folder), compare_outputs=True, device=device, run=False)
    target: Any = importlib.import_module(told["module"])
    for part in name.split("."):
        target = getattr(target, part)
    inspect.signature(target).bind(*loaded["args"], **loaded["kwargs"])
    key = told["process_id"], told.get("self_id")
    cls, _, method = name.rpartition(".")
    try:
        if cls and method == "__init__":
            made = getattr(importlib.import_module(told["module"]), cls)
            objects[key] = made(*loaded["args"][1:], **loaded["kwargs"])
            return name, "made its object"
        call = getattr(objects[key], method) if cls else target
        call(*loaded["args"][1 if cls else 0 :], **loaded["kwargs"])
        return name, "ran"
    except KernelAsked:
        return name, KERNEL
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
        return name, f"refused: {text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        import torch

        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        torch.version.cuda = torch.version.cuda or "12.8"
    import flashinfer
    from flashinfer.api_logging import replay_from_dump, replay_sequence

    print(f"FlashInfer {flashinfer.__version__}")
    found: Counter[tuple[str, str]] = Counter()
    if options.device == "cpu":
        stop_at_kernels()
        objects: dict[tuple[Any, Any], Any] = {}
        for folder in sorted(p for p in options.folders.iterdir() if p.is_dir()):
            try:
                found[one(replay_from_dump, folder, "cpu", objects)] += 1
            except Exception as error:
                name = folder.name.split("_", 4)[4].rpartition("_call")[0]
                found[name, f"not read: {type(error).__name__}: {error}"] += 1
    else:
        for result in replay_sequence(str(options.folders), device=options.device):
            name = result.get("metadata", {}).get("function_name", Path(result["dump_dir"]).name)
            wrong = result.get("error") or result.get("execution_error")
            same = "as captured" if result.get("comparison_match") else "not as captured"
            found[name, f"refused: {wrong}" if wrong else f"ran, {same}"] += 1
    for (name, what), n in sorted(found.items()):
        print(f"{n:5} {name}: {what}")
    return int(any(what.startswith(("not read", "refused")) for _, what in found))


if __name__ == "__main__":
    sys.exit(main())
