"""Every trainer's names, padding and alignment give the same sequence."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe.gate import trainer
from vllm_accprobe.gate.trainer import ROLLOUT, TRAINER, TrainerError, read

P, A, L = [5, 6, 7], [8, 9, 10, 11], [-0.1, -0.2, -0.3, -0.4]
ZERO = [0.0] * 3

SHAPES: dict[str, dict[str, Any]] = {
    "ours": {"id": "x", "prompt_token_ids": P, "token_ids": A, "logprobs": L},
    "verl": {
        "uid": "x", "prompts": [0, 0, *P], "responses": [*A, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 1, 1, 1, 0], "old_log_probs": [*L, 0.0], "rollout_log_probs": [-9.0] * 5,
    },
    "verl agent loop": {"request_id": "x", "prompt_ids": P, "response_ids": A, "response_logprobs": L},
    "NeMo-RL": {
        "idx": 0, "id": ["x"], "token_ids": [[*P, *A, 0, 0]], "token_loss_mask": [[0, 0, 0, 1, 1, 1, 1, 0, 0]],
        "input_lengths": [7], "prev_logprobs": [[0.0, -3.0, -3.0, *L, 0.0, 0.0]], "generation_logprobs": [[0.0] * 9],
    },
    "TRL": {
        "id": "x", "prompt_ids": [0, *P], "prompt_mask": [0, 1, 1, 1], "completion_ids": [*A, 0],
        "completion_mask": [1, 1, 1, 1, 0], "old_per_token_logps": [*L, -1.0],
    },
    "OpenRLHF": {
        "id": "x", "sequences": [0, *P, *A, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 1, 1, 0],
        "action_mask": [0, 0, 0, 1, 1, 1, 1, 0], "action_log_probs": [*ZERO, *L, 0.0],
    },
    "slime": {"id": "x", "tokens": P + A, "response_length": 4, "loss_mask": [1] * 4, "log_probs": L},
    "whole": {"id": "x", "input_ids": P + A, "log_probs": [None, *ZERO[:2], *L], "loss_mask": [0, 0, 0, 1, 1, 1, 1]},
}  # fmt: skip


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, tmp_path: Path) -> None:
    (line,) = read(write(tmp_path / "t.jsonl", SHAPES[shape])).lines
    assert line.ids == (*P, *A)
    assert line.start == 3
    assert line.logprobs == (None, None, None, *L)
    assert line.name == "x"


def test_what_a_tool_wrote_is_read_and_not_compared(tmp_path: Path) -> None:
    shape = SHAPES["ours"] | {"response_mask": [1, 0, 1, 1]}
    (line,) = read(write(tmp_path / "t.jsonl", shape)).lines
    assert (line.ids, line.logprobs[3:]) == ((*P, *A), (-0.1, None, -0.3, -0.4))


def test_both_sides_of_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", SHAPES["verl"])
    assert read(path, TRAINER).lines[0].logprobs[3:] == tuple(L)
    assert read(path, (*ROLLOUT, *TRAINER)).lines[0].logprobs[3:] == (-9.0,) * 4


def test_what_is_no_line_is_counted(tmp_path: Path) -> None:
    lines = [
        "no",
        [1],
        {"token_ids": [1, 2]},
        SHAPES["ours"] | {"logprobs": [-1.0] * 9},
        SHAPES["ours"],
        SHAPES["ours"],
    ]
    found = read(write(tmp_path / "t.jsonl", *lines))
    assert found.left_out == {trainer.NO_JSON: 2, trainer.NO_LISTS: 1, trainer.NO_FIT: 1}
    assert [line.name for line in found.lines] == ["x", "x.5"]
    with pytest.raises(TrainerError, match="1 lines without token ids"):
        read(write(tmp_path / "n.jsonl", {"prompt": "text", "logprobs": [1.0]}))
