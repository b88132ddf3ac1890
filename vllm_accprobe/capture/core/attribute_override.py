"""An attribute or a method of one object is replaced, and restored.

The problem: forwards and methods of vLLM's objects are wrapped, which other code may have wrapped before, and which
a release may lack. The idea: the replacement is set on the object, not on its class, so that another engine in the
process is not touched; what was in the instance's dictionary is put back, and where nothing was, nothing is left. A
wrapped method keeps its original, for its signature (``__wrapped__``) and to recognise ours (``__accprobe__``).

Not here: functions in modules (vllm/batch.py), patched source code (patching/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def override(owner: Any, name: str, value: Any) -> Callable[[], None]:
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


def wrap_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any] | None:
    """Sets ``owner.name`` to a call of ``replacement(original, *args, **kwargs)`` and returns it; None, and nothing is
    done, where there is no such method."""
    original = getattr(owner, name, None)
    if not callable(original):
        return None

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    wrapped.__name__ = name
    wrapped.__wrapped__ = wrapped.__accprobe__ = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    return wrapped
