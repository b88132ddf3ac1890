"""What a server says of a trainer's tokens, whatever stands for the server.

The problem: the rollout may be a server that answers, a command, a folder of `send`, or the log-probabilities that the
trainer itself wrote down while it sampled. The idea: each gives log-probabilities over the same token ids, by the
sequence's name. A server scores the tokens as a prompt (scoring.py), into a folder of `send` which is gone on with.
Not here: the trainer's side (trainer_lines.py), the measures (ratios.py).
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.sending import passes, replies
from vllm_accprobe.gate.sending.arrival import parse
from vllm_accprobe.gate.sending.client import Reply, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.serving import served
from vllm_accprobe.gate.trainer.ratios import Scored
from vllm_accprobe.gate.trainer.scoring import score
from vllm_accprobe.gate.trainer.trainer_lines import ROLLOUT, TRAINER, Trained, read

SCORED = "scored as prompts: prefill's kernels, not decode's"
FORCED = "decoded, forced along the trainer's tokens"
WRITTEN = "as the trainer wrote them down while it sampled"
FREE = "decoded freely, up to the first token that is not the trainer's"


@dataclass(frozen=True)
class Rollout:
    """answers: by the sequence's name; how: which kernels they come from; left_out: sequences, by reason."""

    answers: Mapping[str, Scored]
    how: str
    left_out: Counter[str]


@dataclass(frozen=True)
class ScoringSender(Sender):
    """Asks for the log-probabilities of each line's token ids."""

    def __repr__(self) -> str:
        return f"ScoringSender({self.url!r})"

    def ask(self, line: PromptLine, request_id: str, open_ones: dict[int, socket.socket], zero: float) -> Reply:
        return score(self, line.name, line.token_ids or (), request_id, open_ones, zero)


def of_file(path: Path) -> Rollout:
    """Of another file, or the same one where it has both sides. Raises TrainerError, OSError."""
    found = read(path, (*ROLLOUT, *TRAINER))
    return Rollout({line.name: Scored(line.ids, line.logprobs) for line in found.lines}, WRITTEN, Counter())


def of_folder(path: Path) -> Rollout:
    """Of a folder of `send`. Raises FolderError, OSError."""
    sent = replies.read(path)
    scored, free, left = {}, 0, Counter[str]()
    said = sent.about.get("along")
    for name, reply in (sent.passes[0] if sent.passes else {}).items():
        if reply.refused is not None:
            left[f"sequences that the server refused: {reply.refused}"] += 1
        elif reply.prompt_token_ids and reply.token_ids and reply.logprobs:
            ids = (*reply.prompt_token_ids, *reply.token_ids)
            before: list[float | None] = [None] * len(reply.prompt_token_ids)
            scored[name] = Scored(ids, (*before, *reply.logprobs))
            free += getattr(reply, "forced", None) is None
        else:
            left["sequences without token ids of the server"] += 1
    if sent.about.get("way") == "trainer":
        how = SCORED
    else:
        how = FORCED if said and not free else FREE
    return Rollout(scored, how, left)


def of_server(
    golden: Trained, url: str, key: str, out: Path, made: Mapping[str, Any], timeout: float = 600.0
) -> Rollout:
    """Asks ``url`` for the trainer's tokens; ``out`` becomes, or is, a folder of `send`. Raises SendError, FolderError,
    OSError."""
    plain, server = Sender(url, key, timeout=timeout).introduced()
    sender = ScoringSender(plain.url, plain.key, plain.timeout, plain.top, plain.max_tokens, plain.model)
    lines = [PromptLine(line.name, token_ids=line.ids, max_tokens=1) for line in golden.lines]
    passes.send(sender, server, lines, [parse("all")], 8, out, dict(made) | {"way": "trainer"})
    return of_folder(out)


def of_command(
    golden: Trained, command: str, key: str, environ: Mapping[str, str], out: Path, made: Mapping[str, Any],
    ready_s: float = 1800.0,
) -> Rollout:  # fmt: skip
    """The same of a server that is started and ended."""
    if replies.exists(out) and replies.read_about(out).get("complete"):
        return of_folder(out)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with served(command, environ, out, ready_s) as (url, own):
        return of_server(golden, url, own or key, out, made)
