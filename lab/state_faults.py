"""Wrong states, each planted where a real report had it (docs/state-checks.md has the list).

The problem: a ledger that has never seen a wrong state may be blind. The idea: small functions that spoil one engine
of state_lab.py: each takes the engine and changes one object of it, so that the next engine of the process is whole.
Kernels are never touched: their results are right for the wrong state that they get. Not here: the engines
(state_lab.py), what the ledger must say (scripts/state_cases.py).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lab import state_lab as lab
from lab.state_lab import around

Before = Callable[[int], None]


def _after(owner: Any, name: str, change: Callable[[Any], None], at: int, last: int | None = None) -> None:
    """``change`` gets what the method gave in its calls from ``at`` to ``last``, counted from 1."""
    calls = itertools.count(1)

    def after(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if at <= next(calls) <= (last or at):
            change(result)
        return result

    around(owner, name, after)


def _layers(llm: Any) -> list[Any]:
    return list(lab.runner_of(llm).vllm_config.compilation_config.static_forward_context.values())


def _with_states(llm: Any) -> Any:
    """The first layer whose cache is a tuple of states."""
    return next(one for one in _layers(llm) if isinstance(getattr(one, "kv_cache", None), tuple))


def _tables(llm: Any) -> Any:
    """Blocks by vLLM's id of a request."""
    return lab.scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks


def freed(llm: Any, victim: str = "a", at: int = 4) -> Before:
    """The scheduler gives back the blocks of a request that goes on (vllm-ascend 13501: an asynchronous save frees
    them): the next request gets them."""

    def before(step: int) -> None:
        if step != at:
            return
        tables = _tables(llm)
        blocks = tables[lab.named(tables, victim)]
        pool = lab.scheduler_of(llm).kv_cache_manager.block_pool
        pool.free_blocks(list(blocks[:1]))
        queue = pool.free_block_queue  # as if it had waited longest: the next request gets it
        queue.remove(blocks[0])
        queue.prepend_n([blocks[0]]) if hasattr(queue, "prepend_n") else queue.append(blocks[0])

    return before


def stale_slot(llm: Any, row: int = 0, at: int = 6) -> None:
    """The slots of one step are those of the step before, for one request (aiter 4076, vllm 47303: metadata that was
    not made anew)."""
    runner = lab.runner_of(llm)

    def stale(result: Any) -> None:
        slots = result[0] if hasattr(runner, "block_tables") else next(iter(result[0].values()))
        slots[row] -= 1

    if hasattr(runner, "block_tables"):
        _after(runner.block_tables, "compute_slot_mappings", stale, at)
    else:
        _after(runner, "_get_slot_mappings", stale, at)


