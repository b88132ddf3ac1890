"""Opens a dump of any format that is known here, as the one face which dump/reader.py defines.

A format is one module at the top of this package, or of another one (common/sniff.py says what it must have);
common/foreign.py gives its tensors the interface of our own. docs/development.md writes one.
"""

from __future__ import annotations

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, torch_dtype
from vllm_accprobe.formats.common.sniff import NothingReadable, nothing_readable, open_dump

__all__ = [
    "Dump", "DumpError", "ForeignDump", "NothingReadable", "Tensor", "nothing_readable", "open_dump", "torch_dtype",
]  # fmt: skip
