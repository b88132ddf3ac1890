"""Tensor lines that are text from the start.

The problem: hundreds of tensors per step each become a journal line while a model waits, and nine tenths of such a line
are the same at every call of a tap. The idea: the part that stays is encoded once, as a template; a line on its way is
a template, three numbers and the cell of its bytes (TemplateLine), and text only when it is written. Not here: lines
of other kinds (lines.py), what a tensor's line says (journal/tensor_lines.py), who keeps templates
(capture/taps/fast_path.py).
"""

from __future__ import annotations

from vllm_accprobe.dump.journal.tensor_lines import TensorHead, last
from vllm_accprobe.dump.recorder.lines import encode, statistics
from vllm_accprobe.dump.schema import Payload
from vllm_accprobe.dump.segment import HeaderEntry, entry_key, entry_room
from vllm_accprobe.dump.stats import StatsCell

_CHANGES = ("step", "call", "seq")


class TensorTemplate:
    """head: of the tensors' lines, whatever its step, call and seq. ``nbytes``: size of the payload. ``room``: header
    bytes that an entry takes."""

    __slots__ = ("dtype", "nbytes", "role", "room", "shape", "tap", "text")

    def __init__(self, head: TensorHead, dtype: str, shape: tuple[int, ...], nbytes: int):
        line = last(head.line(dtype, shape), "layout", "mutated")
        self.text = encode({k: v for k, v in line.items() if k not in _CHANGES}).decode()[:-2]
        self.tap, self.role = head.tap, head.role
        self.dtype = dtype
        self.shape = shape
        self.nbytes = nbytes
        self.room = entry_room(head.tap, head.role, len(shape))

    def entry(self, step: int, call: int, payload: Payload) -> HeaderEntry:
        """The tensor's entry in a segment's header."""
        key = entry_key(step, self.tap, self.role, call)
        return HeaderEntry(key, self.dtype, self.shape, payload.off, payload.nbytes)


TemplateLine = tuple[TensorTemplate, int, int, int, StatsCell]
"""A tensor's line: template, step, call, seq, and the cell that has its hash, and by now place and statistics."""


def spell(line: TemplateLine) -> bytes:
    """The line as it is written."""
    template, step, call, seq, cell = line
    return f'{template.text},"call":{call},"seq":{seq},"step":{step}{cell.text or _spell(cell)}'.encode()


def _spell(cell: StatsCell) -> str:
    """What every line about the same bytes ends with."""
    payload = cell.payload
    place = "" if payload is None else f'"seg":{payload.seg},"off":{payload.off},"nbytes":{payload.nbytes},'
    cell.text = f',"hash":"{cell.hash}",{place}"stats":{statistics(cell)}}}\n'
    return cell.text
