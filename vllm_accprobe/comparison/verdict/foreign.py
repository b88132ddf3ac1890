"""A comparison under another tool's standard: its columns beside ours, its word as the status.

The problem: the verdict shall be the other tool's and everything else stay readable. The idea: judged as always first;
then the tool's rule (standards/) gives each pair its cells and its word. An error fails the pair, a warning is told and
passes; where a tool has no verdict, ours stays. Origins, floors, flipped tokens and the shape of the error
are ours in any case, and a note says what our own standard made of it.
Not here: the rules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.result import FAIL, PASS, SKIP, Comparison, Foreign, Pair
from vllm_accprobe.kernels.definition import ELEMENT_FIELDS
from vllm_accprobe.standards import NamedStandard
from vllm_accprobe.standards.declaration import ERROR, NO_VERDICT, OF_PAIRS, SKIPPED, WARNING, Cell, Numbers, PairRule


def apply(result: Comparison, standard: NamedStandard) -> Comparison:
    """``result`` with pairs, verdict and further columns by ``standard``'s rule for pairs."""
    name, rule = standard.name, standard.pairs
    if rule is None:
        raise ValueError(f"{name} has no rule for pairs")
    cells, pairs = [], []
    said: Counter[str] = Counter()
    for pair in result.pairs:
        row, changed, word = _judged(pair, name, rule)
        said[word] += 1
        cells.append(row)
        pairs.append(changed)
    verdicts = any(p.status == FAIL for p in pairs)
    own = result.verdict.upper()
    if said[NO_VERDICT] and not said[ERROR] and not said[PASS]:
        note = f"standard '{name}' has no verdict of its own: the status is accprobe's"
        verdict = result.verdict
    else:
        counts = ", ".join(f"{said[w]} {w}" for w in (ERROR, WARNING, PASS) if said[w])
        note = f"status and verdict by the rules of '{name}' ({counts}); accprobe's own verdict is {own}"
        verdict = FAIL if verdicts else PASS
    if rule.needs_kl:
        note += _about_kl(pairs)
    divergence = messages.first_divergence(pairs, None) if verdict == FAIL else None
    if divergence is not None:  # ours are other measures than the one that decided
        place = tuple(divergence[k] for k in ("module", "role", "step"))
        found = next(p for p in pairs if (p.tap, p.role, p.step) == place)
        divergence |= {"metric": found.message, "value": None, "limit": None}
    return replace(
        result,
        pairs=pairs,
        verdict=verdict,
        notes=[note, *result.notes],
        first_divergence=result.first_divergence if verdict == result.verdict else divergence,
        standard={"name": name, "origins by": result.standard},
        foreign=Foreign(name, rule.columns, cells),
    )


def _about_kl(pairs: list[Pair]) -> str:
    """Of which pairs there is no KL divergence: of none, where they were measured for another standard; else of
    parameters, which are no distribution and are not measured for it."""
    compared = [p for p in pairs if p.elements is not None or p.identical]
    known = [p for p in compared if p.kl is not None or p.identical]
    left = len(compared) - len(known)
    if not left:
        return ""
    if not any(p.kl is not None for p in known):
        return "; the KL divergence was not measured: compare the dumps again with this standard"
    return f"; {len(known)} of {len(compared)} pairs have a KL divergence, parameters that differ have none"


def _judged(pair: Pair, name: str, rule: PairRule) -> tuple[tuple[Cell, ...], Pair, str]:
    if pair.status == SKIP or (pair.max_abs_err is None and not pair.nonfinite):
        return (None,) * len(rule.columns), pair, SKIPPED
    cells, word, why = rule.rule(_numbers(pair))
    if word in (NO_VERDICT, SKIPPED):
        return cells, pair, word
    message = f"{name}: {word}" + (f", {why}" if why else "")
    status = FAIL if word == ERROR else PASS
    return cells, replace(pair, status=status, message=message if word != PASS else ""), word


def _numbers(pair: Pair) -> Numbers:
    elements = None if pair.elements is None else dict(zip(ELEMENT_FIELDS, pair.elements, strict=True))
    values = {name: getattr(pair, name) for name in OF_PAIRS}
    size = max(prod(pair.shape), pair.nonfinite or 0)
    return Numbers.of(pair.dtype_mine or "", size, values, elements, pair.identical)
