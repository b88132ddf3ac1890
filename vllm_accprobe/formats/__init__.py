"""Opens a dump of any format that is known here, as the one face which dump/reader.py defines.

Today there is one format, our own; a foreign one is one small module more.
"""

from __future__ import annotations

from vllm_accprobe.dump.reader import Dump, DumpError, open_dump

__all__ = ["Dump", "DumpError", "open_dump"]
