"""Holds what capture relies on against the sources of a wheel, and of the vLLM that it is for.

The problem: a vendor's runner may be vLLM's, derive from it, or be a copy that has gone its own way, and what is
missing there is missing although vLLM has it. The idea: each place of the declaration is looked for as vLLM's own
class; runners and workers also among the vendor's classes, told by the methods that they have; what an attribute is
made of follows the class that sets it. Not here: the declaration (capture/vllm/names), modes (modes.py), saying it
(telling.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_accprobe.capture.vllm.names.need import V1, V2, WORKER, Need, Release, VllmPlace
from vllm_accprobe.capture.vllm.names.relied_on import PLACES
from vllm_accprobe.doctor.wheel.archive import Package, WheelError
from vllm_accprobe.doctor.wheel.classes import Class, attribute_class, class_of, parameters
from vllm_accprobe.doctor.wheel.sources import Definition, SourceModule, Sources

VLLM = "vllm"


@dataclass(frozen=True)
class Lack:
    """Something needed that is not there. what: the names, or what is otherwise; loss: what follows; at: where it
    should stand, ``file.py:line``."""

    place: str
    owner: str
    what: str
    loss: str
    at: str


@dataclass(frozen=True)
class Looked:
    """One class or module that was looked at. there: how many needs are met."""

    place: str
    owner: str
    at: str
    there: int
    lacks: tuple[Lack, ...]


@dataclass(frozen=True)
class Wheels:
    """What is held: ``wheel``, and ``base``, the vLLM that it is for (itself, where it is vLLM)."""

    wheel: Package
    base: Package
    sources: Sources

    @property
    def release(self) -> Release | None:
        """Of the vLLM; None for a development version."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!\d*\.?dev)", self.base.version)
        return tuple(int(n or 0) for n in found.groups()) if found else None


def together(packages: Sequence[Package]) -> Wheels:
    """The wheel and its base, in either order. Raises WheelError where vLLM itself is in none or in both of two."""
    cores = [one for one in packages if f"{VLLM}/__init__.py" in one.files]
    if not cores:
        raise WheelError(
            f"{packages[0].path}: vLLM itself is not in it; name the wheel of the vLLM that it is for, "
            "with a second --wheel"
        )
    if len(cores) > 1 or len(packages) > 2:
        raise WheelError("--wheel: name one wheel, or a vendor's and that of the vLLM that it is for")
    others = [one for one in packages if one is not cores[0]]
    return Wheels((others or cores)[0], cores[0], Sources([*others, *cores]))


def held(wheels: Wheels, declaration: Sequence[VllmPlace] = PLACES) -> list[Looked]:
    """Every place of the declaration that this release has, as it is in the wheel. Raises WheelError for a source file
    that is no Python."""
    places = [place for place in declaration if place.due(wheels.release)]
    roles = _roles(wheels)
    owners: dict[str, list[Class]] = {}
    answers: list[Looked] = []
    for place in places:
        if all(":" not in one for one in place.at):
            answers.append(_module(wheels, place))
            continue
        owners[place.name] = found = list(_classes(wheels, place, roles, owners))
        answers += [_class(wheels, place, one) for one in found] or [_absent(place)]
    return answers


def _roles(wheels: Wheels) -> dict[str, list[Class]]:
    """The vendor's own runners and workers."""
    found: dict[str, list[Class]] = {V1: [], V2: [], WORKER: []}
    if wheels.wheel is wheels.base:
        return found
    seen = set()
    for word in ("execute_model", "ModelRunner", "Worker"):
        for module in wheels.sources.modules(wheels.wheel, word):
            for node in module.bound.values():
                one = class_of(wheels.sources, Definition(node, module)) if id(node) not in seen else None
                seen.add(id(node))
                if one is None or not {"execute_model", "load_model"} <= one.members.keys() or VLLM in one.strangers:
                    continue  # not one, or what is left of one for a vLLM that was: it cannot be imported beside this
                if "init_device" in one.members:
                    found[WORKER].append(one)
                else:
                    found[V2 if "prepare_inputs" in one.members else V1].append(one)
    return found


