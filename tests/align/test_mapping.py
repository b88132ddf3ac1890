"""Mapping files and the tensors that their rules make of several; what is refused, with one line."""

import json

import numpy as np
import pytest
from hand_made import FUSE, Dump, attention, by_name, f32

from vllm_accprobe.align.derived import derive, read, rope
from vllm_accprobe.align.mapping import MappingError, RoleRule, Source, fill, load_mapping, match, parse_mapping
from vllm_accprobe.align.names import apply
from vllm_accprobe.dump.schema import Layout


@pytest.mark.parametrize(
    ("pattern", "tap", "groups"),
    [
        ("model.*.mlp", "model.3.mlp", ("3",)),
        ("model.*.mlp", "model.3.x.mlp", None),
        ("**.qkv", "model.layers.0.qkv", ("model.layers.0",)),
        ("a.b", "a.b", ()),
        ("a.b", "axb", None),
        (r"re:(.*)\.h\.(\d+)", "model.h.7", ("model", "7")),
        (r"re:h\.\d+", "model.h.7", None),  # the whole tap
    ],
)
def test_patterns(pattern, tap, groups):
    assert match(pattern, tap) == groups


@pytest.mark.parametrize(("template", "groups", "text"), [
    ("model.*.q", ("3",), "model.3.q"),
    ("{2}.{1}", ("a", "b"), "b.a"),
    ("h.{1+2}", ("3",), "h.5"),
    ("h.{1-3}", ("3",), "h.0"),
    ("h.{1-4}", ("3",), None),
    ("h.{1+1}", ("x",), None),
    ("h.{2}", ("3",), None),
    ("**.a.*", ("m.n", "4"), "m.n.a.4"),
])  # fmt: skip
def test_templates(template, groups, text):
    assert fill(template, groups) == text


def test_the_short_form_names_taps_only(tmp_path):
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"**.qkv_proj": ["**.q_proj", "{1}.k_proj", "{1}.v_proj"], "model.layers.*": "h.{1+1}"}))
    fused, one = load_mapping(file).rules
    assert fused.parts == (RoleRule(None, (Source("**.q_proj"), Source("{1}.k_proj"), Source("{1}.v_proj"))),)
    assert one.parts[0].sources == (Source("h.{1+1}"),)
    assert one.label == "model.layers.* ← h.{1+1}"


