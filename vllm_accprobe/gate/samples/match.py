"""Which answer of golden's belongs to which of mine.

The problem: the n-th line of two files is the same question only as long as neither run was sharded, limited, resumed
or shuffled. The idea: pairs have the same task, filter and hash of the question; questions that occur twice are matched
by their names and then by their order. What only one side has is counted by name, and so is a pair whose right answer
is not the same: it is no pair. Not here: what the pairs say (contrast.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from vllm_accprobe.gate.samples.answers import Answer, Side

OTHER_TARGET = "questions whose right answer is not the same on both sides"


@dataclass
class Matched:
    """pairs: (golden, mine). only_golden, only_mine: answers without a partner, by (task, filter). left_out: pairs that
    are none, by reason. other_prompts: pairs whose prompts are not the same text; other_responses: whose responses."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    only_golden: Counter[tuple[str, str]] = field(default_factory=Counter)
    only_mine: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    other_prompts: int = 0
    other_responses: int = 0
    notes: list[str] = field(default_factory=list)


def match(golden: Side, mine: Side) -> Matched:
    """All pairs, in golden's order."""
    found = Matched(notes=[*golden.notes, *mine.notes])
    left, right = golden.answers, _named_alike(golden.answers, mine.answers, found)
    by_index = golden.by_index or mine.by_index
    if by_index:
        found.notes.append("questions are paired by their number: a file has no prompts (OpenCompass's predictions are "
                           "looked for beside its results)")  # fmt: skip
    theirs: dict[tuple[str, str, str], list[Answer]] = defaultdict(list)
    for answer in right:
        theirs[_key(answer, by_index)].append(answer)
    for several in theirs.values():
        several.sort(key=_order)
    for a, b in _partners(left, theirs, by_index):
        if b is None:
            found.only_golden[a.task, a.way] += 1
        elif a.target and b.target and a.target != b.target:
            found.left_out[OTHER_TARGET] += 1
        else:
            found.pairs.append((a, b))
            found.other_prompts += bool(a.prompt and b.prompt and a.prompt != b.prompt)
            found.other_responses += bool(a.response and b.response and a.response != b.response)
    for several in theirs.values():
        for answer in several:
            found.only_mine[answer.task, answer.way] += 1
    return found


def _key(answer: Answer, by_index: bool) -> tuple[str, str, str]:
    return answer.task, answer.way, answer.name if by_index else answer.key


def _order(answer: Answer) -> tuple[int, str]:
    """Numbers by their value, and before names."""
    return (int(answer.name), "") if answer.name.isdecimal() and len(answer.name) < 19 else (1 << 62, answer.name)


def _partners(
    answers: list[Answer], theirs: dict[tuple[str, str, str], list[Answer]], by_index: bool
) -> list[tuple[Answer, Answer | None]]:
    """Each answer with its partner, which is taken out of ``theirs``: first those with the same name."""
    partner: dict[int, Answer] = {}
    for i, answer in enumerate(answers):
        several = theirs.get(_key(answer, by_index), [])
        at = next((k for k, b in enumerate(several) if b.name == answer.name), None)
        if at is not None:
            partner[i] = several.pop(at)
    rest = sorted((i for i in range(len(answers)) if i not in partner), key=lambda i: _order(answers[i]))
    for i in rest:
        left = theirs.get(_key(answers[i], by_index))
        if left:
            partner[i] = left.pop(0)
    return [(answer, partner.get(i)) for i, answer in enumerate(answers)]


def _named_alike(golden: list[Answer], mine: list[Answer], found: Matched) -> list[Answer]:
    """Mine under golden's names of task and filter where each side has one: a renamed file says no task."""
    for what in ("task", "way"):
        ours, theirs = ({getattr(a, what) for a in side} for side in (golden, mine))
        if len(ours) == len(theirs) == 1 and ours != theirs:
            (name,), (other,) = ours, theirs
            mine = [replace(a, **{what: name}) for a in mine]
            if name and other:
                word = "task" if what == "task" else "filter"
                found.notes.append(f"golden's {word} is {name}, mine is {other}: taken as one")
    return mine
