"""Places that have one name in a transformers model and in vLLM, and are not one place.

The problem: a factor, a bias or a gate is computed inside of a module on one side, and by the code around it on the
other; the two tensors are both right and differ. The idea: formulas of the code, parameters and equal bits of the
dump's own tensors show it. Such a place is not compared; what follows it is. Not here: attention's inputs, which are
made as mine makes its own (attention_inputs.py), tensors in another order (transformers_order.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_accprobe.align.engines.vllm_names import OUTPUT
from vllm_accprobe.dump.block_code import FORWARD, parsed, same, scaled
from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.schema import Record

Place = tuple[str, str]
"""(tap, role)."""
_READERS = 16
"""Chosen: places behind an output at which its values are tried; one tensor has about six."""


def other_places(theirs: Any, own: Any, their_made: Any, own_made: Any) -> dict[Place, str]:
    """By place, why it is not compared. theirs: a dump of transformers; own: of vLLM; made: the same with the tensors
    that rules made."""
    found = without_bias(own) | scaled_in_front(theirs, own) | own_numbers(their_made, own_made)
    left = [[r for r in d.records if (r.tap, r.role) not in found] for d in (their_made, own_made)]
    elsewhere = given_out_elsewhere(*left) | given_out_elsewhere(*reversed(left))
    return found | {p: f"on one side alone it is {'/'.join(q)}, which is compared" for p, q in elsewhere.items()}


def scaled_in_front(theirs: Any, own: Any) -> dict[Place, str]:
    """Inputs that by the code around them are something times a number on one side and that thing itself on the other,
    whose module may multiply itself, for no formula describes what it computes (Falcon-H1): by (tap, role), why they
    are two things."""
    sides = [{m.tap: object_at(m.attrs, FORWARD) for of in d.modules.values() for m in of} for d in (theirs, own)]
    found: dict[Place, str] = {}
    for tap, formulas in sides[1].items():
        known = sides[0].get(tap) or {}
        for name, formula in (formulas or {}).items():
            child, _, role = name.removeprefix("inside.").partition("/")
            pair = [parsed(known.get(name)), parsed(formula)]
            multiplied = [(x, side) for side in (0, 1) if (x := scaled(pair[side])) is not None]
            if role and name.startswith("inside.") and any(
                same(x, pair[1 - side]) and sides[1 - side].get(f"{tap}.{child}") == {} for x, side in multiplied
            ):
                found[f"{tap}.{child}", f"input.{role}"] = "one side's code multiplies in front of the module"
    return found


def without_bias(own: Any) -> dict[Place, str]:
    """Outputs of vLLM's layers that leave their bias to a later addition, and what hands such a one on: by (tap, role),
    why they are nothing of transformers'."""
    layers = {m.tap for of in own.modules.values() for m in of if m.attrs.get("skip_bias_add") is True}
    apart = {r.tap for r in own.records if r.tap in layers and r.role == "output.1"}
    values = {(r.rank, r.step, r.hash) for r in own.records if r.tap in apart and r.role == OUTPUT and r.hash}
    return {(r.tap, r.role): "mine's layer leaves its bias to a later addition" for r in own.records
            if r.role.startswith("output.") and r.rows is not None and (r.rank, r.step, r.hash) in values}  # fmt: skip


def given_out_elsewhere(golden: Sequence[Record], mine: Sequence[Record]) -> dict[Place, Place]:
    """Outputs that are to the bit a later tensor in golden, and never in mine, whose code does in between what golden's
    module does itself (Gemma scales its embedding): by place, the later one. Both dumps have both: the modules of one
    name are cut in different places, and the later pair is the same place."""
    theirs, own = (_by_moment(records) for records in (golden, mine))
    later: dict[Place, list[Place]] = {}
    for places in theirs.values():
        same: dict[Any, list[Place]] = defaultdict(list)
        for place, r in places.items():
            same[r.hash].append(place)
        for alike in same.values():
            for i, place in enumerate(alike):
                if place[1].startswith("output."):
                    after = alike[i + 1 : i + 1 + _READERS]
                    later[place] = [p for p in later[place] if p in after] if place in later else after
    found: dict[Place, Place] = {}
    for place, others in later.items():
        for other in others:
            pairs = [(at[place], at[other]) for at in own.values() if place in at and other in at]
            if pairs and all(a.shape == b.shape and a.hash != b.hash for a, b in pairs):
                found.setdefault(place, other)
    return found


def own_numbers(theirs: Any, own: Any) -> dict[Place, str]:
    """Outputs of modules of transformers that have a single number among their parameters which vLLM's of that name has
    not: its code multiplies somewhere else. (vLLM's own numbers scale what is quantized.)"""
    numbers = {(r.tap, r.role) for r in theirs.records
               if r.step is None and not r.shape and DTYPES[r.dtype].kind == "float"}  # fmt: skip
    known = {(r.tap, r.role) for r in own.records if r.step is None}
    both = {tap for tap, _ in known}
    alone = {tap: role for tap, role in sorted(numbers - known) if tap in both}
    return {(r.tap, r.role): f"{alone[r.tap]} is a parameter in transformers alone" for r in theirs.records
            if r.tap in alone and r.role.startswith("output.")}  # fmt: skip


def _by_moment(records: Iterable[Record]) -> dict[tuple[int, int | None, int], dict[Place, Record]]:
    """Tensors whose values are known by a hash, in order."""
    found: dict[tuple[int, int | None, int], dict[Place, Record]] = defaultdict(dict)
    for r in records:
        if r.hash is not None and r.step is not None:
            found[r.rank, r.step, r.call].setdefault((r.tap, r.role), r)
    return found