def test_the_long_form_in_yaml(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "map.yaml"
    file.write_text(
        "rename:\n  're:transformer\\.(.*)': 'model.{1}'\n"
        "rules:\n"
        "- mine: '**.norm'\n  golden: '**.ln'\n  roles:\n"
        "    input.x+input.residual: input.0\n    output.1: '**.add/output.0'\n"
        "- mine: '**.w'\n  golden: '**.w'\n  transpose: [1, 0]\n  join: sum\n  dim: 1\n  alone: true\n"
    )
    rules = load_mapping(file)
    assert (rules.renames[0].pattern, rules.renames[0].target) == (r"re:transformer\.(.*)", "model.{1}")
    norm, weight = rules.rules
    assert norm.parts == (
        RoleRule("input.x+input.residual", (Source("**.ln", "input.0"),)),
        RoleRule("output.1", (Source("**.add", "output.0"),)),
    )
    assert weight.parts == (RoleRule(None, (Source("**.w"),), "sum", 1, (1, 0)),)
    assert weight.alone


@pytest.mark.parametrize(("data", "message"), [
    ([], "expected a mapping"),
    ({}, "expected a mapping"),
    ({1: "a"}, "keys must be strings"),
    ({"a": 3}, "expected a template or a list"),
    ({"a": []}, "names no tap"),
    ({"re:(": "a"}, "not a regular expression"),
    ({"rules": [], "rename": [1]}, "'rename' must be a mapping and 'rules' a list"),
    ({"rules": "x"}, "'rules' a list"),
    ({"rename": {"a": 1}, "rules": []}, "the new name must be a string"),
    ({"rules": [{"golden": "a"}]}, "rule 1: expected the keys"),
    ({"rules": [{"mine": "a", "golden": "b", "eval": "x"}]}, "rule 1: 'eval' is not known; known are alone, dim"),
    ({"rules": [{"mine": "a", "golden": "b"}], "renames": {"x": "y"}}, "unknown key 'renames': only 'rename' and"),
    ({"rename": {"x": "y"}, "about": "the new head"}, "unknown key 'about': only 'rename' and 'rules' are"),
    ({"rules": [{"mine": "a", "golden": "b", "alone": "false"}]}, "alone must be true or false, not 'false'"),
    ({"rules": [{"mine": "a", "golden": "b", "join": "mul"}]}, "join must be cat or sum"),
    ({"rules": [{"mine": "a", "golden": "b", "dim": "1"}]}, "dim must be a whole number"),
    ({"rules": [{"mine": "a", "golden": "b", "transpose": [0, 0]}]}, "transpose must list dimensions"),
    ({"rules": [{"mine": "a", "golden": "b", "transpose": "10"}]}, "transpose must list dimensions"),
    ({"rules": [{"mine": "a", "roles": ["x"]}]}, "roles must map"),
    ({"rules": [{"mine": "a", "roles": {"output.0": "output.0"}}]}, "names no tap"),
    ({"rules": [{"mine": "", "golden": "b"}]}, "the pattern must be a string"),
])  # fmt: skip
def test_what_is_refused(data, message):
    with pytest.raises(MappingError, match=message) as e:
        parse_mapping(data, "m.json")
    assert str(e.value).startswith("m.json")
    assert "\n" not in str(e.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(MappingError, match="No such file"):
        load_mapping(tmp_path / "none.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(MappingError, match="not JSON"):
        load_mapping(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MappingError, match="not text"):
        load_mapping(bad)


def test_yaml_never_makes_objects(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "evil.yaml"
    file.write_text("a: !!python/object/apply:os.system ['touch " + str(tmp_path / "owned") + "']\n")
    with pytest.raises(MappingError, match="not YAML"):
        load_mapping(file)
    assert not (tmp_path / "owned").exists()


def test_statistics_of_a_join_are_those_of_the_whole():
    golden, _, _ = apply(FUSE, *attention())
    stats = by_name(golden)[("a.qkv_proj", "output.0")].stats
    whole = np.array([0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23], np.float64)
    assert (stats.count, stats.min, stats.max) == (12, 0, 23)
    assert stats.mean == pytest.approx(whole.mean())
    assert stats.l2 == pytest.approx(np.linalg.norm(whole))


def test_bfloat16_terms_are_added_without_rounding():
    mine = Dump()
    one = mine.put("n", "output.0", np.array([[0x3F80]], np.uint16), dtype="bfloat16")  # 1.0
    tiny = mine.put("n", "output.1", np.array([[0x3B80]], np.uint16), dtype="bfloat16")  # 2**-8
    total = derive([one, tiny], "n", "output.0+1", join="sum")
    assert total.dtype == "float32"
    assert read(mine, total).tolist() == [[1 + 2**-8]]


def test_shards_are_joined_per_rank_and_keep_their_blocks():
    golden = Dump()
    parts = []
    for rank in (0, 1):
        layouts = [Layout("shard", "tp", rank, 2, -1, ((n, 1),)) for n in (2, 1)]
        parts.append(
            [golden.put(t, "output.0", np.full((1, n), rank, np.float32), rank=rank, layout=y)
             for (t, n), y in zip((("q", 2), ("k", 1)), layouts, strict=True)]
        )  # fmt: skip
    made = [derive(p, "qk", "output.0") for p in parts]
    assert [m.layout for m in made] == [Layout("shard", "tp", r, 2, -1, ((2, 1), (1, 1))) for r in (0, 1)]
    mixed = golden.put("v", "output.0", f32([1]))
    assert derive([parts[0][0], mixed], "qv", "output.0") == "its parts are cut differently over ranks"


@pytest.mark.parametrize(("arrays", "how", "reason"), [
    (([[1.0]], [[1.0], [2.0]]), {}, "different shapes"),
    (([[1]], [[1]]), {"join": "sum"}, "cannot|not numbers"),
    (([[1.0]], [[1.0, 2.0]]), {"join": "sum"}, "different shapes"),
    (([[1.0]], [[1.0]]), {"dim": 5}, "no such dimension"),
    (([[1.0]], [[1.0]]), {"transpose": (0, 1, 2)}, "other dimensions"),
    (([[1.0, 2, 3]], [[1.0, 2]], [[1.0, 2]]), {"join": "rope"}, "rotary"),
])  # fmt: skip
def test_what_cannot_be_made_has_a_reason(arrays, how, reason):
    dump = Dump()
    records = [dump.put("t", f"output.{i}", np.array(a)) for i, a in enumerate(arrays)]
    made = derive(records, "m", "output.0", **how)
    assert isinstance(made, str)
    assert any(r in made for r in reason.split("|"))


def test_rotation_by_hand():
    x = f32([1, 2, 3, 4])  # one head of 4, halves (1, 2) and (3, 4)
    cos, sin = f32([0, 1, 0, 1]), f32([1, 0, 1, 0])  # first pair by 90 degrees, second by 0
    assert rope(x, cos, sin).tolist() == [[-3, 2, 1, 4]]
    two = rope(f32([1, 2, 3, 4, 1, 0, 0, 0]), cos, sin)
    assert two.tolist() == [[-3, 2, 1, 4, 0, 0, 1, 0]]


def test_of_larger_heads_only_the_first_part_is_rotated() -> None:
    """Two heads of 4, of which 2 are rotated by a quarter turn."""
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    out = rope(x, np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    assert out.tolist() == [[[-1, 0, 2, 3], [-5, 4, 6, 7]]]
    flat = rope(x.reshape(1, 8), np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32), 4)
    assert flat.tolist() == out.reshape(1, 8).tolist()


def test_neighbours_are_turned_as_pairs() -> None:
    """Two heads of 6, of which 4 are rotated: the first pair by a quarter turn, the second by half a turn."""
    x = np.arange(12, dtype=np.float32).reshape(1, 12)
    cos, sin = f32([0, -1, 0, -1]), f32([1, 0, 1, 0])
    assert rope(x, cos, sin, 6, 1).tolist() == [[-1, 0, -2, -3, 4, 5, -7, 6, -8, -9, 10, 11]]
