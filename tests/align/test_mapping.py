"""Mapping files: what they may say, and what is refused with one line."""

import json

import pytest

from vllm_accprobe.align.mapping import MappingError, RoleRule, Source, fill, load_mapping, match, parse_mapping


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
    ({"rules": [{"mine": "a", "golden": "b"}], "renames": {"x": "y"}}, "'renames' beside 'rename' and 'rules' is"),
    ({"rename": {"x": "y"}, "about": "the new head"}, "'about' beside 'rename' and 'rules' is not known"),
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
