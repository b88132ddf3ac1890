"""The runs of one command: their environments, which differ in the taps and in nothing else.

The problem: taps off, on and selected must be three states of one engine, whatever the user's own settings are, and
each must record what decides (tokens, logits, the root's output). The idea: every environment is made of the user's:
``off`` has no taps, ``on`` has the user's own settings, ``selected`` chooses fewer of the same taps in fewer steps,
``full`` asks for all, ``first N`` places only the first N of them. Not here: carrying them out (proof.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_accprobe.config import ENV, PREFIX, REPLICAS, RUN_ID, TAP_SET, ConfigError, ProbeConfig, Ranges
from vllm_accprobe.run.settings import allow_plugin

OFF, AGAIN, ON, SELECTED, FULL = "off", "off again", "on", "selected", "full"
OUTCOME = ("<root>", "logits")
"""Of VLLM_ACCPROBE_MODULES: what Python sees beside the graph in every run; the preset ``logits`` has the sampler."""
_MOST_NAMED = 1000
_LONGEST = 100_000
"""derived: of one environment variable, Linux takes 128 KiB."""


@dataclass(frozen=True)
class TapRun:
    """One start of the command. name: for people; environ: all of its environment; place: directory of its dump."""

    name: str
    place: Path
    environ: Mapping[str, str] = field(repr=False)

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.place.with_name(self.place.name + ".log")


class Runs:
    """The environments of one proof. base: the user's; out: where dumps and logs go.

    Raises ConfigError where the user's settings are wrong, or place no taps.
    """

    def __init__(self, base: Mapping[str, str], out: Path):
        own = (RUN_ID, REPLICAS, TAP_SET)
        self._base = {name: value for name, value in base.items() if name not in own} | {
            ENV: "1",
            PREFIX + "GRAPHS": "1",
        }
        allow_plugin(self._base)
        self._out = out
        self.config = ProbeConfig.from_env(self._base)
        if not self.config.graph_mb:
            raise ConfigError(f"{PREFIX}GRAPH_MB=0 places no taps: there is nothing to compare with; unset it")
        if not self.config.capture_outputs:
            raise ConfigError(f"{PREFIX}PARTS takes no outputs, and taps in graphs take nothing else: unset it")

    def off(self, name: str = OFF) -> TapRun:
        """No taps, and no other setting that puts anything into the model; the same steps, tokens and requests."""
        return self._run(name, self._bare() | {PREFIX + "GRAPH_MB": "0"})

    def on(self) -> TapRun:
        """The user's own settings, and what decides beside them."""
        return self._run(ON, self._theirs(self._modules()))

    def full(self) -> TapRun:
        """Taps at all modules."""
        return self._run(FULL, {**self._theirs("all"), PREFIX + "GRAPH_TAPS": ""})

    def selected(self, taps: Sequence[str], steps: Sequence[int], *, everywhere: bool = False) -> TapRun:
        """Every second of the ``taps`` that ``on`` recorded, in every second of its ``steps``. everywhere: ``on`` has
        the full set, which these few might not ask for."""
        named = [*taps[1::2][:_MOST_NAMED], *OUTCOME]
        kept = ",".join(map(str, steps[1::2][:_MOST_NAMED] or steps[:1]))
        full = {PREFIX + "GRAPH_TAPS": "?*"} if everywhere else {}
        return self._run(SELECTED, {**self._theirs(",".join(named)), PREFIX + "STEPS": kept, **full})

    def first(self, of: str, modules: Sequence[str]) -> TapRun:
        """Taps at these modules of run ``of`` alone, none of them chosen. Raises ConfigError where they are
        too many to name."""
        named = ",".join(modules)
        if len(named) > _LONGEST:
            raise ConfigError(f"{len(modules)} modules are too many to name in one variable")
        same = {"GRAPH_MB": str(self.config.graph_mb), "GRAPH_TAPS": named, "PARTS": self._parts()}
        environ = self._bare() | {PREFIX + name: value for name, value in same.items()}
        return self._run(f"{of}, first {len(modules)}", environ)

    def _run(self, name: str, environ: Mapping[str, str]) -> TapRun:
        place = self._out / name.replace(",", "").replace(" ", "-")
        return TapRun(name, place, {**environ, PREFIX + "DIR": str(place)})

    def _bare(self) -> dict[str, str]:
        kept = {name: value for name, value in self._base.items() if not name.startswith(PREFIX)}
        c = self.config
        said = {
            "GRAPHS": "1", "MODULES": ",".join(OUTCOME), "PARTS": "output", "STEPS": _spelt(c.steps),
            "TOKENS": _spelt(c.tokens), "RANKS": _spelt(c.ranks), "REQUESTS": ",".join(c.requests),
            "MAX_GB": str(c.max_gb),
        }  # fmt: skip
        return kept | {PREFIX + name: value for name, value in said.items()}

    def _theirs(self, modules: str) -> dict[str, str]:
        return {**self._base, PREFIX + "MODULES": modules, PREFIX + "PARTS": self._parts()}

    def _parts(self) -> str:
        """They decide where taps stand. Where nothing is said: no parameters, which would fill a disk run by run."""
        return ",".join(self.config.parts) or "input,output"

    def _modules(self) -> str:
        chosen = self.config.modules
        if not self.config.modules_left:
            return ",".join(chosen)
        everything = ["all"] if all(glob.startswith("!") for glob in chosen) else []
        return ",".join([*everything, *chosen, *OUTCOME])


def _spelt(ranges: Ranges) -> str:
    return ",".join(f"{low}-{high}" for low, high in ranges)
