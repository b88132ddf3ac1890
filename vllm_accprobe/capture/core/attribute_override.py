"""An attribute or a method of one object is replaced, and restored.

Something of ours in an object's own dictionary, and the way back.

The problem: a forward is wrapped on the instance, where somebody else may have wrapped it before. The idea: what lay in
the instance's dictionary is put back, and where nothing lay there, nothing is left.

One method of one of vLLM's objects, with ours around it.

The problem: the runner's adapter and the books of weights both put themselves around methods that vLLM calls, and a
release may lack one of them. The idea: the wrapper is set on the object, not its class, so that another engine in the
process is not touched and deleting the attribute takes it off; it keeps the original, for whoever asks for its
signature (``__wrapped__``) and for whoever must know ours (``__accprobe__``).

Not here: functions in modules (capture/vllm/batch.py), patched code (patching/), what is done around which method
(runner.py, capture/vllm/weights.py).
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


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any] | None:
    """Sets ``owner.name`` to a call of ``around(original, *args, **kwargs)`` and returns it; None, and nothing is done,
    where there is no such method."""
    original = getattr(owner, name, None)
    if not callable(original):
        return None

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped.__name__ = name
    wrapped.__wrapped__ = wrapped.__accprobe__ = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    return wrapped