def dropped_row(llm: Any, at: int = 6) -> None:
    """The kernel leaves out the last row of a step: its slot keeps what it had, though all metadata are right."""
    from vllm.v1.worker import gpu_model_runner  # noqa: F401

    calls = itertools.count(1)

    def update(original: Any, module: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        if next(calls) == at:
            slots = slots.clone()
            slots[-1] = -1
        return original(module, key, value, cache, slots)

    second = [one.impl for one in _layers(llm) if hasattr(getattr(one, "impl", None), "do_kv_cache_update")][1]
    around(second, "do_kv_cache_update", update)


def _states(llm: Any, change: Callable[[Any], None], at: int) -> None:
    """``change`` gets the metadata of the states' layers of the ``at``-th step, before anything runs with it."""
    _after(lab.runner_of(llm), "_build_attention_metadata", lambda result: change(next(
        one for one in result[0].values() if hasattr(one, "state_indices_tensor_d")
        or hasattr(one, "non_spec_state_indices_tensor"))), at)  # fmt: skip


def _first_of(one: Any, *names: str) -> Any:
    return next(value for name in names if (value := getattr(one, name, None)) is not None)


def other_state(llm: Any, at: int = 8) -> None:
    """Two requests' state indices change places in one step (vllm 53912: another one's number reaches the state)."""

    def change(one: Any) -> None:
        indices = _first_of(one, "state_indices_tensor_d", "non_spec_state_indices_tensor")
        indices[:2] = indices[:2].flip(0).clone()

    _states(llm, change, at)


def no_state(llm: Any, at: int = 1) -> None:
    """A request that begins is told that it has a state already: it goes on from whatever its block holds."""

    def change(one: Any) -> None:
        _first_of(one, "has_initial_states_p", "has_initial_state")[:] = True

    _states(llm, change, at)


def swapped_states(llm: Any, at: int = 8) -> Before:
    """The states of two requests change places in the cache of one layer: indices are right, bytes are another's."""

    def before(step: int) -> None:
        if step != at:
            return
        groups = lab.scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers
        tables = next(one.req_to_blocks for one in groups if "amba" in type(one).__name__)
        first, second = (blocks[-1].block_id for blocks in list(tables.values())[:2])
        for cache in _with_states(llm).kv_cache:
            cache[[first, second]] = cache[[second, first]]

    return before


def _late(llm: Any, owner: Any, name: str, wanted: Callable[..., bool] = lambda *args: True) -> None:
    """The calls of a method are made when the forward behind them is over."""
    original, waiting = getattr(owner, name), list[Any]()

    def later(_: Any, *args: Any, **kwargs: Any) -> None:
        if wanted(*args):
            waiting.append((args, kwargs))

    def forward(run: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        while waiting:
            args, kwargs = waiting.pop()
            original(*args, **kwargs)
        return result

    around(owner, name, later)
    around(lab.runner_of(llm), "_model_forward", forward)


def late_state_copy(llm: Any) -> None:
    """The copy of a state to its next block is made behind the forward that reads it."""
    from vllm.v1.worker import mamba_utils

    _late(llm, mamba_utils, "do_mamba_copy_block", lambda bufs: bool(bufs.offset))


def late_load(llm: Any) -> None:
    """What a connector brings arrives when the forward that reads it is over (LMCache 4247, sglang 23020)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    _late(llm, get_kv_transfer_group(), "start_load_kv")


def flipped_bit(llm: Any, victim: str = "a", at: int = 6, layer: int = 2) -> Before:
    """One bit of a block changes between two steps, in one layer."""

    def before(step: int) -> None:
        if step == at:
            tables = _tables(llm)
            block = tables[lab.named(tables, victim)][0].block_id
            attentions = [x for x in _layers(llm) if isinstance(getattr(x, "kv_cache", None), torch.Tensor)]
            attentions[layer].kv_cache[block].view(torch.int16).view(-1)[17] ^= 1

    return before


def strange_hit(llm: Any, donor: str = "a") -> Before:
    """The prefix cache gives a request the block of other tokens: as if two hashes were equal."""

    def found(original: Any, request: Any) -> Any:
        tables = _tables(llm)
        names = [one for one in tables if one.partition("-")[0] == donor]
        if request.request_id.partition("-")[0] == donor or not names or request.num_computed_tokens:
            return original(request)
        blocks, _, *rest = original(request)
        return (type(blocks)((list(tables[names[0]][:1]),)), 32, *rest)

    around(lab.scheduler_of(llm).kv_cache_manager, "get_computed_blocks", found)
    return lambda step: None


# --- whose blocks a prefix hit brings ---------------------------------------------------------------------------------


def hit_of(llm: Any, columns: Sequence[tuple[str, int]], victim: str = "b", tokens: int | None = None) -> Before:
    """A prefix hit gives ``victim`` the blocks that others hold, (request, column of its table) each; also of requests
    that have ended by then, whose blocks may be others' now."""
    known: dict[tuple[str, int], Any] = {}

    def found(original: Any, request: Any) -> Any:
        if request.request_id.partition("-")[0] != victim or request.num_computed_tokens:
            return original(request)
        blocks, _, *rest = original(request)
        return (type(blocks)(([known[place] for place in columns],)), tokens or 32 * len(columns), *rest)

    def before(step: int) -> None:
        for name, blocks in _tables(llm).items():
            for column, block in enumerate(blocks):
                known.setdefault((name.partition("-")[0], column), block)

    around(lab.scheduler_of(llm).kv_cache_manager, "get_computed_blocks", found)
    return before


def _keys_without(name: str, nothing: Any = None) -> Callable[[Any], None]:
    """Keys of blocks are made of requests whose attribute ``name`` is ``nothing``."""

    def made(original: Any, request: Any, *args: Any) -> Any:
        value = getattr(request, name)
        setattr(request, name, nothing)
        try:
            return original(request, *args)
        finally:
            setattr(request, name, value)

    def plant(llm: Any) -> None:
        from vllm.v1.core import kv_cache_utils

        original = kv_cache_utils.generate_block_hash_extra_keys
        around(kv_cache_utils, "generate_block_hash_extra_keys", made)
        llm._accprobe_undo = lambda: setattr(kv_cache_utils, "generate_block_hash_extra_keys", original)

    return plant


no_adapter_in_keys = _keys_without("lora_request")
"""A block's key has no adapter in it (vllm 30931, 42125): adapters share prefixes."""
no_salt_in_keys = _keys_without("cache_salt")
no_images_in_keys = _keys_without("mm_features", [])
"""Pictures share the prefix of their text."""


# --- metadata ---------------------------------------------------------------------------------------------------------


def metadata(llm: Any, change: Callable[[Any], None], at: int = 6, last: int | None = None) -> None:
    """``change`` gets the attention's metadata of the steps from ``at`` to ``last``, counted from 1."""

    def each(result: Any) -> None:
        for one in {id(m): m for m in result[0].values()}.values():
            change(one)

    _after(lab.runner_of(llm), "_build_attention_metadata", each, at, last)


def table_off_by_one(one: Any) -> None:
    one.block_table = one.block_table.roll(-1, 1)


def tables_exchanged(one: Any) -> None:
    one.block_table = one.block_table.flip(0) if len(one.block_table) == 2 else one.block_table[[1, 0, 2]]


def entry_of_another(one: Any) -> None:
    one.block_table = one.block_table.clone()
    one.block_table[0, 0] = one.block_table[1, 0]


def length_short(one: Any) -> None:
    one.seq_lens = one.seq_lens - torch.tensor([1] + [0] * (len(one.seq_lens) - 1), dtype=one.seq_lens.dtype)


def length_of_another(one: Any) -> None:
    one.seq_lens = one.seq_lens.clone()
    one.seq_lens[0] = one.seq_lens[1]


def slots_moved(llm: Any, by: int = 1, at: int = 1, last: int = 1) -> None:
    """All rows of a step are written ``by`` slots further on."""

    def move(result: Any) -> None:
        for slots in {id(s): s for s in result[0].values()}.values():
            slots[slots >= 0] += by

    _after(lab.runner_of(llm), "_get_slot_mappings", move, at, last)


# --- recurrent states -------------------------------------------------------------------------------------------------


def prompt_state_dropped(one: Any) -> None:
    """A later chunk begins without the state of the chunk before."""
    if getattr(one, "has_initial_states_p", None) is not None:
        one.has_initial_states_p = torch.zeros_like(one.has_initial_states_p)


def prompt_state_elsewhere(one: Any) -> None:
    """A chunk's state is that of the next block."""
    if getattr(one, "state_indices_tensor_p", None) is not None and len(one.state_indices_tensor_p):
        one.state_indices_tensor_p = one.state_indices_tensor_p + 1


def kept_state(llm: Any, half: int, at: int = 2) -> None:
    """The first layer's convolution (half 0) or recurrence (1) of the ``at``-th step leaves its state as it was."""
    layer, calls = _with_states(llm), itertools.count(1)

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        kept = layer.kv_cache[half].clone()
        result = original(*args, **kwargs)
        if next(calls) == at:
            layer.kv_cache[half].copy_(kept)
        return result

    around(layer, "forward", forward)


# --- the loader -------------------------------------------------------------------------------------------------------


def loaded_wrong(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """``change`` gets the model's parameters by name, once they are loaded and before anything is captured of them."""

    def plant(model: Any) -> None:
        with torch.no_grad():
            change(dict(model.named_parameters()))

    return plant


def _exchange(params: dict[str, Any], first: str, second: str) -> None:
    a, b = (next(p for n, p in params.items() if n.endswith(name)) for name in (first, second))
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def layers_exchanged(params: dict[str, Any]) -> None:
    _exchange(params, "layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight")


def gate_and_up_exchanged(params: dict[str, Any]) -> None:
    for name, one in params.items():
        if name.endswith("layers.1.mlp.gate_up_proj.weight"):
            one.copy_(one.roll(len(one) // 2, 0))


def rows_moved(params: dict[str, Any]) -> None:
    for name, one in params.items():
        if name.endswith("layers.0.self_attn.qkv_proj.weight"):
            one.copy_(one.roll(8, 0))


# --- what the runner hands to the model ------------------------------------------------------------------------------


def _prepared(llm: Any, change: Callable[[Any, list[int], Any], None]) -> None:
    """``change`` gets the runner, how many tokens each of its requests computes, and the logits' rows of each step."""
    runner = lab.runner_of(llm)

    def prepare(original: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduled, *args, **kwargs)
        change(runner, [scheduled.num_scheduled_tokens[name] for name in runner.input_batch.req_ids], result[0])
        return result

    around(runner, "_prepare_inputs", prepare)


def stale_tokens(llm: Any) -> None:
    """A decode row gets the token of the step before the last one (asynchronous scheduling that reads too early)."""

    def change(runner: Any, counts: list[int], logits: Any) -> None:
        at = 0
        for row, n in enumerate(counts):
            done = int(runner.input_batch.num_computed_tokens_cpu[row])
            if n == 1 and done > int(runner.input_batch.num_prompt_tokens[row]):
                runner.input_ids.gpu[at] = int(runner.input_batch.token_ids_cpu[row, done - 1])
            at += n

    _prepared(llm, change)


def tokens_exchanged(llm: Any) -> None:
    """Two decode rows get one another's tokens."""

    def change(runner: Any, counts: list[int], logits: Any) -> None:
        if counts == [1, 1]:
            runner.input_ids.gpu[:2] = runner.input_ids.gpu[:2].flip(0).clone()

    _prepared(llm, change)


def logits_of_row_before(llm: Any) -> None:
    """The logits of a prompt are those of the row before its last one."""

    def change(runner: Any, counts: list[int], logits: Any) -> None:
        if counts[0] > 2:
            logits[0] -= 1

    _prepared(llm, change)


def images_exchanged(llm: Any) -> None:
    """Two images of one batch stand in one another's places."""

    def gather(original: Any, *args: Any, **kwargs: Any) -> Any:
        embeddings, *rest = original(*args, **kwargs)
        return (list(embeddings)[::-1], *rest)

    around(lab.runner_of(llm), "_gather_mm_embeddings", gather)
