"""Opens a dump of any format that is known here, as the one face which dump/reader.py defines.

A format is one small module (see sniff.py for what it must have); foreign.py makes its tensors look like our own.
"""

from __future__ import annotations

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.formats.common.sniff import NothingReadable, nothing_readable, open_dump

__all__ = ["Dump", "DumpError", "NothingReadable", "nothing_readable", "open_dump"]
