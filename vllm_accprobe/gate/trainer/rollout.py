"""What a server says of a trainer's tokens, whatever stands for the server.

The problem: the rollout may be a server that answers, a command, a folder of `send`, or the log-probabilities that the
trainer itself wrote down while it sampled. The idea: each gives log-probabilities over the same token ids, by the
sequence's name. A server is made to decode the trainer's tokens where it can be forced, and else scores them as a
prompt; its answers are a folder of `send`, which is gone on with.
Not here: the trainer's side (trainer_lines.py), the measures (ratios.py), forcing (gate/sending/ways.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.sending import passes, replies, ways
from vllm_accprobe.gate.sending.along import Forcing
from vllm_accprobe.gate.sending.arrival import parse
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.gate.sending.prompts import PromptLine, to_text
from vllm_accprobe.gate.sending.serving import served
from vllm_accprobe.gate.sides import Asking
from vllm_accprobe.gate.trainer.ratios import Scored
from vllm_accprobe.gate.trainer.trainer_lines import ROLLOUT, TRAINER, Trained, read

HOW = {
    ways.PLUGIN: "decoded, forced along the trainer's tokens",
    ways.TRACE: "decoded, forced along the trainer's tokens by trace replay",
    ways.SCORED: "scored as prompts: decode's kernels are not exercised",
    None: "decoded freely, up to the first token that is not the trainer's",
}
WRITTEN = "as the trainer wrote them down while it sampled"


@dataclass(frozen=True)
class Rollout:
    """answers: by the sequence's name; how: which kernels they come from; left_out: sequences, by reason."""

    answers: Mapping[str, Scored]
    how: str
    left_out: Counter[str]


def of_file(path: Path) -> Rollout:
    """Of another file, or the same one where it has both sides. Raises TrainerError, OSError."""
    found = read(path, (*ROLLOUT, *TRAINER))
    return Rollout({line.name: Scored(line.ids, line.logprobs) for line in found.lines}, WRITTEN, Counter())


def of_folder(path: Path) -> Rollout:
    """Of a folder of `send`, its first pass. Raises FolderError, OSError."""
    sent = replies.read(path)
    scored, left = {}, Counter[str]()
    how: set[str | None] = set()
    for name, reply in (sent.passes[0] if sent.passes else {}).items():
        if reply.refused is not None:
            left[f"sequences that the server refused: {reply.refused}"] += 1
        elif reply.prompt_token_ids and reply.token_ids and reply.logprobs:
            before: list[float | None] = [None] * len(reply.prompt_token_ids)
            scored[name] = Scored((*reply.prompt_token_ids, *reply.token_ids), (*before, *reply.logprobs))
            how.add(reply.forced)
        else:
            left["sequences without token ids of the server"] += 1
    return Rollout(scored, "; ".join(sorted(HOW.get(h, str(h)) for h in how)), left)


def of_server(golden: Trained, url: str, key: str, out: Path, made: Mapping[str, Any], asking: Asking) -> Rollout:
    """Asks ``url`` for the trainer's tokens; ``out`` becomes, or is, a folder of `send`. Raises SendError, FolderError,
    OSError."""
    sender, server = Sender(url, key, timeout=asking.timeout, model=asking.model).introduced()
    if (way := sender.how_forced()) is None:
        raise SendError(f"{url} neither decodes nor scores tokens that are named: {ways.HOW_TO}")
    lines = []
    for line in golden.lines:
        start = max(line.start, 1)
        lines.append(PromptLine(line.name, token_ids=line.ids[:start], along=line.ids[start:]))
    digest = hashlib.sha256(to_text(lines).encode()).hexdigest()
    passes.send(sender, server, lines, [parse("all")], asking.concurrency, out, dict(made), plan=Forcing(way, digest))
    return of_folder(out)


def of_command(
    golden: Trained, command: str, environ: Mapping[str, str], out: Path, made: Mapping[str, Any],
    asking: Asking,
) -> Rollout:  # fmt: skip
    """The same of a server that is started and ended."""
    if replies.exists(out) and replies.read_about(out).get("complete"):
        return of_folder(out)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with served(command, environ, out, asking.ready_s) as (url, key):
        return of_server(golden, url, key, out, made, asking)
