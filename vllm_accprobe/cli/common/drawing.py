"""What ``convert --to onnx`` and ``summary --tree`` have in common: a dump or ATB's json, one step of one rank.

Not here: the graph and the tree (topology/), the file's place (cli/convert.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_accprobe.cli.common.options import CommandError, progress

if TYPE_CHECKING:
    from vllm_accprobe.topology.model_graph import ModelGraph


def onnx(path: Path, out: Path, level: int | None, step: str, rank: str) -> list[str]:
    """Writes the file and gives the lines to say. Raises CommandError, DumpError."""
    from vllm_accprobe.report.text import count, safe
    from vllm_accprobe.topology.data_flow import graph_of
    from vllm_accprobe.topology.onnx_file import write_onnx

    if _topology(path, step, rank):
        from vllm_accprobe.topology.atb_json import atb_graph

        graph = atb_graph(path, level)
    else:
        from vllm_accprobe.formats import open_dump

        dump = open_dump(path)
        with progress("looking", len(dump.records)) as tick:
            graph = graph_of(dump, level, _one(rank, "--ranks"), _one(step, "--steps"), tick)
    write_onnx(graph, out)
    return [f"{safe(graph.name)}: {count(len(graph.nodes), 'node')}{_where(graph)}", *map(safe, graph.notes)]


def tree(path: Path, level: int | None, step: str, rank: str) -> list[str]:
    """The lines of the tree. Raises CommandError, DumpError."""
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.topology import module_tree

    if _topology(path, step, rank):
        root = module_tree.of_atb(path)
    else:
        root = module_tree.of_dump(open_dump(path), _one(rank, "--ranks"), _one(step, "--steps"))
    return [safe(line, 400) for line in module_tree.lines(root, level)]


def _where(graph: ModelGraph) -> str:
    facts = graph.facts
    return f", step {facts['step']} of rank {facts['rank']}" if "step" in facts else ""


def _topology(path: Path, step: str, rank: str) -> bool:
    """Whether ``path`` is a file of ATB's topology, which is of no step."""
    if path.suffix != ".json" or not path.is_file():
        return False
    if step or rank:
        raise CommandError(f"{path} is a topology: it has no steps and no ranks; leave out --steps and --ranks")
    return True


def _one(text: str, option: str) -> int | None:
    """One number. Raises CommandError for a range."""
    if not text:
        return None
    if not text.isdecimal():
        raise CommandError(f"{option}: {text!r} is not one number; one step of one rank is drawn")
    return int(text)
