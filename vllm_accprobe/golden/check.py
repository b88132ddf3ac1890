"""Golden's prompts and tokens from a pack to the user's server, captured for `accprobe compare`.

The problem: whoever has a pack has no golden machine, and must not need a second command for the prompts, the tokens,
the rows and the settings that golden had. The idea: the pack has all of them. The server is sent golden's token ids
along golden's answers, with the probe on; the rows that the pack stores are captured, and whole requests while they fit
into the budget, since the replay of attention needs all earlier rows. Other token ids of the same text are found before
anything is captured.

Elsewhere: the server, rows and passes (make.py), the pack (pack_sketches.py), the comparison (`accprobe compare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.localize import RowSizes
from vllm_accprobe.gate.measure import gating
from vllm_accprobe.gate.measure.gating import Gate
from vllm_accprobe.gate.sending import passes
from vllm_accprobe.gate.sides import SendSettings
from vllm_accprobe.golden.answers import unpacked
from vllm_accprobe.golden.make import ANSWERS, CAPTURED, golden_server, opened, rows_to_capture, shapes_of

_ROWS = 0.7
"""Chosen: of the budget, what rows may take; parameters are stored where they fit a quarter of it."""


@dataclass(frozen=True)
class Checked:
    """answers: golden's and mine's, compared; None where no token of both has numbers. dump: of mine. noise: of golden
    from itself (make.Noise, as JSON)."""

    answers: Gate | None
    dump: Path
    noise: Mapping[str, Any]


def check(
    text: Path, command: str, work: Path, how: SendSettings, environ: Mapping[str, str], *, gigabytes: float, seed: int
) -> Checked:
    """Captures the server that ``command`` starts. text: of the pack's prompts and answers; seed: the pack's. work: for
    the dump and the answers. Raises DumpError for a text that is none, NotServed, SendError, OtherIds where it makes
    other token ids of golden's texts, GoldenError, OSError."""
    sent, head = unpacked(text, work / ANSWERS)
    how = replace(how, top=head.top, max_tokens=head.max_tokens)
    sizes = RowSizes(head.row, head.sampled, gigabytes * 1e9 * _ROWS)
    rows = rows_to_capture(shapes_of(sent, sent.path), sizes, seed)
    with golden_server("mine", command, work, how, environ, gigabytes) as server:
        passes.check_vocabulary(server.sender, sent)
        mine = server.captured(CAPTURED, sent, rows, score=passes.SCORE in head.arrive)
    opened(work).close()
    try:
        answers = gating.compare(sent, mine, [])
    except gating.GateError:
        answers = None
    return Checked(answers, server.dump, head.noise)


def noise_sentence(noise: Mapping[str, Any]) -> str:
    """That golden did not give the same bits twice; "" where it did. noise: a stranger's."""
    sizes = noise.get("worst")
    if noise.get("reproduced") is True or not isinstance(sizes, dict):
        return ""
    worst = [v[0] for v in sizes.values() if isinstance(v, list) and v and isinstance(v[0], float)]
    return "golden differs from itself in a second pass" + (f", by {max(worst):.2g} at most" if worst else "")


def answers_sentence(answers: Gate | None) -> str:
    """How far the answers are apart, before anything that was captured."""
    if answers is None:
        return "answers: no token has a log-probability on both sides"
    cell = answers.cells[0]
    if not cell.worst:
        return f"answers: equal to the bit in {cell.n:,} tokens"
    return (f"answers: log-probabilities of {cell.n:,} tokens differ by {cell.median:.2g} nats in the median, "
            f"{cell.worst:.2g} at most")  # fmt: skip
