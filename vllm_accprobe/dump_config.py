"""``DumpConfig``: ait's and msit's spelling of what the probe shall capture.

The problem: their scripts say tensor_part=2 and token_range=[0] where ours say parts and tokens. The idea: a dataclass
with their names and defaults, which becomes a ProbeConfig. Not here: the settings themselves (config.py), the hook that
takes one (capture/torch_model.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm_accprobe import config as words
from vllm_accprobe.config import PREFIX, ConfigError, ProbeConfig


@dataclass(frozen=True)
class DumpConfig:
    """ait's and msit's spelling of a configuration: what register_hook() takes.

    dump_path: directory, by default VLLM_ACCPROBE_DIR or ./accprobe/<UTC time>; token_range: token ordinals (default:
    the prompt only, as in ait); module_list: classes or globs of modules, [] for all; tensor_part: 0 inputs, 1 outputs,
    2 both; device_id: only this device; dump_last_logits: the logits only; mode: "module", "api" (operator calls too)
    or both; api_list: operators, with "api"; dump_weight: parameters' payloads too; layer_name: a glob over module
    paths, besides module_list.
    """

    dump_path: str | None = None
    token_range: Any = (0,)
    module_list: Any = ()
    tensor_part: int = 2
    device_id: int | None = None
    dump_last_logits: bool = False
    mode: Any = ("module",)
    dump_weight: bool = False
    layer_name: str | None = None
    api_list: Any = ()

    def to_probe(self) -> ProbeConfig:
        """Raises ConfigError for a bad value."""
        if self.tensor_part not in (0, 1, 2):
            raise ConfigError(f"tensor_part={self.tensor_part}: 0 is inputs, 1 outputs, 2 both")
        parts = ("input", "output", "input,output")[self.tensor_part] + (",params" if self.dump_weight else "")
        names = [m if isinstance(m, str) else getattr(m, "__name__", str(m)) for m in self.module_list or ()]
        names += [self.layer_name] if self.layer_name else []
        names += ["logits"] if self.dump_last_logits else []
        mode = (self.mode,) if isinstance(self.mode, str) else tuple(self.mode or ("module",))
        for word in mode:
            if word not in ("module", "api"):
                raise ConfigError(f"mode={word}: known are module and api{words.nearest(str(word), ('module', 'api'))}")
        if self.api_list and "api" not in mode:
            raise ConfigError("api_list chooses operators, and mode is 'module': write mode=['module', 'api'] or 'api'")
        values: dict[str, Any] = {"modules": names, "parts": parts, "tokens": self.token_range or (0,)}
        # Without a path of its own: where `accprobe run` or the environment wants it.
        path = self.dump_path or os.environ.get(PREFIX + "DIR")
        if path:
            values["dir"] = path
        if "api" in mode:
            values |= {"ops": True, "ops_list": list(self.api_list or ())}
        return ProbeConfig.from_kwargs(**values)
