"""Would a capture work here, and if not, why: checks that return findings.

The problem: a probe that is filtered, mistyped or hooked to nothing says nothing, and the user learns it after the run.
The idea: each check is a function from what it looks at (a metadata path, an environment, a directory) to findings:
ok, warning or error, with what to do. vLLM is never imported in this process: checks.py reads package metadata,
checks.py the environment and the disk, checks.py asks a subprocess (inside.py) what only an import can tell.
Not here: printing and exit codes (cli/doctor.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from vllm_accprobe.doctor.checks import ERROR, OK, WARNING, Finding

__all__ = ["ERROR", "OK", "WARNING", "Finding", "examine"]


def examine(environ: Mapping[str, str] | None = None, *, quick: bool = False, timeout: float = 180.0) -> list[Finding]:
    """All checks in the order in which they are told. ``quick`` leaves out what needs vLLM imported in a subprocess
    (about ten seconds); ``timeout`` is that subprocess's limit in seconds."""
    from vllm_accprobe.doctor import checks

    environ = os.environ if environ is None else environ
    findings = checks.vllm_distribution()
    have_vllm = all(f.level != ERROR for f in findings)
    findings += checks.vllm_command(environ)
    findings += checks.requirements()
    findings += checks.entry_points()
    findings += checks.allowlist(environ)
    if have_vllm:
        if quick:
            findings.append(Finding(WARNING, "hook points", "not looked at (--quick)"))
        else:
            findings += checks.findings(checks.ask(environ, timeout=timeout))
    findings += checks.switch(environ)
    findings += checks.configuration(environ)
    findings += checks.directory(environ)
    return findings
