"""Taps in functions: found by meaning, refused with the nearest, harmless to what the function does, and undone."""

import ast
import importlib
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_accprobe.cli import main
from vllm_accprobe.patching.install import (
    ABSENT,
    FITS,
    HOOK,
    OTHER,
    REFUSED,
    Insertion,
    check,
    insertions,
    install,
    package_root,
    remove,
)
from vllm_accprobe.patching.schema import Patch, TapSpec, Target, choose, load
from vllm_accprobe.patching.source import NotThere, find_function, find_statement, fingerprint, normal

SOURCE = '''
"""A module."""
import functools


def around(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


class Base:
    def forward(self, x):
        return x + 1


class Layer(Base):
    scale = 3

    def forward(self, x: int, *, twice: bool = False) -> tuple[int, int]:
        """Doc."""
        q, k = self.__split(
            x,  # a comment
        )
        if twice:
            q = q * 2
        elif x < 0:
            raise ValueError("negative")
        for _ in range(2):
            k += self.scale
        q = super().forward(q)
        return q, k

    def __split(self, x):
        return x, x * 10

    @staticmethod
    def fixed(x):
        return {"a": [x]}

    @property
    def size(self):
        size = 5
        return size

    @around
    def wrapped(self, x):
        y = x * 2
        return y


def plain(x):
    y = x + 1
    return y


def bare(x):
    x.append(1)
'''


