"""vLLM's modes in which rows or weights are not the step's: LoRA, draft models, prompt embeddings, extra logits.

The problem: an adapter is read when the first request asks for it, then merged and copied into a slot; a draft model
runs within the target's step, shares modules with it, and has rows of its own; prompts of embeddings have no token ids;
with prompt log-probabilities the head runs again, over rows of a prompt. Any of these tensors may be taken for one of
the step's. The idea: the one method that reads an adapter's files gives parameters of the modules they belong to, under
the adapter's name. A draft's modules are counted as skipped, its own weights recorded under ``draft:``. Embeddings are
named by a hash of their bfloat16 rounding, the same for engines of other dtypes. Head and embedding go through methods
of the model that are called with the extra rows: these are skipped, as their rows are captured elsewhere.

Not here: adapters' slots and packing (weights.py), which rows are drafts (core/rows.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from vllm_accprobe.capture.core.attribute_override import override
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.taps.params import ParameterLines, named_tensors, own_tensors, sample_hash
from vllm_accprobe.capture.vllm.batch import EngineBatch
from vllm_accprobe.dump.schema import ADAPTER_ANEW, ADAPTER_ROLE, DRAFT_TAP, ROOT_TAP

_READS = "_load_adapter"
"""The method of vLLM's WorkerLoRAManager (0.11 to 0.33) that reads an adapter's files."""


def adapter_name(new: Any) -> str:
    """The adapter of a request that the scheduler names for the first time; "" where it has none."""
    request = getattr(new, "lora_request", None)
    return "" if request is None else str(getattr(request, "lora_name", "") or getattr(request, "lora_int_id", "?"))


class Adapters:
    """Records each adapter that ``runner`` loads. A runner without a manager has none, and nothing happens."""

    def __init__(self, session: Session, parameters: ParameterLines, runner: Any):
        self._session = session
        self._parameters = parameters
        self._seen: dict[tuple[str, str, str], str] = {}
        self._undo = ExitStack()
        self.close = self._undo.close
        """The manager is as it was."""
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            return
        original = getattr(manager, _READS, None)
        if not callable(original):
            session.sink.skip("lora", f"{type(manager).__name__} has no {_READS}: adapters' weights are not seen")
            return

        def read(request: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = original(request, *args, **kwargs)
            self._record_adapter(request, loaded)
            return loaded

        self._undo.callback(override(manager, _READS, read))

    def _record_adapter(self, request: Any, loaded: Any) -> None:
        if self._session.dead is not None:
            return
        try:
            name = str(request.lora_name)
            for module, weights in loaded.loras.items():
                for part, tensor in _tensors(weights):
                    self._record(name, str(module), part, tensor)
        except Exception as error:  # another release's or a vendor's adapters
            self._session.sink.skip("lora", f"an adapter's weights cannot be read ({type(error).__name__}: {error})")

    def _record(self, name: str, module: str, part: str, tensor: torch.Tensor) -> None:
        key, now = (name, module, part), sample_hash(tensor)
        before = self._seen.setdefault(key, now)
        role = f"{ADAPTER_ROLE}{name}.{part}"
        if before != now:
            self._session.sink.skip(module, ADAPTER_ANEW, f"param.{role}")
        else:
            self._parameters.whole(module, role, tensor)


def _tensors(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(which, tensor) of one module's LoRALayerWeights; experts have a list of each."""
    for part in ("lora_a", "lora_b"):
        value = getattr(weights, part, None)
        several = value if isinstance(value, (list, tuple)) else [value]
        for i, tensor in enumerate(several):
            if isinstance(tensor, torch.Tensor):
                yield part if len(several) == 1 else f"{part}.{i}", tensor
    scaling = getattr(weights, "scaling", None)
    if isinstance(scaling, (int, float)):
        yield "scaling", torch.tensor(float(scaling))


UNSEEN = "a draft model's: its weights are recorded, what it computes is not (its rows are guesses)"