def _classes(
    wheels: Wheels, place: VllmPlace, roles: dict[str, list[Class]], owners: dict[str, list[Class]]
) -> Iterator[Class]:
    """The classes that are this place in these wheels: the vendor's, else vLLM's."""
    mine = roles.get(place.kind, [])
    if place.of is not None:
        made = [attribute_class(wheels.sources, owner, place.of[1]) for owner in owners.get(place.of[0], ())]
        mine = list({id(one.node): one for one in made if one is not None}.values())
    if mine:
        yield from mine
        return
    for one in place.at:
        module, _, name = one.partition(":")
        found = class_of(wheels.sources, wheels.sources.find(module, name))
        if found is not None:
            yield found
            return


def _absent(place: VllmPlace) -> Looked:
    where = place.at[0].replace(":", ".")
    loss = place.loss or place.needs[0].loss
    return Looked(place.name, where, "", 0, (Lack(place.name, where, "it is not there", loss, ""),))


def _class(wheels: Wheels, place: VllmPlace, one: Class) -> Looked:
    lacks, there = [], 0
    for need in place.needs:
        if not need.due(wheels.release):
            continue
        have = [one.members[name] for name in need.names if name in one.members]
        why = _other_signature(need, have) if have else f"{' or '.join(need.names)} is not there"
        if not why and need.called and not any(_called(wheels, one, name) for name in need.names):
            why = f"{need.names[0]} is there, and nothing calls it through its object"
        if why:
            lacks.append(Lack(place.name, one.name, why, need.loss, have[0].at if have else one.at))
        there += not why
    return Looked(place.name, one.name, one.at, there, tuple(lacks))


def _module(wheels: Wheels, place: VllmPlace) -> Looked:
    for name in place.at:
        module = wheels.sources.module(name)
        if module is not None:
            break
    else:
        return _absent(place)
    lacks, there = [], 0
    for need in place.needs:
        if not need.due(wheels.release):
            continue
        have = [one for name in need.names if (one := wheels.sources.find(module.name, name)) is not None]
        known = have or any(wheels.sources.has(module, name) or _sets(module, name) for name in need.names)
        why = _other_signature(need, have) if known else f"{' or '.join(need.names)} is not there"
        if why:
            lacks.append(Lack(place.name, module.name, why, need.loss, have[0].at if have else module.file))
        there += not why
    return Looked(place.name, module.name, module.file, there, tuple(lacks))


def _sets(module: SourceModule, name: str) -> bool:
    """Whether the module sets an attribute of that name on anything, or registers a parameter under it."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and _registers(node) == name)
        for node in ast.walk(module.tree)
    )


def _registers(node: ast.Call) -> str:
    """The name under which a call registers a parameter or a buffer; "" for other calls."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    first = node.args[0] if node.args else None
    named = called in ("register_parameter", "register_buffer") and isinstance(first, ast.Constant)
    return str(first.value) if named and isinstance(first, ast.Constant) else ""


def _other_signature(need: Need, have: Sequence[Definition]) -> str:
    """How the signature differs from what is needed; "" where it does not, or nothing is asked of it."""
    known = parameters(have[0].node) if have else None
    if known is None or not (need.takes or need.keywords):
        return ""
    ordered, names, more = known
    if tuple(ordered[: len(need.takes)]) != need.takes:
        return f"{need.names[0]} takes ({', '.join(ordered[: max(len(need.takes), 3)])}), not ({', '.join(need.takes)})"
    gone = [name for name in need.keywords if name not in names and not more]
    return f"{need.names[0]} does not take {', '.join(gone)}" if gone else ""


def _called(wheels: Wheels, one: Class, name: str) -> bool:
    """Whether its own methods, or a worker through its ``model_runner``, call it as an attribute of the object."""
    if name in one.called:
        return True
    call = re.compile(rb"\b(?:model_)?runner\.%s\(" % name.encode())
    return any(
        call.search(data)
        for package in wheels.sources.packages
        for file, data in package.files.items()
        if "worker" in file
    )
