"""What is asked, and of which command."""

from __future__ import annotations

from vllm_accprobe.gate import self_check


def test_restarts_are_what_the_command_is_not() -> None:
    words = ["vllm", "serve", "M"]
    found = {w.name: self_check.path_command(words, w) for w in self_check.restarts(words, 2000)}
    assert found == {
        "eager": "vllm serve M --enable-prompt-tokens-details --enforce-eager",
        "sync": "vllm serve M --enable-prompt-tokens-details --no-async-scheduling",
        "sync-batch": "vllm serve M --enable-prompt-tokens-details --no-async-scheduling",
        "chunks": "vllm serve M --enable-prompt-tokens-details --long-prefill-token-threshold=256",
    }
    other = [*words, "--enforce-eager", "--no-async-scheduling", "--enable-prompt-tokens-details"]
    found = {w.name: self_check.path_command(other, w) for w in self_check.restarts(other, 10)}
    assert found == {
        "compiled": "vllm serve M --no-async-scheduling --enable-prompt-tokens-details",
        "async": "vllm serve M --enforce-eager --enable-prompt-tokens-details --async-scheduling",
        "async-batch": "vllm serve M --enforce-eager --enable-prompt-tokens-details --async-scheduling",
    }


def test_pieces_are_whole_blocks() -> None:
    assert self_check.pieces(128) == []
    assert self_check.pieces(129) == [128]
    assert self_check.pieces(512) == [128, 256, 384]
    assert self_check.pieces(8000) == [2048, 4096, 6144]