def draft_model(runner: Any) -> torch.nn.Module | None:
    """The model that proposes drafts (V1: drafter, V2: speculator); None for none, and for n-grams."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(runner, name, None), "model", None)
        if isinstance(model, torch.nn.Module):
            return model
    return None


def record_draft_layer(parameters: ParameterLines, path: str, layer: torch.nn.Module) -> None:
    """The weights of ``layer``, which is loaded and not yet packed. Not those of embeddings and heads: only when all is
    loaded does a draft take the target's."""
    if hasattr(layer, "org_vocab_size"):
        return
    for name, tensor in own_tensors(layer):
        if tensor.numel():
            parameters.whole(f"{DRAFT_TAP}{path}", name, tensor)


def record_draft(session: Session, parameters: ParameterLines, runner: Any, target: torch.nn.Module) -> None:
    """Counts the modules of ``runner``'s draft model as skipped, and records its own weights."""
    model = draft_model(runner)
    if model is None or model is target:
        return
    shared = {tensor.data_ptr() for _, _, _, tensor in named_tensors(target) if tensor.numel()}
    own = [one for one in model.modules() if one not in set(target.modules())]
    session.sink.skip(DRAFT_TAP + type(model).__name__, UNSEEN, count=len(own))
    for path, _, name, tensor in named_tensors(model):
        if tensor.numel() and tensor.data_ptr() not in shared:
            parameters.whole(f"{DRAFT_TAP}{path}", name, tensor)


def embeddings_of(new: Any) -> torch.Tensor | None:
    """A new request's prompt embeddings, [rows, width] in the model's dtype; None where its prompt is tokens."""
    found = getattr(new, "prompt_embeds", None)
    return found if isinstance(found, torch.Tensor) else None


def hash_embeddings(
    embeddings: torch.Tensor, ids: Sequence[int] | None = None, is_token: Sequence[bool] | None = None
) -> str:
    """128-bit BLAKE2b as 32 hex digits of ``embeddings``, [rows, width] in a float dtype, and of the ids at those rows
    that are tokens."""
    digest = hashlib.blake2b(repr(tuple(embeddings.shape)).encode(), digest_size=16)
    bits = embeddings.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    digest.update(bits.numpy().tobytes())
    if ids is not None and is_token is not None:
        for id_, token in zip(ids, is_token, strict=True):
            digest.update((int(id_) if token else -1).to_bytes(4, "little", signed=True))
    return digest.hexdigest()


AGAIN = "rows of logits for prompt log-probabilities: the rows before the head are in the model's output"
TOKENS_ONLY = "rows embedded apart from prompt embeddings: they are in the model's input"


class OtherRows:
    """Wraps ``model.compute_logits`` and ``model.embed_input_ids``, where it has them."""

    def __init__(self, session: Session, model: Any, batch: EngineBatch):
        self._session = session
        self._batch = batch
        self._undo = ExitStack()
        self.close = self._undo.close
        """Both are as they were."""
        for name, call in (("compute_logits", self._logits), ("embed_input_ids", self._embed)):
            original = getattr(model, name, None)
            if callable(original):
                self._undo.callback(override(model, name, self._skipping(original, call)))

    def _skipping(self, original: Callable[..., Any], other: Callable[[int], str]) -> Callable[..., Any]:
        session = self._session

        def call(*args: Any, **kwargs: Any) -> Any:
            state = session.state
            if state is None:
                return original(*args, **kwargs)
            rows = next((len(v) for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()), 0)
            why = other(rows)
            if not why:
                return original(*args, **kwargs)
            session.sink.skip(ROOT_TAP, why, count=rows)
            session.state = None
            try:
                return original(*args, **kwargs)
            finally:
                session.state = state if session.dead is None else None

        return call

    def _logits(self, _: int) -> str:
        """The first call of a step is for the rows that are sampled."""
        assert self._session.state is not None
        calls = self._session.state.calls
        calls["head"] = calls.get("head", 0) + 1
        return AGAIN if calls["head"] > 1 else ""

    def _embed(self, rows: int) -> str:
        return TOKENS_ONLY if rows < self._batch.total else ""


def attach_modes(
    attached: ExitStack, session: Session, parameters: ParameterLines, runner: Any, model: Any, batch: EngineBatch
) -> None:
    """All of them, on a model that is loaded, until ``attached`` is closed."""
    attached.callback(Adapters(session, parameters, runner).close)
    attached.callback(OtherRows(session, model, batch).close)
    record_draft(session, parameters, runner, model)
