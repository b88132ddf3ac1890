"""Delta debugging against predicates of every kind, counted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from vllm_accprobe.gate.bisect.search import FAIL, PASS, UNRESOLVED, ddmin, most, split, usual

Predicate = Callable[[frozenset[str]], str]


class Counted:
    """Remembers, as a search does, and counts what is new."""

    def __init__(self, predicate: Predicate):
        self.predicate = predicate
        self.known: dict[frozenset[str], str] = {}

    def __call__(self, some: tuple[str, ...]) -> str:
        key = frozenset(some)
        if key not in self.known:
            self.known[key] = self.predicate(key)
        return self.known[key]


def names(n: int) -> tuple[str, ...]:
    return tuple(f"s{i}" for i in range(n))


def minimal(found: tuple[str, ...], predicate: Predicate) -> bool:
    """Fails, and no set with one member less does."""
    some = frozenset(found)
    return predicate(some) == FAIL and all(predicate(some - {one}) != FAIL for one in found)


@pytest.mark.parametrize("n", range(1, 10))
def test_every_single_pair_and_triple_is_found(n: int) -> None:
    """A fault that needs k settings together, wherever they stand."""
    items = names(n)
    for k in range(1, min(n, 3) + 1):
        for culprits in itertools.combinations(items, k):
            test = Counted(lambda some, c=frozenset(culprits): FAIL if c <= some else PASS)
            assert ddmin(items, test) == culprits
            assert len(test.known) <= most(n)
            if k == 1:
                assert len(test.known) <= max(usual(n), 1)


@pytest.mark.parametrize("n", range(1, 5))
def test_every_predicate_there_is(n: int) -> None:
    """Every map of sets to fail, pass and unresolved with nothing passing and all failing: up to three settings all of
    3^(2^n - 2), of four 20,000 drawn."""
    items = names(n)
    sets = [frozenset(c) for k in range(1, n) for c in itertools.combinations(items, k)]
    outcomes = (PASS, FAIL, UNRESOLVED)
    draw = random.Random(0)
    every = itertools.product(outcomes, repeat=len(sets))
    drawn = (tuple(draw.choice(outcomes) for _ in sets) for _ in range(20_000))
    for values in every if n < 4 else drawn:
        table = dict(zip(sets, values, strict=True)) | {frozenset(): PASS, frozenset(items): FAIL}
        test = Counted(table.__getitem__)
        found = ddmin(items, test)
        assert minimal(found, table.__getitem__), (values, found)
        assert len(test.known) <= most(n)


@pytest.mark.parametrize("seed", range(30))
def test_random_ones_of_ten(seed: int) -> None:
    """Monotone (any of a few sets), then with holes that pass and holes that do not start."""
    draw = random.Random(seed)
    items = names(10)
    sets = [frozenset(draw.sample(items, draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]

    def fails(some: frozenset[str]) -> str:
        return FAIL if any(s <= some for s in sets) else PASS

    def holed(some: frozenset[str]) -> str:
        if 0 < len(some) < 10:
            lot = random.Random(f"{seed} {sorted(some)}").random()
            if lot < 0.3:
                return UNRESOLVED if lot < 0.2 else PASS
        return fails(some)

    found = ddmin(items, Counted(fails))
    assert frozenset(found) in sets
    test = Counted(holed)
    assert minimal(ddmin(items, test), holed)
    assert len(test.known) <= most(10)


def test_the_order_is_kept_and_pieces_are_equal() -> None:
    assert split(names(7), 3) == [("s0", "s1"), ("s2", "s3"), ("s4", "s5", "s6")]
    assert ddmin((), lambda some: FAIL) == ()
