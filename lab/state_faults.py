"""Wrong states, each planted where a real report had it (docs/state-checks.md has the list).

The problem: a ledger that has never seen a wrong state may be blind. The idea: small functions that spoil one engine
of state_lab.py: each takes the engine and changes one object of it, so that the next engine of the process is whole.
Kernels are never touched: their results are right for the wrong state that they get. Not here: the engines
(state_lab.py), what the ledger must say (scripts/state_cases.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lab import state_lab as lab

Before = Callable[[int], None]


def freed(llm: Any, victim: str = "a", at: int = 4) -> Before:
    """The scheduler gives back the blocks of a request that goes on (vllm-ascend 13501: an asynchronous save frees
    them): the next request gets them."""
    scheduler = lab.scheduler_of(llm)

    def before(step: int) -> None:
        if step != at:
            return
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        blocks = manager.req_to_blocks[lab.named(manager.req_to_blocks, victim)]
        pool = scheduler.kv_cache_manager.block_pool
        pool.free_blocks(list(blocks[:1]))
        queue = pool.free_block_queue  # as if it had waited longest: the next request gets it
        queue.remove(blocks[0])
        queue.prepend_n([blocks[0]]) if hasattr(queue, "prepend_n") else queue.append(blocks[0])

    return before


def stale_slot(llm: Any, row: int = 0, at: int = 6) -> None:
    """The slots of one step are those of the step before, for one request (aiter 4076, vllm 47303: metadata that was
    not made anew)."""
    runner, calls = lab.runner_of(llm), {"n": 0}
    v2 = hasattr(runner, "block_tables")
    owner, name = (runner.block_tables, "compute_slot_mappings") if v2 else (runner, "_get_slot_mappings")
    original = getattr(owner, name)

    def stale(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls["n"] += 1
        if calls["n"] == at:
            slots = result[0] if v2 else next(iter(result[0].values()))
            slots[row] -= 1
        return result

    setattr(owner, name, stale)


def dropped_row(llm: Any, at: int = 6) -> None:
    """The kernel leaves out the last row of a step: its slot keeps what it had, though all metadata are right."""
    from vllm.v1.worker import gpu_model_runner  # noqa: F401

    runner = lab.runner_of(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context
    for layer in [one for one in layers.values() if hasattr(getattr(one, "impl", None), "do_kv_cache_update")][1:2]:
        original, calls = layer.impl.do_kv_cache_update, {"n": 0}

        def update(
            module: Any, key: Any, value: Any, cache: Any, slots: Any, original: Any = original, calls: Any = calls
        ) -> Any:
            calls["n"] += 1
            if calls["n"] == at:
                slots = slots.clone()
                slots[-1] = -1
            return original(module, key, value, cache, slots)

        layer.impl.do_kv_cache_update = update


def _state_metadata(metadata: Any) -> Any:
    return next(one for one in metadata.values() if hasattr(one, "state_indices_tensor_d")
                or hasattr(one, "non_spec_state_indices_tensor"))  # fmt: skip


def _changed_metadata(llm: Any, at: int, change: Callable[[Any], None]) -> None:
    """``change`` gets the metadata of the states' layers of the ``at``-th step, before anything runs with it."""
    runner, calls = lab.runner_of(llm), {"n": 0}
    original = runner._build_attention_metadata

    def build(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls["n"] += 1
        if calls["n"] == at:
            change(_state_metadata(result[0]))
        return result

    runner._build_attention_metadata = build


def _first_of(one: Any, *names: str) -> Any:
    return next(value for name in names if (value := getattr(one, name, None)) is not None)


def other_state(llm: Any, at: int = 8) -> None:
    """Two requests' state indices change places in one step (vllm 53912: another one's number reaches the state)."""

    def change(one: Any) -> None:
        indices = _first_of(one, "state_indices_tensor_d", "non_spec_state_indices_tensor")
        indices[:2] = indices[:2].flip(0).clone()

    _changed_metadata(llm, at, change)


def no_state(llm: Any, at: int = 1) -> None:
    """A request that begins is told that it has a state already: it goes on from whatever its block holds."""

    def change(one: Any) -> None:
        _first_of(one, "has_initial_states_p", "has_initial_state")[:] = True

    _changed_metadata(llm, at, change)


def swapped_states(llm: Any, at: int = 8) -> Before:
    """The states of two requests change places in the cache of one layer: indices are right, bytes are another's."""
    runner = lab.runner_of(llm)

    def before(step: int) -> None:
        if step != at:
            return
        layers = runner.vllm_config.compilation_config.static_forward_context
        layer = next(one for one in layers.values() if isinstance(getattr(one, "kv_cache", None), tuple))
        scheduler = lab.scheduler_of(llm)
        groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        held = next(one.req_to_blocks for one in groups if "amba" in type(one).__name__)
        first, second = (blocks[-1].block_id for blocks in list(held.values())[:2])
        for cache in layer.kv_cache:
            kept = cache[first].clone()
            cache[first] = cache[second]
            cache[second] = kept

    return before


def late_state_copy(llm: Any) -> None:
    """The copy of a state to its next block is made behind the forward that reads it."""
    from vllm.v1.worker import mamba_utils

    runner = lab.runner_of(llm)
    forward, waiting = runner._model_forward, []
    original = mamba_utils.do_mamba_copy_block

    def later(bufs: Any) -> None:
        if bufs.offset:
            waiting.append(bufs)

    def run(*args: Any, **kwargs: Any) -> Any:
        mamba_utils.do_mamba_copy_block = later
        result = forward(*args, **kwargs)
        while waiting:
            original(waiting.pop())
        return result

    mamba_utils.do_mamba_copy_block = later
    runner._model_forward = run


def late_load(llm: Any, delay: str = "after the forward") -> None:
    """What a connector brings arrives when the forward that reads it is over (LMCache 4247, sglang 23020)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    runner, connector = lab.runner_of(llm), get_kv_transfer_group()
    load, forward, waiting = connector.start_load_kv, runner._model_forward, []

    def later(context: Any, **kwargs: Any) -> None:
        waiting.append((context, kwargs))

    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        while waiting:
            context, more = waiting.pop()
            load(context, **more)
        return result

    connector.start_load_kv = later
    runner._model_forward = run


def flipped_bit(llm: Any, victim: str = "a", at: int = 6, layer: int = 2) -> Before:
    """One bit of a block changes between two steps, in one layer."""
    runner = lab.runner_of(llm)

    def before(step: int) -> None:
        if step != at:
            return
        scheduler = lab.scheduler_of(llm)
        held = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        block = held[lab.named(held, victim)][0].block_id
        layers = runner.vllm_config.compilation_config.static_forward_context
        attentions = [one for one in layers.values() if isinstance(getattr(one, "kv_cache", None), torch.Tensor)]
        cache = attentions[layer].kv_cache
        words = cache[block].view(torch.int16)
        words.view(-1)[17] ^= 1

    return before


def strange_hit(llm: Any, donor: str = "a") -> Before:
    """The prefix cache gives a request the block of other tokens: as if two hashes were equal."""
    scheduler = lab.scheduler_of(llm)
    manager = scheduler.kv_cache_manager
    find = manager.get_computed_blocks

    def found(request: Any) -> Any:
        held = manager.coordinator.single_type_managers[0].req_to_blocks
        names = [one for one in held if one.partition("-")[0] == donor]
        if request.request_id.partition("-")[0] == donor or not names or request.num_computed_tokens:
            return find(request)
        blocks, _, *rest = find(request)
        donors = list(held[names[0]][:1])
        made = type(blocks)((donors,))
        return (made, 32, *rest)

    manager.get_computed_blocks = found
    return lambda step: None


# --- whose blocks a prefix hit brings ---------------------------------------------------------------------------------


def hit_of(llm: Any, columns: Sequence[tuple[str, int]], victim: str = "b", tokens: int | None = None) -> Before:
    """A prefix hit gives ``victim`` the blocks that others hold, (request, column of its table) each; also of requests
    that have ended by then, whose blocks may be others' now."""
    scheduler = lab.scheduler_of(llm)
    manager = scheduler.kv_cache_manager
    find, known = manager.get_computed_blocks, {}

    def found(request: Any) -> Any:
        if request.request_id.partition("-")[0] != victim or request.num_computed_tokens:
            return find(request)
        blocks, _, *rest = find(request)
        made = type(blocks)(([known[place] for place in columns],))
        return (made, tokens or 32 * len(columns), *rest)

    def before(step: int) -> None:
        for name, blocks in manager.coordinator.single_type_managers[0].req_to_blocks.items():
            for column, block in enumerate(blocks):
                known.setdefault((name.partition("-")[0], column), block)

    manager.get_computed_blocks = found
    return before


def _keys_without(llm: Any, change: Callable[[Any], Callable[[], None]]) -> None:
    """Keys of blocks are made of requests that ``change`` has taken something from; what it returns gives it back."""
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.generate_block_hash_extra_keys

    def made(request: Any, *args: Any) -> Any:
        back = change(request)
        try:
            return original(request, *args)
        finally:
            back()

    kv_cache_utils.generate_block_hash_extra_keys = made
    llm._accprobe_undo = lambda: setattr(kv_cache_utils, "generate_block_hash_extra_keys", original)


def _without(name: str, nothing: Any = None) -> Callable[[Any], Callable[[], None]]:
    def change(request: Any) -> Callable[[], None]:
        value = getattr(request, name)
        setattr(request, name, nothing)
        return lambda: setattr(request, name, value)

    return change


def no_adapter_in_keys(llm: Any) -> None:
    """A block's key has no adapter in it (vllm 30931, 42125): adapters share prefixes."""
    _keys_without(llm, _without("lora_request"))


def no_salt_in_keys(llm: Any) -> None:
    """A block's key has no salt in it."""
    _keys_without(llm, _without("cache_salt"))


def no_images_in_keys(llm: Any) -> None:
    """A block's key has no image in it: pictures share the prefix of their text."""
    _keys_without(llm, _without("mm_features", []))


# --- metadata ---------------------------------------------------------------------------------------------------------


def metadata(llm: Any, change: Callable[[Any], None], at: int = 6, last: int | None = None) -> None:
    """``change`` gets the attention's metadata of the steps from ``at`` to ``last``, counted from 1."""
    runner, calls = lab.runner_of(llm), {"n": 0}
    original = runner._build_attention_metadata

    def build(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls["n"] += 1
        if at <= calls["n"] <= (last or at):
            for one in {id(m): m for m in result[0].values()}.values():
                change(one)
        return result

    runner._build_attention_metadata = build


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
    runner, calls = lab.runner_of(llm), {"n": 0}
    original = runner._get_slot_mappings

    def moved(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls["n"] += 1
        if at <= calls["n"] <= last:
            for slots in {id(s): s for s in result[0].values()}.values():
                slots[slots >= 0] += by
        return result

    runner._get_slot_mappings = moved


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
    runner = lab.runner_of(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context
    layer = next(one for one in layers.values() if isinstance(getattr(one, "kv_cache", None), tuple))
    calls = {"n": 0}
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls["n"] += 1
        kept = layer.kv_cache[half].clone()
        result = inner(*args, **kwargs)
        if calls["n"] == at:
            layer.kv_cache[half].copy_(kept)
        return result

    layer.forward = forward


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
    original = runner._prepare_inputs

    def prepare(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduled, *args, **kwargs)
        change(runner, [scheduled.num_scheduled_tokens[name] for name in runner.input_batch.req_ids], result[0])
        return result

    runner._prepare_inputs = prepare


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
    runner = lab.runner_of(llm)
    original = runner._gather_mm_embeddings

    def gather(*args: Any, **kwargs: Any) -> Any:
        embeddings, *rest = original(*args, **kwargs)
        return (list(embeddings)[::-1], *rest)

    runner._gather_mm_embeddings = gather
