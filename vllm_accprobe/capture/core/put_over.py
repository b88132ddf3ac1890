"""Something of ours in an object's own dictionary, and the way back.

The problem: a forward is wrapped on the instance, where somebody else may have wrapped it before. The idea: what lay in
the instance's dictionary is put back, and where nothing lay there, nothing is left. Not here: functions in modules
(vllm/dealing.py), patched code (patching/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def put_over(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets ``owner``'s own attribute; what is returned undoes it."""
    own = owner.__dict__
    missing = name not in own
    before = own.get(name)
    own[name] = value

    def undo() -> None:
        if missing:
            own.pop(name, None)
        else:
            own[name] = before

    return undo
