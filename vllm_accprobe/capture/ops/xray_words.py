"""torch_xray's environment variables: X_DEBUG, X_DEDUP, X_DUMP_NUM.

The problem: torch_xray's guide gives the three both as arguments of ``begin_dump`` and as variables of the environment,
and a variable that nobody reads changes nothing and says nothing. The idea: ``begin_dump`` reads those that it was not
given; a server with the probe on, where our own names hold, says the new name in one line. Not here: what a mode means
(capture/ops/choice.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_accprobe.config import ConfigError

NAMES = ("X_DEBUG", "X_DEDUP", "X_DUMP_NUM")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def given(environ: Mapping[str, str]) -> dict[str, int | bool]:
    """The arguments of ``begin_dump`` that the environment sets; empty ones are unset. Raises ConfigError."""
    found: dict[str, int | bool] = {}
    for name in NAMES:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if name == "X_DEDUP":
            if text.lower() not in _YES + _NO:
                raise ConfigError(f"{name}={text[:40]} is neither True nor False")
            found[name] = text.lower() in _YES
            continue
        try:
            found[name] = int(text, 0)
        except ValueError:
            raise ConfigError(f"{name}={text[:40]} is no number; 0x102 and 5 are") from None
    return found


def advice(environ: Mapping[str, str]) -> str:
    """What stands for them where a server captures; "" where none is set."""
    try:
        found = given(environ)
    except ConfigError as error:
        return f"{error}; it is torch_xray's, and has no effect here"
    if not found:
        return ""
    number = int(found.get("X_DUMP_NUM", 0))
    mode = "dedup" if found.get("X_DEDUP") else "sample" if number else "trace"
    calls = f" VLLM_ACCPROBE_OPS_CALLS={number}" if number or mode == "dedup" else ""
    names = ", ".join(found)
    ours = f"VLLM_ACCPROBE_OPS=1 VLLM_ACCPROBE_OPS_MODE={mode}{calls}"
    return f"{names}: torch_xray's, without effect here; {ours} says the same"
