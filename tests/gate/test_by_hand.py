"""The commands of a dig that a person does, literally."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.gate.localize import LocalizePlan, LocalizeTarget, Window, lines, settings

PLAN = LocalizePlan(
    LocalizeTarget("a*b", 3, 70, 0.5, 1),
    (Window(0, ("s",), 0, 0, (50,)), Window(1, ("a*b", "it's,c"), 0, 3, (40, 50))),
    ("one", "all"),
)


def test_the_commands() -> None:
    requests = """'s,a[*]b.pass1,it'"'"'s?c.pass1'"""
    front = "VLLM_ACCPROBE=1 VLLM_ACCPROBE_FORCE=1 VLLM_ACCPROBE_DIR={}-dump VLLM_ACCPROBE_MAX_GB=20 "
    front += f"VLLM_ACCPROBE_REQUESTS={requests} VLLM_ACCPROBE_TOKENS=0-3 COMMAND"
    end = "on its machine (COMMAND: what serves it there; end it with SIGTERM or Ctrl-C when all is sent):"
    assert lines(PLAN, Path("out/golden"), 20) == [
        f"golden, {end}",
        f"  {front.format('golden')}",
        "  accprobe send --teacher-force out/golden --url URL --out golden-dig",
        f"mine, {end}",
        f"  {front.format('mine')}",
        "  accprobe send --teacher-force out/golden --url URL --out mine-dig",
        "anywhere:",
        "  accprobe compare golden-dump mine-dump --out compare",
    ]


def test_a_shell_and_a_server_understand_the_settings() -> None:
    """As the server reads them: these requests in these passes, and no others."""
    words = dict(word.split("=", 1) for word in shlex.split(settings(PLAN, "mine", 0.5)))
    config = ProbeConfig.from_env({k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | words)
    assert (config.enabled, config.force, config.dir, config.max_gb) == (True, "1", "mine-dump", 0.5)
    assert config.tokens == ((0, 3),)
    for name, wanted in (("s", 1), ("a*b.pass1", 1), ("it's,c.pass1", 1), ("a*b", 0), ("axb.pass1", 0), ("s.pass1", 0)):
        assert config.wants_request(name) == bool(wanted), name
