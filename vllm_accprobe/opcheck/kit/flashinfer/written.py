"""A dump's calls as folders of FlashInfer's recorder, and what could not be written, by reason.

The problem: of a model's calls FlashInfer has some, and each has its conditions. The idea: a call's class or operator
finds its function in two tables; what has none, or is refused, is counted by operator and reason.
Not here: the tables (from_modules.py, from_operators.py), the folders (recorder.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.kit.flashinfer.from_modules import MODULES
from vllm_accprobe.opcheck.kit.flashinfer.from_operators import OPERATORS
from vllm_accprobe.opcheck.kit.flashinfer.recorder import FlashCall, FolderWriter, NotFlashInfers
from vllm_accprobe.opcheck.reference import Call, Declined


def flash_calls(call: Call) -> list[FlashCall]:
    """The calls of FlashInfer that compute what ``call`` did. Raises NotFlashInfers."""
    make = _function(call.cls)
    if make is None:
        raise NotFlashInfers("FlashInfer has no function for it")
    try:
        return make(call)
    except Declined as why:
        raise NotFlashInfers(why.reason) from None
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as why:
        # a dump may be a stranger's: arguments that are not what the operator has
        raise NotFlashInfers(f"its arguments cannot be told ({type(why).__name__})") from None


def _function(name: str) -> Callable[[Call], list[FlashCall]] | None:
    if name.startswith("flashinfer."):
        return OPERATORS["flashinfer.*"]
    operator = "." in name
    table = OPERATORS if operator else MODULES
    bare = "torch.ops." + ".".join(name.removeprefix("torch.ops.").split(".")[:2]) if operator else name
    fits = [glob for glob in table if fnmatchcase(bare, glob)]
    return table[max(fits, key=len)] if fits else None


class FlashFolders:
    """Calls written to ``root``; calls, refused: how many of which operator, and of which operator and why."""

    def __init__(self, root: Path):
        self._writer = FolderWriter(root)
        self.calls: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()

    @property
    def folders(self) -> int:
        return self._writer.folders

    def add(self, captured: Captured) -> bool:
        """Whether the call was written. Raises OSError."""
        what = captured.what
        try:
            found = flash_calls(what)
            source = {"tap": captured.tap, "op": what.cls, "step": captured.step, "rank": captured.rank,
                      "call": captured.call}  # fmt: skip
            for call in found:
                self._writer.write(call, captured.rank, source)
        except NotFlashInfers as why:
            self.refused[what.cls, str(why)] += 1
            return False
        self.calls[what.cls] += 1
        return True

    def lines(self) -> list[str]:
        """What was left out, a line for each operator and reason, the most first."""
        return [
            f"{n} call{'s' if n > 1 else ''} of {op} not written: {why}" for (op, why), n in self.refused.most_common()
        ]
