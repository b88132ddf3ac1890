"""One configuration, three spellings; every mistake is one line that names the setting and the nearest valid one."""

import re
from pathlib import Path

import pytest

from vllm_accprobe import config
from vllm_accprobe.config import ConfigError, DumpConfig, ProbeConfig, in_ranges, matches, parse_ranges


def test_ranges_are_closed_sorted_and_forgiving_of_spaces() -> None:
    assert parse_ranges("7, 0-4") == ((0, 4), (7, 7))
    assert parse_ranges([0, "2-3", (5, 6)]) == ((0, 0), (2, 3), (5, 6))
    assert parse_ranges("all") == ()
    assert [n for n in range(9) if in_ranges(parse_ranges("0-2,7"), n)] == [0, 1, 2, 7]


@pytest.mark.parametrize("bad", ["4-2", "x", "-1", "1.5", "1-2-3"])
def test_a_bad_range_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"range|number"):
        parse_ranges(bad)


def test_environment_sets_every_field() -> None:
    config = ProbeConfig.from_env(
        {
            "VLLM_ACCPROBE": "1",
            "VLLM_ACCPROBE_DIR": "out",
            "VLLM_ACCPROBE_TASK": "stats",
            "VLLM_ACCPROBE_TOKENS": "0-4,7",
            "VLLM_ACCPROBE_STEPS": "0-3",
            "VLLM_ACCPROBE_RANKS": "1",
            "VLLM_ACCPROBE_MODULES": "layers,!*.3",
            "VLLM_ACCPROBE_PARTS": "output",
            "VLLM_ACCPROBE_REQUESTS": "my-*",
            "VLLM_ACCPROBE_GRAPHS": "1",
            "VLLM_ACCPROBE_MAX_GB": "0.5",
            "VLLM_ACCPROBE_OPS": "1",
            "VLLM_ACCPROBE_OPS_MODE": "sample",
            "VLLM_ACCPROBE_OPS_LIST": "aten.*,!aten.mul*",
            "VLLM_ACCPROBE_OPS_CALLS": "7",
            "VLLM_ACCPROBE_OPS_MAX_MB": "1.5",
            "VLLM_ACCPROBE_SEED": "42",
            "HOME": "/",
        }
    )
    assert config == ProbeConfig(
        enabled=True, dir="out", task="stats", tokens=((0, 4), (7, 7)), steps=((0, 3),), ranks=((1, 1),),
        modules=("layers", "!*.3"), parts=("output",), requests=("my-*",), graphs=True, max_gb=0.5,
        ops=True, ops_mode="sample", ops_list=("aten.*", "!aten.mul*"), ops_calls=7, ops_max_mb=1.5, seed=42,
    )  # fmt: skip
    assert config.budget_bytes == 500_000_000
    assert not config.capture_inputs
    assert config.capture_outputs


