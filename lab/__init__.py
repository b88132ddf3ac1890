"""The fault laboratory of large pairs, and what runs field cases.

Faults, engines and models are those of tests/faults, tests/support and scripts, which stand on the path from here on.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("tests", "tests/faults", "scripts"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.append(str(ROOT / _folder))
