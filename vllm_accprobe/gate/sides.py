"""The two sides of a gate, and its floors: each a folder of `send`, a server, or a command that serves.

The problem: to compare two servers, somebody starts the one, sends, keeps the answers, ends it (both may need the same
card), and sends the other one the answers of the first. The idea: whatever a side is, it becomes a folder. Golden is
sent first and answers freely, the others are forced along its tokens; a complete folder is not sent again, and one that
was begun is resumed. A floor is golden's command in another dtype: it rounds at the same places by another amount.
Mine's dtype if it is another, else a finer one; for float32 there is none, and bfloat16 gives a limit that is far too
wide.

Not here: a server that is started (served_run.py), what a floor says (measure/conditions.py), sending (sending/),
comparing (measure/gating.py).
"""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_accprobe.gate import preflight
from vllm_accprobe.gate.bisect.edits import Edit, ServeCommand
from vllm_accprobe.gate.localize import KeptServers, Progress
from vllm_accprobe.gate.measure.conditions import LEAST
from vllm_accprobe.gate.sending import passes, prompts as prompts_file, rendering, replies
from vllm_accprobe.gate.sending.client import NotServed, OtherIds, Sender, SendError
from vllm_accprobe.gate.sending.passes import parse
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.served_run import assigns, checked, split_line
from vllm_accprobe.progress import USUAL, Pace, waiting

DTYPES = ("bfloat16", "float16", "float32")
_SHORT = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def of_command(command: str) -> str | None:
    """The dtype that a command's words or its model's config.json name; None where it is not known."""
    words = ServeCommand(tuple(split_line(command)))
    dtype = words.get("--dtype")
    if dtype in (None, "", "auto"):
        config = preflight.config_of(preflight.model_of(words) or "")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    dtype = _SHORT.get(dtype or "", dtype)
    return dtype if dtype in DTYPES else None


def candidates(golden: str, mine: str | None) -> list[str]:
    """The dtypes to try, the best first; a server may refuse one. mine: its command, None where it is none."""
    ours = of_command(golden) or "bfloat16"
    theirs = None if mine is None else of_command(mine)
    finer = {"bfloat16": ["float16", "float32"], "float16": ["float32", "bfloat16"], "float32": ["bfloat16", "float16"]}
    first = [theirs] if theirs is not None and theirs != ours else []
    return list(dict.fromkeys([*first, *finer[ours]]))


def command(golden: str, dtype: str) -> str:
    """Golden's command with this dtype."""
    edit = Edit(drop=("--dtype",), add=(f"--dtype={dtype}",))
    return shlex.join(ServeCommand(tuple(split_line(golden))).edited([edit]).words)


FOLDER, URL, COMMAND = "folder", "url", "command"


class SideError(Exception):
    """One line: what a side is not, or cannot be made. Exit code 2."""


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
        """For people: of a command its first words, up to the first option, without what is set in front of it."""
        if self.kind != COMMAND:
            return self.text
        try:
            words = list(itertools.dropwhile(assigns, shlex.split(self.text)))
        except ValueError:  # a quote that is not closed; it will not be started
            return "a command"
        shown = words[: next((i for i, word in enumerate(words) if word.startswith("-")), len(words))]
        return " ".join(shown[:3]) or "a command"


@dataclass(frozen=True)
class SendSettings:
    """How a side is asked; as the options of `send`. model: where a server has several. say: gets lines while a command
    starts."""

    prompts: str = prompts_file.DEFAULT
    arrive: tuple[str, ...] = ("one", "all")
    concurrency: int = 64
    top: int = 20
    max_tokens: int = 32
    model: str = ""
    timeout: float = 600.0
    ready_s: float = 1800.0
    score: bool | None = None
    say: Pace = USUAL

    def sender(self, url: str, key: str) -> Sender:
        return Sender(url, key, self.timeout, self.top, self.max_tokens, self.model)


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
    what: str, of: ServerSide, out: Path, sending: SendSettings, golden: Sent | None, progress: Progress,
    environ: dict[str, str], servers: KeptServers,
) -> Sent:  # fmt: skip
    """The folder of a side, which is sent to ``out`` where it is none. what: golden, mine or floor N, for people.
    golden: whose tokens are forced; None: the side answers freely. Raises SideError, NotServed; what was answered is
    kept."""
    with _named(what):
        if of.kind == FOLDER:
            return replies.read(Path(of.text))
        lines = prompts_file.read(sending.prompts) if golden is None else passes.forced_lines(golden)
        digest = None if golden is None else passes.digest(golden)
        if _complete(out, of, lines, sending, golden):
            return replies.read(out)
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            url, key = of.text, environ.get("VLLM_API_KEY", "")
            if of.kind == COMMAND:
                started = servers.serve(what, of.text, environ, out, sending.ready_s, sending.say)
                server = stack.enter_context(started).command
                url, key = server.url, server.key
            _sent(what, of, (url, key), out, sending, golden, lines, digest, progress)
        return replies.read(out)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """What goes wrong in it is of the side ``what``."""
    try:
        yield
    except NotServed as e:
        raise NotServed(f"{what}: {e}") from None
    except OtherIds as e:
        raise NotComparable(f"{what}: {e}") from None
    except (SendError, passes.TeacherForcingError, prompts_file.PromptsError, replies.FolderError) as e:
        raise SideError(f"{what}: {str(e).replace('--url: ', '')}") from None


