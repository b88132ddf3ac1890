"""Commands are changed as a person would: the one setting in whatever spelling, and nothing else."""

import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe.gate.bisect.edits import (
    MODEL_LENGTH,
    BisectError,
    Edit,
    Offered,
    ServeCommand,
    ServerSetting,
    axes,
    command,
    interpreter,
    number,
    options_offered,
    read_offered,
    read_vendor,
)

CC = "--compilation-config"


def of(text: str, **base: str) -> ServeCommand:
    return command(shlex.split(text), base)


@pytest.mark.parametrize(
    "given",
    ["--max-num-batched-tokens 64", "--max-num-batched-tokens=64", "--max_num_batched_tokens 64",
     "--max_num_batched_tokens=64"],
)  # fmt: skip
def test_all_spellings_of_an_option(given: str) -> None:
    one = of(f"vllm serve M {given} --port 1")
    assert one.get("--max-num-batched-tokens") == "64"
    changed = one.edited([Edit(drop=("--max-num-batched-tokens",), add=("--max-num-batched-tokens", "512"))])
    assert changed.words == ("vllm", "serve", "M", "--port", "1", "--max-num-batched-tokens", "512")


def test_switches_leave_the_model_that_stands_behind_them() -> None:
    one = of("vllm serve --no-enable-prefix-caching M --async_scheduling --enforce-eager")
    assert one.flag("--enable-prefix-caching") is False
    assert one.flag("--async-scheduling") is True
    assert one.flag("--enable-chunked-prefill") is None
    changed = one.edited([Edit(drop=("--enable-prefix-caching",), add=("--enable-prefix-caching",))])
    assert changed.words == ("vllm", "serve", "M", "--async_scheduling", "--enforce-eager", "--enable-prefix-caching")
    assert changed.flag("--enable-prefix-caching") is True


@pytest.mark.parametrize(
    "given",
    ["""-cc '{"mode": 3, "custom_ops": ["+a", "-b"]}'""", "-cc.mode 3 -cc.custom_ops+ +a -cc.custom_ops+ -b",
     "--compilation-config.mode=3 --compilation_config.custom_ops+ +a -cc.custom_ops+=-b", "-cc=3 -cc.custom_ops+ +a "
     "-cc.custom_ops+ -b"],
)  # fmt: skip
def test_json_in_all_spellings(given: str) -> None:
    one = of(f"vllm serve M {given} -tp 2")
    assert one.json(CC) == {"mode": 3, "custom_ops": ["+a", "-b"]}
    assert one.get("--tensor-parallel-size") == "2"
    edits = [Edit(fields=((CC, "custom_ops+", "-a"),)), Edit(fields=((CC, "pass_config.fuse", False),))]
    changed = one.edited(edits)
    assert changed.json(CC) == {"mode": 3, "custom_ops": ["-b", "-a"], "pass_config": {"fuse": False}}
    assert changed.words[:5] == ("vllm", "serve", "M", "-tp", "2")
    assert changed.words.count(CC) == 1
    assert one.edited([Edit(fields=((CC, "custom_ops", ["none"]),))]).json(CC)["custom_ops"] == ["none"]


def test_variables_in_front() -> None:
    one = of("env A=1 B='two words' vllm serve M", C="3")
    assert one.full() == {"A": "1", "B": "two words", "C": "3"}
    assert one.line() == "A=1 B='two words' vllm serve M"
    changed = one.edited([Edit(environ=(("A", None), ("C", None), ("D", "4")))])
    assert changed.full() == {"B": "two words", "D": "4"}
    assert changed.line() == "env -u C B='two words' D=4 vllm serve M"


def test_a_key_is_not_shown() -> None:
    assert "secret" not in of("vllm serve M --api-key secret --hf-token=secret2").line()


@pytest.mark.parametrize("words", [["vllm serve M | tee log"], ["vllm serve 'M"], [], ["A=1"], [" "]])
def test_what_is_no_command(words: list[str]) -> None:
    with pytest.raises(BisectError):
        command(words, {})


def test_one_line_is_words() -> None:
    assert command(["vllm serve M --port 1"], {}).words == ("vllm", "serve", "M", "--port", "1")


def test_json_that_is_none() -> None:
    with pytest.raises(BisectError, match="no json"):
        of("vllm serve M -cc '{'").json(CC)


@pytest.mark.parametrize(("text", "n"), [("64", 64), ("2k", 2000), ("2K", 2048), ("x", None), (None, None), ("", None)])
def test_numbers_as_vllm_reads_them(text: str | None, n: int | None) -> None:
    assert number(text) == n


# --- which settings of a command are not plain ---


ALL = Offered(None, ("fuse_a",), ("norm", "act"), ("rms_norm",))


