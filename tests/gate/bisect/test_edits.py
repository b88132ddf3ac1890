"""Commands are changed as a person would: the one setting in whatever spelling, and nothing else."""

from __future__ import annotations

import shlex

import pytest

from vllm_accprobe.gate.bisect.edits import BisectError, Edit, ServeCommand, command, number

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
