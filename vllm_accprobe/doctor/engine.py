"""What vLLM itself says: asks inside.py in a subprocess, and turns its answers into findings.

The problem: the answers need vLLM imported, which is slow and may fail. The idea: a time limit, a process that cannot
take this one with it, and a pure function from answers to findings. Not here: the questions (inside.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from vllm_accprobe.children import Child
from vllm_accprobe.doctor.finding import ERROR, OK, WARNING, Finding
from vllm_accprobe.doctor.inside import MARKER

Answers = dict[str, Any]
INSIDE = "vllm_accprobe.doctor.inside"


def ask(environ: Mapping[str, str], *, timeout: float, command: list[str] | None = None) -> Answers:
    """The answers of inside.py by question, each ``{"value": ...}`` or ``{"error": str}``; ``{"failed": str}`` if the
    process did not answer within ``timeout`` seconds. command: another one that answers. Never raises for what the
    process does."""
    # The probe stays off in there: the doctor looks, it does not claim a dump directory.
    env = {k: v for k, v in environ.items() if not k.startswith("VLLM_ACCPROBE")}
    env["VLLM_LOGGING_LEVEL"] = "ERROR"
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        # A folder named vllm in the working directory is not what `vllm serve` imports: a Child does not either.
        with Child(INSIDE, env=env, **how) if command is None else _other(command, env, how) as process:
            try:
                said_out, said_err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        return {"failed": f"importing vLLM did not end within {timeout:g} s"}
    except OSError as error:
        return {"failed": f"{command[0] if command else sys.executable}: {error.strerror or error}"}
    for line in reversed(said_out.splitlines()):
        if line.startswith(MARKER):
            try:
                answers = json.loads(line[len(MARKER) :])
            except ValueError:
                break
            return answers if isinstance(answers, dict) else {"failed": "the answer cannot be read"}
    said = [line.strip() for line in said_err.splitlines() if line.strip()]
    end = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return {"failed": f"importing vLLM ended with {end}" + (f": {said[-1][:300]}" if said else "")}


def _other(command: list[str], env: Mapping[str, str], how: Mapping[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=env, text=True, errors="replace", **how)


def findings(answers: Answers) -> list[Finding]:
    """What the answers mean for a capture."""
    if "failed" in answers:
        return [Finding(ERROR, "import", answers["failed"], _alone("import vllm"))]
    version = answers["version"]
    if "error" in version:
        return [Finding(ERROR, "import", f"vLLM cannot be imported: {version['error']}", _alone("import vllm"))]
    out = [_platform(answers["platform"]), _worker(answers["worker"]), *_runners(answers)]
    out.append(_lacking(answers["scheduler"], "scheduler", "SchedulerOutput has the fields that capture reads", ERROR))
    out.append(_lacking(answers["engine_args"], "eager", "EngineArgs can be made eager", WARNING))
    capture = answers["capture"]
    if "error" in capture:
        todo = _alone("import vllm_accprobe.capture.vllm.capturing")
        out.append(Finding(ERROR, "capture", f"the probe cannot be loaded: {capture['error']}", todo))
    else:
        out.append(Finding(OK, "capture", "the probe can be loaded"))
    return out


def _alone(code: str) -> str:
    return f"see the whole error with: {os.path.basename(sys.executable)} -c '{code}'"


def _platform(answer: Answers) -> Finding:
    if "error" in answer:
        return Finding(ERROR, "platform", answer["error"], _alone("from vllm.platforms import current_platform"))
    p = answer["value"]
    text = f"{p['class']}, device type {p['device_type'] or 'unknown'}" + (f" ({p['device']})" if p["device"] else "")
    if p["class"].endswith("UnspecifiedPlatform") or not p["device_type"]:
        todo = "check the drivers, and that this build of vLLM is for this hardware"
        return Finding(ERROR, "platform", f"vLLM found no hardware it can run on: {text}", todo)
    return Finding(OK, "platform", text + ("" if p["own"] else ", out of tree"))


def _worker(answer: Answers) -> Finding:
    if "error" in answer:
        todo = "this vLLM has no known hook point: nothing would be captured; report its version"
        return Finding(ERROR, "hook point", answer["error"], todo)
    return Finding(OK, "hook point", f"WorkerWrapperBase.init_device in {answer['value']}")


def _runners(answers: Answers) -> list[Finding]:
    default, answer = answers["default_runner"], answers["runners"]
    if "error" in answer:
        return [Finding(WARNING, "model runner", answer["error"])]
    chosen = default.get("value")
    text = f"{chosen} is used" if chosen else f"which one is used is unknown ({default.get('error')})"
    out = []
    for name, runner in answer["value"].items():
        used = chosen is None or name in chosen
        if not runner["there"]:
            continue
        if "error" in runner:
            level = WARNING if used else OK
            out.append(Finding(level, "model runner", f"{name} cannot be imported here ({runner['error']})"))
        elif runner["missing"]:
            level = ERROR if used else WARNING
            todo = "rows cannot be told apart with this release; report its version"
            out.append(Finding(level, "model runner", f"{name} lacks {', '.join(runner['missing'])}", todo))
        else:
            out.append(Finding(OK, "model runner", f"{name} has the methods that capture wraps"))
    if not any(runner["there"] for runner in answer["value"].values()):
        # A hardware plugin may bring its own; capture wraps the instance, whatever its class.
        return [Finding(WARNING, "model runner", "vLLM's own runners are not there; the platform must bring one")]
    return [Finding(OK, "model runner", text), *out]


def _lacking(answer: Answers, check: str, good: str, level: str) -> Finding:
    if "error" in answer:
        return Finding(level, check, answer["error"])
    if answer["value"]:
        todo = "report this vLLM's version" if level == ERROR else "start vLLM with --enforce-eager"
        return Finding(level, check, f"this vLLM lacks {', '.join(answer['value'])}", todo)
    return Finding(OK, check, good)