class Seen:
    def __init__(self) -> None:
        self.values: list[tuple[str, Any]] = []
        self.errors: list[str] = []

    def value(self, key: str, owner: Any, value: Any) -> None:
        self.values.append((key, value))

    def failed(self, key: str, error: BaseException) -> None:
        self.errors.append(f"{key}: {type(error).__name__}: {error}")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package = tmp_path / "accprobe_patched_example"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.5.0'\n")
    (package / "layers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("accprobe_patched_example.layers")
    for name in [n for n in sys.modules if n.startswith("accprobe_patched_example")]:
        del sys.modules[name]


def tap(name: str, value: str, at: str, *anchors: str) -> Insertion:
    return Insertion(name, TapSpec(name, value, at, anchors))


def put(module: ModuleType, function: str, *taps: Insertion, seen: Seen | None = None, compiling: bool = False) -> Seen:
    seen = seen or Seen()
    install(module, function, taps, seen, lambda: compiling)
    return seen


def test_values_at_every_kind_of_place(module: ModuleType) -> None:
    layer = module.Layer()
    bound = layer.forward  # bound before the patch, as engines do
    expected = [layer.forward(4), layer.forward(4, twice=True)]
    seen = put(
        module, "Layer.forward", tap("in", "x", "entry"), tap("q", "q", "after", "q, k = self.__split(x)"),
        tap("before_loop", "k", "before", "for _ in range(2):"), tap("in_loop", "k", "after", "k += self.scale"),
        tap("scale", "self.scale", "after", "k += self.scale"), tap("before_return", "k", "before", "return q, k"),
        tap("out", "result[1]", "return"),
    )  # fmt: skip
    assert [layer.forward(4), bound(4, twice=True)] == expected == [(5, 46), (9, 46)]
    once = [("in", 4), ("q", 4), ("before_loop", 40), ("in_loop", 43), ("scale", 3), ("in_loop", 46), ("scale", 3),
            ("before_return", 46), ("out", 46)]  # fmt: skip
    assert seen.values == once * 2
    assert seen.errors == []
    assert module.Layer.forward.__doc__ == "Doc."
    assert module.Layer.forward.__kwdefaults__ == {"twice": False}


def test_static_methods_properties_decorated_and_plain_functions(module: ModuleType) -> None:
    seen = put(module, "Layer.fixed", tap("a", "result['a'][0]", "return"))
    put(module, "Layer.size", tap("size", "size", "before", "return size"), seen=seen)
    put(module, "Layer.wrapped", tap("y", "y", "after", "y = x * 2"), seen=seen)
    put(module, "plain", tap("p", "y", "after", "y = x + 1"), seen=seen)
    layer = module.Layer()
    assert (layer.fixed(7), layer.size, layer.wrapped(3), module.plain(1)) == ({"a": [7]}, 5, 6, 2)
    assert seen.values == [("a", 7), ("size", 5), ("y", 6), ("p", 2)]


def test_the_model_never_notices_a_value_that_cannot_be_read(module: ModuleType) -> None:
    seen = put(
        module, "Layer.forward", tap("later", "k", "entry"),
        tap("missing", "x.nothing", "after", "q, k = self.__split(x)"),
    )  # fmt: skip
    assert module.Layer().forward(4) == (5, 46)
    assert seen.values == []
    assert [e.split(": ")[0:2] for e in seen.errors] == [["later", "UnboundLocalError"], ["missing", "AttributeError"]]


def test_exceptions_keep_their_lines(module: ModuleType) -> None:
    def line() -> int:
        try:
            module.Layer().forward(-1)
        except ValueError as error:
            return traceback.extract_tb(error.__traceback__)[-1].lineno or 0
        raise AssertionError

    before = line()
    put(module, "Layer.forward", tap("q", "q", "after", "q, k = self.__split(x)"))
    assert line() == before


def test_while_torch_compile_traces_nothing_is_looked_at(module: ModuleType) -> None:
    seen = put(module, "plain", tap("p", "y", "after", "y = x + 1"), compiling=True)
    assert module.plain(1) == 2
    assert seen.values == []


def test_listeners_come_and_go(module: ModuleType) -> None:
    code = module.plain.__code__
    one = put(module, "plain", tap("p", "y", "after", "y = x + 1"))
    two = put(module, "plain", tap("x", "x", "entry"))
    module.plain(1)
    # Each function holds what all have asked for; whose key it is the listener knows.
    assert one.values == two.values == [("x", 1), ("p", 2)]
    remove(module, one)
    module.plain(2)
    assert len(one.values) == 2
    remove(module, two)
    assert module.plain.__code__ is code
    assert HOOK not in module.__dict__
    remove(module, two)  # twice does nothing


@pytest.mark.parametrize(("function", "spec", "why"), [
    ("Layer.forward", tap("q", "q", "after", "q, k = self.__cut(x)"),
     r"no statement `q, k = self\.__cut\(x\)`; nearest, line \d+: `q, k = self\.__split\(x\)`"),
    ("Layer.forwards", tap("q", "q", "entry"), "has no Layer.forwards of its own"),
    ("Layer.size.x", tap("q", "q", "entry"), "has no Layer.size.x"),
    ("Layer.scale", tap("q", "q", "entry"), "is a int, not a function"),
    ("Layer.forward", tap("q", "q", "after", "return q, k"), "nothing runs after"),
    ("bare", tap("q", "result", "return"), "no return statement"),
    ("Layer.forward", tap("q", "q", "after", "import os; import sys"), "is not one statement"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(module, function, spec, why):
    code = module.Layer.forward.__code__
    with pytest.raises(NotThere, match=why):
        put(module, function, spec)
    assert module.Layer.forward.__code__ is code
    assert HOOK not in module.__dict__
    assert module.Layer().forward(4) == (5, 46)


def test_a_function_that_is_not_its_source_is_refused(module: ModuleType) -> None:
    def other(x: int) -> int:
        y = x + 2
        return y

    module.plain.__code__ = other.__code__.replace(co_name="plain", co_filename=module.plain.__code__.co_filename)
    with pytest.raises(NotThere, match="the function in memory is not what its source says"):
        put(module, "plain", tap("p", "y", "after", "y = x + 1"))


def test_hashes_decide_where_they_are_given(module: ModuleType) -> None:
    node, _ = find_function(ast.parse(SOURCE), "plain")
    layout = ast.parse("def plain(x):\n    '''Other words.'''\n    # layout\n    y = (x +\n         1)\n    return y\n")
    assert fingerprint(node) == fingerprint(find_function(layout, "plain")[0])
    spec = tap("p", "y", "after", "y = x + 1")
    with pytest.raises(NotThere, match="its source has changed"):
        install(module, "plain", [spec], Seen(), lambda: False, ["0" * 32])
    install(module, "plain", [spec], Seen(), lambda: False, ["0" * 32, fingerprint(node)])


def test_anchors_mean_what_they_mean() -> None:
    assert normal("a = f( b,\n c )") == normal("a = f(b, c)") == "a = f(b, c)"
    assert normal("if x:") == "if x:"
    function = find_function(ast.parse("def f(x):\n    y = 1\n    if x:\n        y = 1\n    return y\n"), "f")[0]
    with pytest.raises(NotThere, match=r"`y = 1` stands 2 times \(lines 2, 4\): it names no place"):
        find_statement(function, ("y = 1",))
    assert find_statement(function, ("z = 1", "return y")).statement.lineno == 5
    for text in ("", "a = ", "x\ny", "((((" * 300):
        with pytest.raises(NotThere, match="is not one statement"):
            normal(text)


def target(**how: Any) -> Target:
    base: dict[str, Any] = {"module": "accprobe_patched_example.layers", "function": "plain"}
    return Target(**(base | {"taps": (TapSpec("p", "y", "after", ("y = x + 1",)),)} | how))


@pytest.mark.parametrize(("how", "status", "why"), [
    ({}, FITS, ""),
    ({"versions": ">=1.5,<2"}, FITS, ""),
    ({"versions": "<1.5"}, OTHER, "accprobe_patched_example 1.5.0 is not <1.5"),
    ({"module": "accprobe_patched_example.other"}, REFUSED, "no module accprobe_patched_example.other"),
    ({"module": "accprobe_patched_example.other", "optional": True}, ABSENT, "no module"),
    ({"function": "plane"}, REFUSED, "no function plane; nearest: plain"),
    ({"module": "no_such_package_at_all.x"}, REFUSED, "no_such_package_at_all is not installed"),
    ({"taps": (TapSpec("p", "y", "after", ("y = x + 2",)),)}, REFUSED, "nearest, line"),
    ({"hashes": ("0" * 32,)}, REFUSED, "its source has changed"),
])  # fmt: skip
def test_check_says_what_would_happen_and_imports_nothing(module, how, status, why):
    for name in [n for n in sys.modules if n.startswith("accprobe_patched_example")]:
        del sys.modules[name]
    (outcome,) = check(Patch("example", "", (target(**how),), Path("x.toml")))
    assert (outcome.status, why in outcome.why) == (status, True), outcome
    assert not any(n.startswith("accprobe_patched_example") for n in sys.modules)


def test_keys_are_unique() -> None:
    keys = [i.key for p in choose(["all"]) for t in p.targets for i in insertions(p, t)]
    assert len(keys) == len(set(keys))


@pytest.mark.skipif(package_root("vllm") is None, reason="vLLM is not installed here")
def test_every_shipped_patch_fits_the_installed_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    bad = [f"{p.name}: {o}" for p in choose(["all"]) for o in check(p) if o.status == REFUSED]
    assert bad == []
    assert main(["patches", "check"]) == 0
    out = capsys.readouterr().out
    assert "qwen2-attention: fits, 4 taps in 1 function" in out


def test_the_command(tmp_path: Path, module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    text = """
        about = "mine"
        [[target]]
        module = "accprobe_patched_example.layers"
        function = "plain"
        [[target.tap]]
        name = "p"
        value = "y"
        after = "y = x + 1"
    """
    file.write_text(textwrap.dedent(text))
    assert load(file).name == "mine"
    assert main(["patches", "list", str(file)]) == 0
    assert capsys.readouterr().out == "mine  mine\n"
    assert main(["patches", "check", str(file)]) == 0
    assert capsys.readouterr().out == "accprobe_patched_example 1.5.0\nmine: fits, 1 tap in 1 function\n"
    file.write_text(textwrap.dedent(text).replace("y = x + 1", "y = x - 1"))
    assert main(["patches", "check", str(file)]) == 1
    assert "  plain: refused: no statement `y = x - 1`; nearest, line" in capsys.readouterr().out
    assert main(["patches", "lists"]) == 2
    assert main(["patches", "check", "mlaa"]) == 2
    assert "did you mean mla?" in capsys.readouterr().err
    file.write_text(textwrap.dedent(text.replace("accprobe_patched_example", "no_such_package_at_all")))
    assert main(["patches", "check", str(file)]) == 3