def settings_of(
    text: str, offered: Offered = ALL, plain: dict[str, str] | None = None, **base: str
) -> dict[str, ServerSetting]:
    return {a.name: a for a in axes(command(shlex.split(text), base), offered, (), plain or {})}


def made(text: str, axis: ServerSetting) -> str:
    return shlex.join(command(shlex.split(text), {}).edited([axis.edit]).words)


def test_a_bare_command_has_its_defaults() -> None:
    found = settings_of("vllm serve M")
    assert list(found) == [
        "compilation", "prefix caching", "chunked prefill", "async scheduling", "custom operators", "IR operators"
    ]  # fmt: skip
    assert [p.name for p in found["compilation"].parts] == [
        "compilation: mode", "compilation: graphs", "compilation: fuse_a"
    ]  # fmt: skip
    assert [p.name for p in found["custom operators"].parts] == ["custom operators: act", "custom operators: norm"]
    assert MODEL_LENGTH in found["chunked prefill"].edit.add


def test_a_plain_command_has_none() -> None:
    plain = (
        "vllm serve M --enforce-eager --no-enable-prefix-caching --no-enable-chunked-prefill --max-model-len 1k "
        "--max-num-batched-tokens 1000 --no-async-scheduling -cc.custom_ops='[\"none\"]' --ir-op-priority "
        '\'{"rms_norm": ["native"]}\''
    )
    assert settings_of(plain) == {}


def test_every_edit_makes_its_own_axis_plain() -> None:
    text = (
        "vllm serve M --async-scheduling --max-model-len 512 --max-num-batched-tokens 64 --block-size 32 -tp 2 "
        "--kv-cache-dtype fp8 --attention-backend X --speculative-config '{}' -cc.custom_ops+ +norm"
    )
    found = settings_of(text)
    assert len(found) == 11
    for name, axis in found.items():
        assert set(settings_of(made(text, axis))) == set(found) - {name}
    assert found["chunked prefill"].scale == ("--max-num-batched-tokens", 64, 512)
    assert found["block size"].scale == ("--block-size", 32, None)
    (norm,) = found["custom operators"].parts[1:]
    assert command(shlex.split(made(text, norm)), {}).json("--compilation-config") == {"custom_ops": ["-norm"]}


def test_what_this_vllm_does_not_have_is_not_offered() -> None:
    assert list(settings_of("vllm serve M --block-size 32", Offered(frozenset({"--block-size"})))) == ["block size"]


def test_the_runner_is_the_environments() -> None:
    found = settings_of("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve M")
    assert found["model runner"].edit.environ == (("VLLM_USE_V2_MODEL_RUNNER", "0"),)
    assert "model runner" not in settings_of("vllm serve M")


def test_another_plain_value() -> None:
    found = settings_of("vllm serve M", plain={"attention": "TRITON_ATTN"})
    assert found["attention"].edit.add == ("--attention-backend", "TRITON_ATTN")
    assert settings_of("vllm serve M --block-size 32", plain={"block size": "16"})["block size"].scale == (
        "--block-size",
        32,
        16,
    )
    with pytest.raises(BisectError, match="other plain values"):
        settings_of("vllm serve M", plain={"colour": "red"})
    with pytest.raises(BisectError, match="has no --attention-backend"):
        settings_of("vllm serve M", Offered(frozenset({"--block-size"})), plain={"attention": "X"})


def test_a_name_twice_is_refused() -> None:
    twice = axes(command(["vllm", "serve", "M"], {}), ALL)[1]
    with pytest.raises(BisectError, match="two have the same"):
        axes(command(["vllm", "serve", "M"], {}), ALL, [twice])


# --- a vendor's switches: read as they stand, and one line for whatever else is in the file ---


TARGET = command(["vllm", "serve", "M", "--kernels", "fast"], {"VENDOR_NORM": "1", "OFF": "0"})
GOOD = """
[[switch]]
name = "norm"
environment = "VENDOR_NORM"
plain = "0"
[[switch]]
name = "gone"
environment = "VENDOR_NORM"
[[switch]]
name = "off already"
environment = "OFF"
plain = 0
[[switch]]
name = "kernels"
option = "--kernels"
[[switch]]
name = "words"
words = ["--vendor-plain"]
"""


def test_what_differs_is_an_axis(tmp_path: Path) -> None:
    file = tmp_path / "switches.toml"
    file.write_text(GOOD)
    found = {a.name: a for a in read_vendor(file, TARGET)}
    assert list(found) == ["norm", "gone", "kernels", "words"]
    assert TARGET.edited([found["norm"].edit]).full()["VENDOR_NORM"] == "0"
    assert "VENDOR_NORM" not in TARGET.edited([found["gone"].edit]).full()
    assert TARGET.edited([found["kernels"].edit]).words == ("vllm", "serve", "M")
    assert TARGET.edited([found["words"].edit]).words[-1] == "--vendor-plain"
    same = tmp_path / "switches.json"
    same.write_text(json.dumps([{"name": "norm", "environment": "VENDOR_NORM", "plain": "0"}]))
    assert read_vendor(same, TARGET)[0].value == "1"


