"""The search against engines that are formulas: interactions, parts, what does not start, what changes by itself."""

import itertools
import random
from collections.abc import Callable

import pytest

from vllm_accprobe.gate.bisect.edits import Edit, ServerSetting
from vllm_accprobe.gate.bisect.search import (
    FAIL,
    PASS,
    UNRESOLVED,
    Configuration,
    Found,
    Search,
    TrialOutcome,
    ddmin,
    edits_of,
    expected,
    most,
    split,
)


def axis(name: str, parts: int = 0, scale: tuple[str, int, int | None] | None = None) -> ServerSetting:
    inner = tuple(ServerSetting(f"{name}: {i}", "on", "off", Edit()) for i in range(parts))
    return ServerSetting(name, "on", "off", Edit(), inner, scale=scale)


class Engine:
    """fails: told the names of leaves that are as in the command (parts in place of an axis that has parts)."""

    def __init__(self, axes: list[ServerSetting], fails: Callable[[frozenset[str]], bool | None]):
        self.axes, self.fails = axes, fails
        self.asked: list[tuple[Configuration, int]] = []

    def __call__(self, configuration: Configuration, again: int) -> TrialOutcome:
        self.asked.append((configuration, again))
        plain = {a.name for a in edits_of(configuration, self.axes, {})}
        leaves = frozenset(
            leaf for a in self.axes if a.name not in plain
            for leaf in ([p.name for p in a.parts] or [a.name]) if leaf not in plain
        )  # fmt: skip
        answer = self.fails(leaves)
        return TrialOutcome(UNRESOLVED if answer is None else FAIL if answer else PASS, 1.0)


def go(
    axes: list[ServerSetting], fails: Callable[[frozenset[str]], bool | None], **how: bool | int
) -> tuple[Found, Engine]:
    engine = Engine(axes, fails)
    return Search(axes, engine, golden=False, **how).find(), engine  # type: ignore[arg-type]


EIGHT = [axis(f"a{i}") for i in range(8)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_set_of_eight(k: int) -> None:
    for culprits in itertools.combinations([a.name for a in EIGHT], k):
        found, engine = go(EIGHT, lambda on, c=frozenset(culprits): c <= on)  # type: ignore[misc]
        (cause,) = found.causes
        assert (found.verdict, cause.names) == ("found", culprits)
        assert (cause.alone.kind, cause.without.kind) == (FAIL, PASS)
        assert all(o.kind == PASS for o in cause.each.values())
        assert len(engine.asked) <= expected(EIGHT, False)[1] + k
        if k == 1:
            assert len(engine.asked) <= expected(EIGHT, False)[0]


def test_two_sets_one_after_another() -> None:
    found, _ = go(EIGHT, lambda on: {"a1", "a5"} <= on or "a3" in on)
    assert sorted(c.names for c in found.causes) == [("a1", "a5"), ("a3",)]
    assert found.causes[-1].without.kind == PASS


def test_a_set_that_shares_a_member() -> None:
    """Without the first set the second cannot be there: it is not searched, and each says whether one is enough."""
    found, _ = go(EIGHT, lambda on: {"a1", "a5"} <= on or {"a1", "a6"} <= on)
    (cause,) = found.causes
    assert cause.without.kind == PASS
    assert {n: o.kind for n, o in cause.each.items()} in (
        {"a1": PASS, "a5": FAIL}, {"a1": PASS, "a6": FAIL}
    )  # fmt: skip


@pytest.mark.parametrize("culprits", [{"ops: 7"}, {"ops: 2", "ops: 9"}, {"ops: 3", "a0"}, {"a0", "a1"}])
def test_parts_are_searched_where_they_matter(culprits: set[str]) -> None:
    axes = [axis("a0"), axis("a1"), axis("ops", 12)]
    found, engine = go(axes, lambda on: culprits <= on)
    (cause,) = found.causes
    assert set(cause.names) == culprits
    assert (cause.alone.kind, cause.without.kind) == (FAIL, PASS)
    assert len(engine.asked) <= 3 + most(3) + most(12)


def test_what_does_not_start_is_gone_around() -> None:
    found, _ = go(EIGHT, lambda on: None if "a0" in on and "a7" not in on else {"a2", "a6"} <= on)
    assert [c.names for c in found.causes] == [("a2", "a6")]


def test_plain_that_does_not_start() -> None:
    axes = [*EIGHT, axis("tensor parallel")]
    found, _ = go(axes, lambda on: None if "tensor parallel" not in on else "a4" in on)
    assert (found.held, [c.names for c in found.causes]) == (("tensor parallel",), [("a4",)])
    nothing, _ = go(axes, lambda on: None)
    assert (nothing.verdict, nothing.causes) == (None, [])


def test_the_same_and_elsewhere() -> None:
    assert go(EIGHT, lambda on: False)[0].verdict == "same"
    assert go(EIGHT, lambda on: True)[0].verdict == "elsewhere"


def test_what_changes_by_itself_is_told() -> None:
    seen: dict[frozenset[str], int] = {}

    def coin(on: frozenset[str]) -> bool:
        seen[on] = seen.get(on, 0) + 1
        return "a2" in on and seen[on] % 2 == 1

    found, _ = go(EIGHT, coin)
    assert found.verdict == "inconsistent"
    assert found.causes[0].flaky == ["the set alone: fail, then pass"]


def test_a_fault_of_every_third_run_is_found_by_repeating() -> None:
    seen: dict[frozenset[str], int] = {}

    def sometimes(on: frozenset[str]) -> bool:
        seen[on] = seen.get(on, 0) + 1
        return "a2" in on and seen[on] % 3 == 0

    assert go(EIGHT, sometimes)[0].verdict == "same"
    seen.clear()
    found, _ = go(EIGHT, sometimes, again=2)
    assert [c.names for c in found.causes] == [("a2",)]


@pytest.mark.parametrize(("bad", "plain", "fails", "limit"), [
    (64, 4096, 500, (256, 512)), (64, 4096, 64, (64, 128)), (64, 4096, 4000, (2048, 4096)), (128, 16, -32, (32, 16)),
])  # fmt: skip
def test_a_scale(bad: int, plain: int, fails: int, limit: tuple[int, int]) -> None:
    """fails: up to this number, from its absolute value on where it is negative."""
    one = [axis("n", scale=("--n", bad, plain)), axis("b")]

    def attempt(configuration: Configuration, again: int) -> TrialOutcome:
        number = dict(configuration.values).get("n", bad if "n" in configuration.bad else plain)
        return TrialOutcome(FAIL if (number <= fails if fails > 0 else number >= -fails) else PASS, 1.0)

    found = Search(one, attempt, golden=False, narrow=True).find()
    assert found.causes[0].limits == {"n": limit}


def test_what_two_logs_tell_alike_is_not_searched_and_stays_plain() -> None:
    """As in the command its default may follow another setting: custom operators are on where all is eager."""
    engine = Engine(EIGHT, lambda on: "a2" in on or "a7" in on)
    found = Search(EIGHT, engine, golden=False, equal=lambda bad, plain: frozenset({"a7"})).find()
    assert (found.equal, [c.names for c in found.causes]) == (("a7",), [("a2",)])
    assert found.rest is not None
    assert found.rest.kind == PASS


# --- delta debugging against predicates of every kind, counted ---


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


def test_the_order_is_kept_and_pieces_are_equal() -> None:
    assert split(names(7), 3) == [("s0", "s1"), ("s2", "s3"), ("s4", "s5", "s6")]
    assert ddmin((), lambda some: FAIL) == ()