@pytest.mark.parametrize(
    ("value", "words"), [("*", ("all",)), ("all", ("all",)), ("a.b,norm", ("a.b", "norm")), ("", ())]
)
def test_all_graph_taps_are_not_the_default_set(value: str, words: tuple[str, ...]) -> None:
    assert ProbeConfig.from_env({"VLLM_ACCPROBE_GRAPH_TAPS": value}).graph_taps == words


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("TOKEN", "0", " is not a setting of accprobe; did you mean VLLM_ACCPROBE_TOKENS?"),
        ("TASK", "tensors", "=tensors: 'tensors' is not one of tensor, stats; did you mean tensor?"),
        ("STEPS", "3-1", "=3-1: range '3-1' ends before it begins"),
        ("MAX_GB", "many", "=many: 'many' is not a number of gigabytes"),
        ("MAX_GB", "nan", "=nan: 'nan' is not a sensible number of gigabytes (0 < GB < 1000000)"),
        ("OPS_MODE", "dedupe", "=dedupe: 'dedupe' is not one of trace, dedup, sample, full; did you mean dedup?"),
        ("OPS_CALLS", "-1", "=-1: '-1' is not a whole number such as 5"),
        (
            "OPS_CALLS",
            "3",
            "=3: it counts the calls that VLLM_ACCPROBE_OPS_MODE=sample or dedup keeps, and the mode is full",
        ),
        ("OPS_MAX_MB", "0", "=0: '0' is not a sensible number of megabytes (0 < MB < 1000000000)"),
        ("SEED", "x", "=x: 'x' is not a whole number such as 5"),
        ("GRAPHS", "maybe", "=maybe: 'maybe' is neither 1 nor 0"),
        ("PARTS", "inputs", "=inputs: 'inputs' is not one of input, output, params; did you mean input?"),
    ],
)
def test_mistakes_are_one_line(name: str, value: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProbeConfig.from_env({"VLLM_ACCPROBE": "1", f"VLLM_ACCPROBE_{name}": value})
    assert str(caught.value) == f"VLLM_ACCPROBE_{name}{line}"


def test_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "probe.toml"
    file.write_text('tokens = [0, "3-5"]\nmodules = ["attention"]\nmax_gb = 2\n')
    config = ProbeConfig.from_env({"VLLM_ACCPROBE_CONFIG": str(file), "VLLM_ACCPROBE_MAX_GB": "1"})
    assert config.tokens == ((0, 0), (3, 5))
    assert config.modules == ("attention",)
    assert config.max_gb == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokn = 1", "'tokn' is not a setting; did you mean tokens?"),
        ("a = ", "not a TOML file"),
        ('tokens = "0-4"\n[accprobe]\ndir = "d"', "tokens stands outside of the table [accprobe]: move it there"),
        ('[acprobe]\ndir = "d"', "'acprobe' is not a setting"),
        ('[accprobe]\ndirectory = "d"', "'directory' is not a setting"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "probe.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"VLLM_ACCPROBE_CONFIG=.*probe\.toml") as caught:
        ProbeConfig.from_env({"VLLM_ACCPROBE_CONFIG": str(file)})
    assert message in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="VLLM_ACCPROBE_CONFIG=/no/such: No such file"):
        ProbeConfig.from_env({"VLLM_ACCPROBE_CONFIG": "/no/such"})


def test_keywords_and_the_seeds_spelling_agree() -> None:
    assert (
        ProbeConfig.from_kwargs(dir="d", tokens=[0], parts="output") == DumpConfig("d", [0], tensor_part=1).to_probe()
    )
    with pytest.raises(ConfigError, match="'token' is not a setting of accprobe; did you mean tokens"):
        ProbeConfig.from_kwargs(token=1)


def test_parameters_are_stored_while_they_fit_a_quarter_of_the_budget() -> None:
    config = ProbeConfig(max_gb=1.0)
    assert config.wants_param_payloads(250_000_000)
    assert not config.wants_param_payloads(250_000_001)
    assert ProbeConfig(max_gb=1.0, parts=("params",)).wants_param_payloads(10**12)
    assert not ProbeConfig(parts=("input", "output")).wants_param_payloads(1)
    assert not ProbeConfig(task="stats").wants_param_payloads(1)


def test_the_last_matching_glob_decides() -> None:
    assert matches((), ("x",))
    assert matches(("a*",), ("ab",))
    assert not matches(("a*",), ("b",))
    assert matches(("!a*",), ("b",))
    assert not matches(("a*", "!ab"), ("ab",))
    assert matches(("a*", "!ab", "ab"), ("ab",))


def test_force_is_a_switch_or_a_directory() -> None:
    for said, force, where in (
        ("1", "1", ""),
        ("on", "1", ""),
        ("0", "", ""),
        ("steps", "steps", "steps"),
        ("", "", ""),
    ):
        config = ProbeConfig.from_env({"VLLM_ACCPROBE_FORCE": said})
        assert (config.force, config.force_dir, config.enabled) == (force, where, False)


def test_the_page_of_settings_has_every_name_in_both_languages() -> None:
    """But for the names that accprobe sets itself, or that docs/capture.md explains where they are needed."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    internal = {config.RUN_ID, config.REPLICAS, config.TAP_SET}
    known = {config.ENV if name == "enabled" else config.PREFIX + name.upper() for name in config._PARSERS}
    known |= {config.PREFIX + "CONFIG", config.PREFIX + "PRESET"}
    for half in page.split("## 中文\n"):
        cells = [line.split("|")[1] for line in half.splitlines() if line.startswith("| `VLLM")]
        names = {n if n.startswith("V") else config.ENV + n for cell in cells for n in re.findall(r"`(\w+)`", cell)}
        assert names == known - internal
