"""Forcing inside vLLM: the observer that knows which requests name their tokens, and writes down the steps.

The problem: a request's tokens are known when the scheduler first names it, and are needed in each of its steps by a
sampler that knows no requests; where forcing is impossible (speculative decoding, a runner without a sampler) serving
must go on. The idea: an observer beside those of a capture, on every rank, because each rank of a tensor-parallel group
samples for itself. A request that could not be forced is answered as any other: the client compares the tokens
that it gets with those that it named, and sees it. Not here: the sampler (forced_sampler.py), the lines (step_log.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.forcing import forced_sampler
from vllm_accprobe.capture.forcing.step_log import StepLog, log_name
from vllm_accprobe.capture.forcing.tokens_asked import NamedTokens, asked
from vllm_accprobe.capture.request_ids import external_ids
from vllm_accprobe.capture.vllm.attach import observe
from vllm_accprobe.capture.vllm.names.modes import unsampled
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import guesses
from vllm_accprobe.config import ProbeConfig


def attach(wrapper: Any) -> ForcingObserver | None:
    """Called in each worker after init_device. Never raises."""
    failed = "forcing could not attach ({}): it is off on this rank; serving goes on"
    return observe(wrapper, ForcingObserver, ForcingObserver.without, failed, ForcingObserver)


class ForcingObserver(StepObserver):
    """The forced requests of one rank, and its steps where it is the first of a replica."""

    without = "no request can be forced"

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self._adapter = adapter
        self._asked: dict[str, NamedTokens] = {}
        self._names: dict[str, str] = {}
        self._in_step = self._wrapped = self._said = False
        self._why = "its model is not loaded"
        self._log: StepLog | None = None
        if config.force_dir and first_of_replica(adapter.parallel):
            self._log = StepLog(Path(config.force_dir) / log_name(adapter.parallel["rank"]))

    @property
    def awake(self) -> bool:
        return self._wrapped

    def loaded(self) -> None:
        if self._wrapped:
            return  # weights were loaded anew
        self._wrapped, self._why = True, ""
        if guesses(getattr(self._adapter.runner, "vllm_config", None)):
            self._why = "with speculative decoding the tokens of a step depend on what was guessed"
        elif unsampled(self._adapter.runner):
            self._why = unsampled(self._adapter.runner)
        elif not forced_sampler.wrap(getattr(self._adapter.runner, "sampler", None), self._sample):
            self._why = f"the sampler of {type(self._adapter.runner).__name__} has no method `sample`"

    # --- steps -------------------------------------------------------------------------------------------------

    def begin_step(self, step: EngineStep) -> None:
        self._in_step = step.number is not None
        for new in step.new:
            try:
                one = asked(new.extra, new.length)
            except ValueError as error:
                self._refuse(str(error))
                continue
            if one is not None and self._why:
                self._refuse(self._why)
            elif one is not None:
                self._asked[new.name] = one
        if self._log is not None and step.number is not None:
            begins = step.starts()
            self._log.add(step.number, [(self._sent(name), begins.get(name, 0), n) for name, n in step.counts.items()])
        for name in step.finished:
            self._asked.pop(name, None)
            self._names.pop(name, None)

    def end_step(self) -> None:
        self._in_step = False

    def _sent(self, name: str) -> str:
        """As the client calls the request."""
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = external_ids(name)[-1]
        return known

    def _sample(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._asked or not self._in_step or self._why:
            return result
        try:
            logits = args[0] if args else kwargs["logits"]
            tokens = forced_sampler.named(self._adapter.batch.rows(), self._known(int(logits.shape[-1])))
            return forced_sampler.replaced(result, tokens) if max(tokens, default=-1) >= 0 else result
        except Exception as error:
            self.failed("forcing", error)
            return result

    def _known(self, vocabulary: int) -> dict[str, NamedTokens]:
        """The requests whose tokens this model has: another id would be read from beyond its embedding."""
        for name in [name for name, one in self._asked.items() if one.largest >= vocabulary]:
            del self._asked[name]
            self._refuse(f"it names a token that this model, with {vocabulary} of them, does not have")
        return self._asked

    def _refuse(self, why: str) -> None:
        if not self._said:
            self._said = True
            say(f"a request that names its tokens is answered as any other: {why} (said once)")

    # --- the end -----------------------------------------------------------------------------------------------

    def failed(self, where: str, error: BaseException) -> None:
        if not self._why:
            self._why = f"{where} failed ({type(error).__name__}: {error})"
            say(f"{self._why}: no request is forced any more; serving goes on")

    def close(self, reason: str) -> None:
        if self._log is not None:
            self._log.close()


def first_of_replica(parallel: dict[str, Any]) -> bool:
    """Whether no other rank of this replica is before it: all of them have the same steps."""
    replica, replicas = parallel["dp"]
    ranks = parallel["world_size"] // max(replicas, 1)
    return bool(parallel["rank"] == replica * ranks)
