"""``accprobe online serve`` and ``send``: calls are checked on one machine while another one computes them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli.common.declared import OPS, RANK
from vllm_accprobe.cli.common.json_answer import answer, answering
from vllm_accprobe.cli.common.options import Command, CommandError, NothingThere, ranges, require_directory, say_notes
from vllm_accprobe.cli.interrupts import kept

if TYPE_CHECKING:
    from vllm_accprobe.online.keys import Keys

online = typer.Typer(help="Check calls on one machine while another one computes them.", rich_markup_mode=None)
_PORT = 59208
HOST = typer.Option("127.0.0.1", "--host", help="The receiver's name or address; its certificate is held against it.")
PORT = typer.Option(
    _PORT,
    "--port",
    min=0,
    max=65535,
    metavar="N",
    help="A server's port: the receiver's; serve takes 0 for any that is free.",
)
TLS = typer.Option(
    None, "--tls", metavar="DIR", help="Certificates: ca.crt, and server.crt, .key or client.crt, .key. None: loopback."
)
SHARED = typer.Option(None, "--shared", metavar="DIR", help="A folder that both machines see, in place of a line.")
CONFIG = typer.Option(None, "--config", metavar="FILE", help="msprobe's config.json, in place of these options.")
_LEAST = 1 << 16


@online.command(cls=Command, short_help="Receive calls on the golden's machine, and check them as they come")
@answering
def serve(
    host: str = HOST,
    port: int = PORT,
    tls: Path = TLS,
    shared: Path = SHARED,
    config: Path = CONFIG,
    ranks: str = RANK,
    ops: list[str] = OPS,
    weights: Path = typer.Option(None, "--weights", metavar="DIR", help="The model's directory; on this machine."),
    standard: str = typer.Option("operator", "--standard", metavar="NAME", help="The limits, as for opcheck."),
    against: str = typer.Option(
        "float64", "--against", metavar="WHAT", help="float64, device (this machine's accelerator), or a golden dump."
    ),
    processes: int = typer.Option(
        1, "-j", "--jobs", min=0, metavar="N", help="Processes that work, where all is gone over."
    ),
    max_gb: float = typer.Option(20.0, "--max-gb", min=0.001, metavar="GB", help="Disk budget per rank."),
    ahead: float = typer.Option(
        4.0, "--ahead-gb", min=0.001, metavar="GB", help="What may lie unchecked; then senders wait."
    ),
    wait: float = typer.Option(0.0, "--wait", metavar="S", help="End where nothing came for so long; 0: never."),
    out: Path = typer.Option(
        Path("accprobe-online"), "--out", "-o", metavar="DIR", help="Where the results go, and the calls."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: all modules that fail."),
) -> None:
    """Receive calls and check them as they come, on the golden's machine; then report as opcheck does.

    Ends when all ranks have ended, or at Ctrl-C with what is there. Killed and started again with the same --out, it
    goes on. Exit code 0: pass, 1: an operator is wrong, 2: it cannot be done, 3: nothing came, or could be checked.
    """
    from vllm_accprobe.cli.common.checked_report import conclude
    from vllm_accprobe.cli.opcheck import check_out, require_torch
    from vllm_accprobe.online.keys import RECEIVES, Endpoint, read_keys

    require_torch("online serve")
    keys: Keys | None = read_keys(config, RECEIVES) if config is not None else None
    endpoint = keys.endpoint if keys else Endpoint(host, port, shared, tls)
    say_notes(keys.notes if keys else ())
    kept.going_on("what came is", out)
    wanted = _ranks(ranks) or (keys.ranks if keys else None)
    globs = tuple(ops) or (keys.ops if keys else ())
    require_directory(weights, "--weights")
    require_directory(endpoint.tls, "--tls")
    check_out(out, None, [])
    from vllm_accprobe.online.serving import Serving
    from vllm_accprobe.opcheck.run.unavailable import Unavailable
    from vllm_accprobe.opcheck.run.whole import RunError

    job = _job(out, weights, globs, standard, against)
    serving = Serving(job, endpoint, out, wanted, budget=int(max_gb * 1e9), ahead=int(ahead * 1e9), say=typer.echo)
    try:
        serving.wait(wait)
        found = serving.finish(processes)
    except (RunError, Unavailable) as why:
        raise CommandError(str(why)) from None
    finally:
        serving.close()
    if found is None:
        raise NothingThere(f"{out}: no rank sent anything that was taken")
    conclude(found, Path(job.dump), job, out, standard, bool(globs), verbose)


@online.command(cls=Command, short_help="Send a dump's calls to the machine that checks them")
@answering
def send(
    dump: Path = typer.Argument(..., metavar="DUMP", help="Directory of a dump, also while it is written."),
    host: str = HOST,
    port: int = PORT,
    tls: Path = TLS,
    shared: Path = SHARED,
    config: Path = CONFIG,
    ranks: str = RANK,
    follow: bool = typer.Option(False, "--follow", help="Go on until the capture ends; DUMP may not be there yet."),
    patience: float = typer.Option(
        120.0, "--patience", min=0.0, metavar="S", help="How long to try where the receiver does not answer."
    ),
) -> None:
    """Send a dump's calls to the machine where `accprobe online serve` checks them.

    It reads what is on the disk, in a process of its own: nothing is opened inside the server that is captured. A line
    that breaks is made again and goes on behind what arrived.
    Exit code 0: all is there, 2: it cannot be sent, or is refused.
    """
    from vllm_accprobe.online.keys import SENDS, Endpoint, read_keys
    from vllm_accprobe.online.sending import send_dump

    keys: Keys | None = read_keys(config, SENDS) if config is not None else None
    endpoint = keys.endpoint if keys else Endpoint(host, port, shared, tls)
    if keys is not None and tls is not None:  # msprobe's sending side has no such key
        endpoint = Endpoint(endpoint.host, endpoint.port, endpoint.shared, tls)
    say_notes(keys.notes if keys else ())
    if endpoint.port == 0 and endpoint.shared is None:
        raise CommandError("--port: name the receiver's port")
    require_directory(endpoint.tls, "--tls")
    if not follow and not dump.is_dir():
        raise CommandError(f"{dump} does not exist: name a dump's directory, or --follow one that is to come")
    wanted = _ranks(ranks) or (keys.ranks if keys else None)
    say_err = functools.partial(typer.echo, err=True)
    kept.going_on("what arrived is", None)
    said = send_dump(dump, endpoint, wanted, follow=follow, patience=patience, say=say_err)
    typer.echo(said)
    answer(dump=dump, receiver=endpoint.shared or f"{endpoint.host}:{endpoint.port}", said=said)


def _ranks(text: str) -> tuple[int, ...] | None:
    found = ranges(text, "--ranks")
    if any(high >= _LEAST for _, high in found):
        raise CommandError(f"--ranks: there are fewer than {_LEAST:,} ranks")
    return tuple(sorted({r for low, high in found for r in range(low, high + 1)})) or None


def _job(out: Path, weights: Path | None, ops: tuple[str, ...], standard: str, against: str) -> Any:
    from vllm_accprobe.online.serving import RECEIVED
    from vllm_accprobe.opcheck.run.worker import DEVICE, EXACT, GOLDEN, Job
    from vllm_accprobe.standards import OUTPUT, UnknownStandard, find

    try:
        find(standard, OUTPUT)
    except UnknownStandard as why:
        raise CommandError(f"--standard: {why}") from None
    golden = ""
    if against not in (EXACT, DEVICE):
        if not Path(against).is_dir():
            raise CommandError(f"--against: {against!r} is neither float64 nor device nor a dump's directory")
        golden = str(Path(against).resolve())
    way = GOLDEN if golden else DEVICE if against == DEVICE else EXACT
    model = str(weights.resolve()) if weights else ""
    return Job(str((out / RECEIVED).resolve()), model, ops, (), way, golden, standard)
