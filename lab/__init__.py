"""The fault laboratory: faults planted in real engines, and what is named of them.

Commands: ``python -m lab.faults`` (tiny models), ``python -m lab.large``, ``python -m lab.field_cases``. What plants a
fault inside vLLM is a plugin in ``planted/``, which is put on PYTHONPATH. Engines and models are those of tests/support
and scripts, which are on the path from here on.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("lab/planted", "tests", "scripts"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.append(str(ROOT / _folder))