E1: dict[str, Any] = {"name": "a", "environment": "A", "plain": "1"}


@pytest.mark.parametrize(
    "value",
    [
        "", "{", "[[switch]", "\x00", "[" * 100_000, "null", "[]", "{}", "3", '{"switch": 3}', "[3]", '["a"]',
        [E1 | {"name": ""}], [E1 | {"name": "a\x1b[2J"}], [E1 | {"name": "a,b"}], [E1 | {"name": 3}],
        [E1 | {"name": "x" * 101}], [E1 | {"environment": "A=B"}], [E1 | {"environment": "A B"}],
        [E1 | {"environment": ["A"]}], [E1 | {"plain": {"a": 1}}], [E1 | {"plain": "a\0b"}], [E1 | {"plain": True}],
        [E1 | {"option": "--a"}], [{"name": "a"}], [{"name": "a", "option": "rm -rf"}],
        [{"name": "a", "words": []}], [{"name": "a", "words": "--a"}], [{"name": "a", "words": ["--a"], "plain": "1"}],
        [E1 | {"unknown": 1}], [E1 | {"__class__": 1}],
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_line(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "switches.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(BisectError) as error:
        read_vendor(file, TARGET)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).isprintable()


def test_no_file_and_too_large(tmp_path: Path) -> None:
    with pytest.raises(BisectError, match="is no file"):
        read_vendor(tmp_path, TARGET)
    (tmp_path / "large").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(BisectError, match="larger"):
        read_vendor(tmp_path / "large", TARGET)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BisectError, match="neither json nor toml"):
        read_vendor(tmp_path / "bytes", TARGET)


# --- what a vLLM can be told, from its source; and whose vLLM it is ---


ARGS = 'parser.add_argument("--enforce-eager", **x)\nparser.add_argument("--block-size")\n'
COMPILATION = "class PassConfig:\n    fuse_a: bool = None\n    limit: int = 3\n    fuse_b: bool = Field(default=True)\n"
KERNEL = "class IrOpPriorityConfig:\n    rms_norm: list[str] = Field()\n    other: int = 1\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in (
        ("engine/arg_utils.py", ARGS), ("config/compilation.py", COMPILATION), ("config/kernel.py", KERNEL),
        ("envs.py", 'x = {"VLLM_USE_V2_MODEL_RUNNER": 1}\n'),
        ("model_executor/a.py", 'from x import CustomOp\n@CustomOp.register("rms_norm")\nclass A: ...\n'),
    ):  # fmt: skip
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return tmp_path / "vllm"


def test_it_stands_in_the_source(package: Path) -> None:
    there = read_offered(package, "vllm=0.99")
    assert "--enforce-eager" in there
    assert "--async-scheduling" not in there
    assert "VLLM_USE_V2_MODEL_RUNNER" in there
    assert (there.passes, there.ir_ops, there.custom_ops) == (("fuse_a", "fuse_b"), ("rms_norm",), ("rms_norm",))


def test_the_commands_own_python_is_asked_and_nothing_is_imported(package: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent)}
    there = options_offered(command([sys.executable, "-m", "vllm.entrypoints.openai.api_server"], environ))
    assert there.options is not None
    assert "--block-size" in there


def test_a_script_names_its_python(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    environ = {"PATH": str(tmp_path)}
    for text, found in (
        (f"#!{sys.executable}\n", sys.executable),
        (f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n", sys.executable),
        ("#!/bin/sh\ndocker run vllm\n", None),
        ("", None),
    ):
        script.write_text(text)
        script.chmod(0o700)
        assert interpreter(("vllm", "serve", "M"), environ) == found
    assert interpreter(("ssh", "host", "nothing"), environ) is None


def test_what_is_not_known_is_taken_to_be_there(tmp_path: Path) -> None:
    assert "--anything" in Offered()
    assert options_offered(command(["ssh", "host", "vllm-serve"], {"PATH": str(tmp_path)})) == Offered()
    assert read_offered(tmp_path).options is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_the_installed_one() -> None:
    there = options_offered(command([sys.executable, "-m", "vllm.entrypoints.openai.api_server"], os.environ))
    for option in ("--enforce-eager", "--enable-prefix-caching", "--async-scheduling", "--max-num-batched-tokens",
                   "--compilation-config", "--ir-op-priority", "--block-size", "--kv-cache-dtype"):  # fmt: skip
        assert option in there
    assert {"rms_norm", "silu_and_mul", "rotary_embedding"} <= set(there.custom_ops)
    assert "fuse_norm_quant" in there.passes
    assert "rms_norm" in there.ir_ops
    assert "vllm" in there.version
