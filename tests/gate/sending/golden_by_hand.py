"""A folder of `send` whose answers no model would choose: what a server is forced along in the tests."""

import random
from collections.abc import Sequence
from pathlib import Path

from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.prompts import PromptLine, to_text

VOCABULARY = range(3, 250)


def golden(path: Path, sizes: Sequence[tuple[int, int]], words: Sequence[str] = ("one", "all")) -> Path:
    """Prompts p0, p1, ... with so many token ids, and answers with so many, drawn at random."""
    draw = random.Random(3)
    lines, answers = [], []
    for i, (prompt, answer) in enumerate(sizes):
        ids, named = ([draw.choice(VOCABULARY) for _ in range(n)] for n in (prompt, answer))
        lines.append(PromptLine(f"p{i}", token_ids=tuple(ids)))
        answers.append(Reply(f"p{i}", 0.0, 0.0, ids, named, [-1.0] * answer, None, None, "length"))
    passes = [{"arrive": word, "answered": len(sizes), "refused": 0, "resumed": 0} for word in words]
    settings = {"arrive": list(words), "top": 5, "concurrency": len(sizes)}
    about = {"schema": replies.SCHEMA, "prompts": {"count": len(sizes)}, "passes": passes, "settings": settings}
    replies.begin(path, to_text(lines), about | {"complete": True})
    writer = replies.ReplyWriter(path / replies.pass_name(0))
    for reply in answers:
        writer.add(reply)
    writer.close()
    return path
