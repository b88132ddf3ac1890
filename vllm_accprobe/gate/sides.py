"""The two sides of a gate, and its floors: each a folder of `send`, a server, or a command that serves.

The problem: to compare two servers somebody has to start the one, send, keep what came back, end it (both may need the
same card), start the other, and send it just what the first one answered. The idea: a side is whatever there is, and
becomes a folder; golden is sent first and answers freely, the others are forced along its tokens. A folder that is
complete is not sent again, one that was begun is gone on with, so the same command goes on after anything.
Not here: sending (sending/), in which dtype a floor is made (floor_dtype.py), comparing (measure/gating.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_accprobe import __version__
from vllm_accprobe.gate.sending import along, passes, replies
from vllm_accprobe.gate.sending import prompts as prompts_file
from vllm_accprobe.gate.sending.arrival import parse
from vllm_accprobe.gate.sending.client import OtherIds, Sender, SendError, ServerLost
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.sending.serving import served

FOLDER, URL, COMMAND = "folder", "url", "command"
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Of what is done and how many: a context that is told how many are done."""


class SideError(Exception):
    """One line: what a side is not, or cannot be made. Exit code 2."""


class NotServed(SideError):
    """One line: a command that ended, or answered nothing, before it ever served."""


class NotComparable(SideError):
    """One line: a side whose tokens mean something else than golden's. Exit code 3."""


@dataclass(frozen=True)
class ServerSide:
    """kind: folder, url or command. text: as the user wrote it, never shown of a command: it may hold a key."""

    kind: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "backslashreplace")).hexdigest()

    def __repr__(self) -> str:
        return f"ServerSide({self.kind})"

    def __str__(self) -> str:
        """For people: of a command its first words, up to the first option."""
        if self.kind != COMMAND:
            return self.text
        words = self.text.split()
        shown = words[: next((i for i, word in enumerate(words) if word.startswith("-")), len(words))]
        return " ".join(shown[:3]) or "a command"


@dataclass(frozen=True)
class Asking:
    """How a side is asked; as the options of `send`. model: where a server has several."""

    prompts: str = prompts_file.DEFAULT
    arrive: tuple[str, ...] = ("one", "all")
    concurrency: int = 64
    top: int = 20
    max_tokens: int = 32
    model: str = ""
    timeout: float = 600.0
    ready_s: float = 1800.0
    score: bool | None = None


def side(text: str) -> ServerSide:
    """A folder that is there, a URL, or what has a space. Raises SideError."""
    if text.startswith(("http://", "https://")):
        return ServerSide(URL, text)
    if Path(text).is_dir():
        return ServerSide(FOLDER, text)
    if " " in text.strip():
        return ServerSide(COMMAND, text.strip())
    raise SideError(
        f"{text} is no folder of accprobe send, no URL (http://HOST:PORT) and no command "
        "(one has a space: 'vllm serve MODEL')"
    )


def made(
    what: str,
    of: ServerSide,
    out: Path,
    asking: Asking,
    golden: Sent | None,
    progress: Progress,
    environ: dict[str, str],
) -> Sent:
    """The folder of a side, which is sent to ``out`` where it is none. what: golden, mine or floor N, for people.
    golden: whose tokens are forced; None: the side answers freely. Raises SideError; what was answered is kept."""
    try:
        if of.kind == FOLDER:
            return replies.read(Path(of.text))
        lines = prompts_file.read(asking.prompts) if golden is None else along.forced_lines(golden)
        digest = None if golden is None else along.digest(golden)
        if replies.exists(out) and _complete(out, of, lines, digest):
            return replies.read(out)
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            url, key = of.text, environ.get("VLLM_API_KEY", "")
            if of.kind == COMMAND:
                url, key = _started(stack, of, out, asking.ready_s, environ)
            _sent(what, of, Sender(url, key), out, asking, golden, lines, digest, progress)
        return replies.read(out)
    except NotServed as e:
        raise NotServed(f"{what}: {e}") from None
    except OtherIds as e:
        raise NotComparable(f"{what}: {e}") from None
    except (SendError, along.AlongError, prompts_file.PromptsError, replies.FolderError) as e:
        raise SideError(f"{what}: {_plain(e)}") from None


def _plain(e: Exception) -> str:
    return str(e).replace("--engine: ", "").replace("--url: ", "")


def _started(stack: ExitStack, of: ServerSide, out: Path, ready_s: float, environ: dict[str, str]) -> tuple[str, str]:
    try:
        return stack.enter_context(served(of.text, environ, out, ready_s))
    except ServerLost:
        raise
    except SendError as e:
        raise NotServed(_plain(e)) from None


def _complete(out: Path, of: ServerSide, lines: list[PromptLine], digest: str | None) -> bool:
    """Whether all has been answered. Raises FolderError where it was answered by, or asked, something else."""
    about = replies.read_about(out)
    if about.get("side") not in (None, of.digest) and of.kind == COMMAND:
        raise replies.FolderError(f"{out} is of another command: name another --out")
    if (about.get("along") or {}).get("sha256") != digest:
        raise replies.FolderError(f"{out} went along other tokens than golden's: name another --out")
    asked = {"count": len(lines), "sha256": prompts_file.digest(lines)}
    if about.get("prompts") != asked:
        raise replies.FolderError(f"{out} has other prompts: name another --out, or give those it was begun with")
    return bool(about.get("complete"))


def _sent(
    what: str, of: ServerSide, sender: Sender, out: Path, asking: Asking, golden: Sent | None, lines: list[PromptLine],
    digest: str | None, progress: Progress,
) -> None:  # fmt: skip
    settings = {} if golden is None else golden.about.get("settings", {})
    words = [w for w in settings.get("arrive", asking.arrive) if w != along.SCORE]
    arrivals = [parse(word) for word in words]
    asked = Sender(
        sender.url, sender.key, asking.timeout, settings.get("top", asking.top), asking.max_tokens, asking.model
    )
    asked, server = asked.introduced()
    if golden is not None:
        along.check_vocabulary(asked, golden)
    begun = replies.read_about(out) if replies.exists(out) else None
    plan = along.planned(asked, digest, len(arrivals), asking.score, begun)
    concurrency = int(settings.get("concurrency", asking.concurrency))
    with progress(what, len(lines) * (len(arrivals) + plan.score)) as tell:
        done = passes.send(asked, server, lines, arrivals, concurrency, out, _about(asking, of), tell, plan)
    if not done.answered:
        said = ", ".join(f"{n:,} {why}" for why, n in done.reasons.items())
        raise NotComparable(f"{what}: no prompt was answered: {said} ({out})")


def _about(asking: Asking, of: ServerSide) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"accprobe": __version__, "source": os.path.basename(asking.prompts), "started": now, "side": of.digest}
