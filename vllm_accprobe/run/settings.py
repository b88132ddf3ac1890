"""The environment of the command: the probe's settings from options, checked before anything is started.

Not here: what the settings mean (config.py), ATB's (atb.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vllm_accprobe.config import ENV, PREFIX, RUN_ID, ConfigError, ProbeConfig, default_dir
from vllm_accprobe.dump.schema import RUN_JSON

PLUGIN = "accprobe"
REGISTER = "ACCPROBE_RUN_REGISTER"
"""Names the file in which processes announce their dumps; as in capture/core/recording.py, which imports torch's
room."""


def environment(
    options: Mapping[str, str | None], base: Mapping[str, str]
) -> tuple[dict[str, str], ProbeConfig, list[str]]:
    """(environment, settings, lines to say) for a command. options: by setting's name in small letters; None: not
    given, the base environment's stays. The directory is settled, absolute.

    Raises:
        ConfigError: a setting is wrong, or the directory already holds a dump.
    """
    environ = dict(base)
    environ[ENV] = "1"
    for name, value in options.items():
        if value is not None:
            # The command may work in another directory than this one.
            environ[PREFIX + name.upper()] = os.path.abspath(value) if name == "config" else value
    config = ProbeConfig.from_env(environ)
    root = os.path.abspath(config.dir or default_dir())
    # With a run id of its own a command joins a run that others, on other machines, may have begun.
    if not environ.get(RUN_ID) and Path(root, RUN_JSON).exists():
        raise ConfigError(f"--dir={root} already holds a dump; name another directory, or remove it")
    environ[PREFIX + "DIR"] = root
    notes = []
    if allow_plugin(environ):
        notes.append(f"VLLM_PLUGINS did not contain {PLUGIN}, and vLLM would not have loaded it: added")
    return environ, config.with_dir(root), notes


def allow_plugin(environ: dict[str, str]) -> bool:
    """Adds our plugin to vLLM's list of those that it may load, where there is one without it; whether it did."""
    names = [p.strip() for p in environ.get("VLLM_PLUGINS", PLUGIN).split(",")]
    if PLUGIN in names:
        return False
    environ["VLLM_PLUGINS"] = ",".join([*filter(None, names), PLUGIN])
    return True
