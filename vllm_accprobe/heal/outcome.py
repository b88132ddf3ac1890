"""What one rank has healed, as a file, and in lines for people.

The problem: healing happens in worker processes, and whoever started them wants to know at the end which modules were
replaced, how often, and which were not and why. The idea: each rank writes DIR/heal/rank0000.json when its model is
loaded and when it ends; `read` collects the files of a directory, `lines` prints them for people. Needs no torch.
Not here: what is healed, and how (healing.py).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_accprobe.dump.decode import DecodeError, load
from vllm_accprobe.whole_file import write_private

FOLDER = "heal"
_SHOWN = 6
"""Chosen: modules that a line names."""
_LARGEST = 1 << 24
"""Bytes of a file that is read."""


@dataclass
class HealOutcome:
    """Of one rank. problem: why nothing is healed, "" where something is. healed: by module, how many calls were
    replaced; left: by module, why no call is, or no more; some: by module and reason, calls that stayed as they were,
    or rows of them."""

    rank: int
    problem: str = ""
    healed: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    some: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, root: Path) -> None:
        """Raises OSError."""
        folder = root / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / f"rank{self.rank:04d}.json", json.dumps({"schema": 1, **vars(self)}, indent=1) + "\n")


def read(root: Path) -> list[HealOutcome]:
    """Of all ranks, by rank; files that are none of ours are left out."""
    found = []
    for path in sorted((root / FOLDER).glob("rank*.json")):
        with contextlib.suppress(OSError, DecodeError):
            found.append(load(HealOutcome, path, _LARGEST, {"schema": 1}))
    return found


def lines(outcomes: Iterable[HealOutcome]) -> list[str]:
    """What was healed, and what was not and why; reasons that several modules share are one line."""
    outcomes = list(outcomes)
    healed: Counter[str] = Counter()
    for one in outcomes:
        healed.update({name: n for name, n in one.healed.items() if n})
    found = list(dict.fromkeys(f"heal: {one.problem}" for one in outcomes if one.problem))
    if healed:
        calls = f"{sum(healed.values()):,} calls of {len(healed):,} module{'s' * (len(healed) != 1)}"
        found.append(f"healed: {calls} were replaced by their reference: {_named(list(healed))}")
    elif outcomes and not found:
        found.append("healed: nothing; no call of the chosen modules was replaced")
    for word, by_module in (("not healed", [one.left for one in outcomes]), ("in part", [_main(o) for o in outcomes])):
        modules: dict[str, dict[str, None]] = {}
        for whys in by_module:
            for name, why in whys.items():
                modules.setdefault(why, {})[name] = None
        found += [f"{word}: {_named(list(names))}: {why}" for why, names in modules.items()]
    return found


def _main(one: HealOutcome) -> dict[str, str]:
    """The reason that kept most calls of a module as they were."""
    return {name: max(whys, key=lambda why: whys[why]) for name, whys in one.some.items() if whys}


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
