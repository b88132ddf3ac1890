"""What a patch file may say: paths and anchors, and nothing that could run."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from vllm_accprobe.patching.schema import ROOT, PatchError, choose, in_range, load, names, numbers, parse_path

GOOD = """
about = "an example"
checked = ["1.2"]

[[target]]
module = "package.module"
function = "Layer.forward"
versions = ">=1.0,<2"

[[target.tap]]
name = "q"
value = "out[0].x['k'][-1]"
after = ["a = f(b)", "a = g(b)"]
like = "attn input.query"

[[target.tap]]
id = "attention"
label = "pta"
value = "result"
at = "return"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "example.toml"
    path.write_text(text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    patch = load(write(tmp_path, GOOD))
    assert (patch.name, patch.about, patch.checked) == ("example", "an example", ("1.2",))
    (target,) = patch.targets
    assert (target.module, target.function, target.versions) == ("package.module", "Layer.forward", ">=1.0,<2")
    q, label = target.taps
    assert (q.name, q.at, q.anchors, q.like) == ("q", "after", ("a = f(b)", "a = g(b)"), ("attn", "input.query"))
    assert (label.name, label.at, label.label) == ("attention", "return", ("pta", "attention"))
    assert ast.unparse(q.expression) == "out[0].x['k'][-1]"


@pytest.mark.parametrize(("old", "new", "why"), [
    *(("out[0].x['k'][-1]", value, "is not a path of names") for value in (
        "__import__('os').system('id')", "x if y else z", "a + b", "a[b]", "a[1:2]", "(a := b)", "[x for x in y]",
        "a[True]", "f'{a}'", "a; b", "3")),
    ('"result"', '"q"', "at return a value begins with result"),
    ('at = "return"', 'at = "exit"', "not entry or return"),
    ('label = "pta"', 'label = "gpu"', "not pta or acl"),
    ('name = "q"', 'name = "q rotated"', "not of letters, digits"),
    ('name = "q"', 'name = "q"\nvalues = "x"', "'values' is not a key of a patch; did you mean value?"),
    ("after =", 'at = "entry"\nafter =', "give one of after, before"),
    ('"Layer.forward"', '"Layer.<locals>.f"', "is no dotted name"),
    ('"package.module"', '"package/module"', "is no dotted name"),
    ('">=1.0,<2"', '"~=1.0"', "is not of the form"),
    ("[[target]]", "[target]", "is not written as"),
    ('"attn input.query"', '"attn"', "like is a tap and a role"),
    ("about = ", "about = = ", "not a TOML file"),
])  # fmt: skip
def test_everything_else_is_one_line(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in GOOD
    with pytest.raises(PatchError, match=why.replace("?", r"\?")) as caught:
        load(write(tmp_path, GOOD.replace(old, new, 1)))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "example.toml"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PatchError, match="not a TOML file"):
        load(tmp_path / "binary.toml")
    with pytest.raises(PatchError, match="it has no"):
        load(write(tmp_path, "about = 'x'"))


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="abq.[]()0'\"-:,+ \n_\\{}*", max_size=24))
def test_a_path_is_a_path_or_refused(text: str) -> None:
    try:
        tree = parse_path(text)
    except ValueError:
        return
    allowed = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Load)
    assert all(isinstance(node, allowed) for node in ast.walk(tree))


def test_versions() -> None:
    assert numbers("0.32.0+cpu") == (0, 32, 0)
    assert numbers("dev") == ()
    for version, text, inside in (
        ("0.32.0", "", True), ("0.32", ">=0.32", True), ("0.31.9", ">=0.32", False), ("0.32.1", "<0.32", False),
        ("0.9.0", "<0.10", True), ("1.0", ">=0.28,<0.33", False), ("0.30.1", ">=0.28, <0.33", True),
        ("2", "==2.0", True),
    ):  # fmt: skip
        assert in_range(numbers(version), text) == inside, (version, text)


def test_names(tmp_path: Path) -> None:
    assert "qwen2-attention" in names()
    assert {p.name for p in choose(["all"])} == set(names())
    own = write(tmp_path, GOOD)
    assert [p.name for p in choose(["mla", str(own)])] == ["mla", "example"]
    with pytest.raises(PatchError, match=r"did you mean qwen2-attention\?"):
        choose(["qwen2-atention"])
    (tmp_path / "mla.toml").write_text(GOOD)
    with pytest.raises(PatchError, match="already a patch called mla"):
        choose(["mla", str(tmp_path / "mla.toml")])


def test_the_repository_shows_what_is_shipped() -> None:
    link = Path(__file__).parents[2] / "patches" / "vllm"
    assert link.resolve() == (ROOT / "vllm").resolve()
    assert all(p.about and p.checked for p in choose(["all"]))