def check(
    named: Mapping[str, tuple[ServerSide, Path]], sending: SendSettings, environ: Mapping[str, str], captured: bool,
    note: Callable[[str], object],
) -> None:  # fmt: skip
    """All that is known of the sides before one of them is started. named: each with the folder of its answers, golden
    first. captured: commands are started with the probe on, later; note: see `prompts.read`. Raises SideError,
    NotServed."""
    golden: Sent | None = None
    lines: list[PromptLine] = []
    commands: dict[str, ServeCommand] = {}
    for i, (what, (of, place)) in enumerate(named.items()):
        with _named(what):
            if of.kind == COMMAND:
                commands[what] = preflight.command_of(of.text, environ)
                checked(commands[what], captured=captured and i < 2)
            elif of.kind == URL:
                Sender(of.text, environ.get("VLLM_API_KEY", "")).introduced()
            done = place
            if of.kind == FOLDER:
                done = Path(of.text)
                _check_prompts(done, lines)
            elif not i:
                lines = prompts_file.read(sending.prompts, note)
            elif golden is not None:
                lines = passes.forced_lines(golden)
            if not i and (of.kind == FOLDER or _complete(done, of, lines, sending, None)):
                golden = replies.read(done)
                lines = replies.prompts_of(done)
            elif i and golden is not None and of.kind != FOLDER:
                _complete(done, of, lines, sending, golden)
    if commands and 0 < len(lines) < LEAST:
        note(f"there will be no verdict: it needs {LEAST} prompts, there are {len(lines)}")
    if (other := preflight.other_model(*list(commands.values())[:2]) if len(commands) > 1 else "") and (
        {"golden", "mine"} <= commands.keys()
    ):
        raise SideError(f"golden and mine: {other}: their numbers are not the same anyway")


def kept(
    golden: ServerSide, mine: ServerSide, floors: Iterable[str], environ: Mapping[str, str], lines: Iterable[PromptLine]
) -> list[str]:
    """The sides whose servers can run on from their answers to a capture: eager ones, and golden with every command
    that starts after it. floors: commands; mine starts last. Not with images: a server that saw them before would not
    encode them again. Raises NotServed."""
    if golden.kind != COMMAND or mine.kind != COMMAND or any("image" in str(line.messages) for line in lines):
        return []
    first, last, *others = [preflight.command_of(text, environ) for text in (golden.text, mine.text, *floors)]
    found = ["mine"] if preflight.eager(last) else []
    if preflight.eager(first) and all(preflight.fit_together(first, one) for one in (last, *others)):
        found.append("golden")
    return found


def _check_prompts(folder: Path, golden: list[PromptLine]) -> None:
    """Raises FolderError where none of the folder's prompts is one of golden's."""
    replies.read_about(folder)
    own = {line.name: line.text for line in replies.prompts_of(folder)}
    if own and golden and not any(
        line.name in own and (None in (line.text, own[line.name]) or line.text == own[line.name]) for line in golden
    ):
        raise replies.FolderError(f"{folder} has answers to other prompts than golden's: send it golden's")


def _complete(out: Path, of: ServerSide, lines: list[PromptLine], sending: SendSettings, golden: Sent | None) -> bool:
    """Whether all has been answered. Raises FolderError where it was answered by, or asked, something else."""
    how = {}
    if golden is None:
        how = {"top": sending.top, "max_tokens": sending.max_tokens, "arrive": list(sending.arrive),
               "concurrency": sending.concurrency}  # fmt: skip
    about = passes.begun(out, lines, how, None if golden is None else passes.digest(golden))
    if about is not None and about.get("side") not in (None, of.digest) and of.kind == COMMAND:
        raise replies.FolderError(f"{out} is of another command: name another --out")
    return about is not None and bool(about.get("complete"))


def _sent(
    what: str, of: ServerSide, server: tuple[str, str], out: Path, sending: SendSettings, golden: Sent | None,
    lines: list[PromptLine], digest: str | None, progress: Progress,
) -> None:  # fmt: skip
    """server: (url, key)."""
    settings = {} if golden is None else golden.about.get("settings", {})
    words = [w for w in settings.get("arrive", sending.arrive) if w != passes.SCORE]
    arrivals = [parse(word) for word in words]
    top = settings.get("top", sending.top)
    with waiting(lambda: f"{what}: asking what the server can", sending.say):
        sender, about = replace(sending, top=top).sender(*server).introduced()
        if golden is not None:
            passes.check_vocabulary(sender, golden)
        plan = passes.planned(sender, digest, len(arrivals), sending.score, replies.begun(out))
    concurrency = int(settings.get("concurrency", sending.concurrency))
    with progress(what, len(lines) * (len(arrivals) + plan.score)) as tell:
        made = passes.made_by(sending.prompts) | {"side": of.digest}
        chats = rendering.chats(lines) if golden is None else rendering.sent_chats(golden.path)
        done = passes.send(sender, about, lines, arrivals, concurrency, out, made, tell, plan, chats=chats)
    if done.unrendered:
        sending.say(f"{what}: {done.unrendered}")
    if not done.answered:
        raise NotComparable(f"{what}: no prompt was answered: {passes.refusals(done.reasons)} ({out})")
    if done.refused:
        sending.say(f"{what} refused {passes.refusals(done.reasons)}")
