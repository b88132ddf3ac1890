"""Which settings of a command are not plain, and that each edit makes its own plain and nothing else."""

from __future__ import annotations

import shlex

import pytest

from vllm_accprobe.gate.bisect.edits import MODEL_LENGTH, BisectError, Offered, ServerSetting, axes, command

ALL = Offered(None, ("fuse_a",), ("norm", "act"), ("rms_norm",))


def of(text: str, offered: Offered = ALL, plain: dict[str, str] | None = None, **base: str) -> dict[str, ServerSetting]:
    return {a.name: a for a in axes(command(shlex.split(text), base), offered, (), plain or {})}


def made(text: str, axis: ServerSetting) -> str:
    return shlex.join(command(shlex.split(text), {}).edited([axis.edit]).words)


def test_a_bare_command_has_its_defaults() -> None:
    found = of("vllm serve M")
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
    assert of(plain) == {}


def test_every_edit_makes_its_own_axis_plain() -> None:
    text = (
        "vllm serve M --async-scheduling --max-model-len 512 --max-num-batched-tokens 64 --block-size 32 -tp 2 "
        "--kv-cache-dtype fp8 --attention-backend X --speculative-config '{}' -cc.custom_ops+ +norm"
    )
    found = of(text)
    assert len(found) == 11
    for name, axis in found.items():
        assert set(of(made(text, axis))) == set(found) - {name}
    assert found["chunked prefill"].scale == ("--max-num-batched-tokens", 64, 512)
    assert found["block size"].scale == ("--block-size", 32, None)
    (norm,) = found["custom operators"].parts[1:]
    assert command(shlex.split(made(text, norm)), {}).json("--compilation-config") == {"custom_ops": ["-norm"]}


def test_what_this_vllm_does_not_have_is_not_offered() -> None:
    assert list(of("vllm serve M --block-size 32", Offered(frozenset({"--block-size"})))) == ["block size"]


def test_the_runner_is_the_environments() -> None:
    found = of("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve M")
    assert found["model runner"].edit.environ == (("VLLM_USE_V2_MODEL_RUNNER", "0"),)
    assert "model runner" not in of("vllm serve M")


def test_another_plain_value() -> None:
    found = of("vllm serve M", plain={"attention": "TRITON_ATTN"})
    assert found["attention"].edit.add == ("--attention-backend", "TRITON_ATTN")
    assert of("vllm serve M --block-size 32", plain={"block size": "16"})["block size"].scale == (
        "--block-size",
        32,
        16,
    )
    with pytest.raises(BisectError, match="other plain values"):
        of("vllm serve M", plain={"colour": "red"})
    with pytest.raises(BisectError, match="has no --attention-backend"):
        of("vllm serve M", Offered(frozenset({"--block-size"})), plain={"attention": "X"})


def test_a_name_twice_is_refused() -> None:
    twice = axes(command(["vllm", "serve", "M"], {}), ALL)[1]
    with pytest.raises(BisectError, match="two have the same"):
        axes(command(["vllm", "serve", "M"], {}), ALL, [twice])
