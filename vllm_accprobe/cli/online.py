"""``accprobe online serve`` and ``send``: calls are checked on one machine while another one computes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.opcheck import against, check_out, check_standard, conclude, require_torch
from vllm_accprobe.cli.options import Command, argument, option, ranges
from vllm_accprobe.cli.output import answer, say_notes
from vllm_accprobe.cli.output_paths import require_directory
from vllm_accprobe.refusals import CommandError, NothingThere

if TYPE_CHECKING:
    from vllm_accprobe.online.keys import Endpoint, Keys

online = typer.Typer(help="Check calls on one machine while another one computes them.", rich_markup_mode=None)
_PORT = 59208
_LEAST = 1 << 16


@dataclass(frozen=True)
class LineOptions:
    """How the two machines reach each other, and of which ranks."""

    host: str = option("--host", "127.0.0.1", "The receiver's name or address, which its certificate must have.")
    port: int = option("--port", _PORT, "A server's port: the receiver's; serve takes 0 for any that is free.", min=0,
                       max=65535, metavar="N")  # fmt: skip
    tls: Path | None = option("--tls", None, "Certificates: ca.crt, and server.crt, .key or client.crt, .key. None: "
                              "loopback.", metavar="DIR")  # fmt: skip
    shared: Path | None = option("--shared", None, "A folder that both machines see, in place of a connection.",
                                 metavar="DIR")  # fmt: skip
    config: Path | None = option("--config", None, "msprobe's config.json, in place of these options.", metavar="FILE")
    ranks: str | None = options.ranks()

    def endpoint(self, keys: Keys | None) -> Endpoint:
        from vllm_accprobe.online.keys import Endpoint

        return keys.endpoint if keys else Endpoint(self.host, self.port, self.shared, self.tls)


def serve(
    *,
    line: LineOptions,
    ops: list[str] = options.ops(),
    weights: Path | None = options.weights(),
    standard: str | None = option("--standard", None, "The limits, as for opcheck; with --config msprobe's.",
                                  metavar="NAME"),
    reference: str = options.against(),
    jobs: int = options.jobs(),
    max_gb: float = option("--max-gb", 20.0, "Disk budget per rank.", min=0.001, metavar="GB"),
    ahead: float = option("--ahead-gb", 4.0, "How much may be unchecked; then senders wait.", min=0.001, metavar="GB"),
    wait: float = option("--wait", 0.0, "End after this time without data; 0: never.", metavar="S"),
    out: Path = options.out("and the calls", Path("accprobe-online")),
    verbose: bool = options.verbose(),
) -> None:  # fmt: skip
    """Receive calls and check them as they come, on the golden's machine; then report as opcheck does.

    Ends when all ranks have ended, or at Ctrl-C with what has arrived. Started again with the same --out, it
    continues. Exit code 0: pass, 1: an operator is wrong, 2: it cannot be done, 3: nothing arrived or could be checked.
    """
    from vllm_accprobe.online.keys import RECEIVES, read_keys

    require_torch("online serve")
    keys = read_keys(line.config, RECEIVES) if line.config is not None else None
    endpoint = line.endpoint(keys)
    say_notes(keys.notes if keys else ())
    going_on("what came is", out)
    selected = _ranks(line.ranks or "") or (keys.ranks if keys else None)
    globs = tuple(ops) or (keys.ops if keys else ())
    require_directory(weights, "--weights")
    require_directory(endpoint.tls, "--tls")
    check_out(out, None, [])
    from vllm_accprobe.online.serving import RECEIVED, Serving
    from vllm_accprobe.opcheck.compat.msprobe import write_by_rank
    from vllm_accprobe.opcheck.run.job import Job

    standard = standard or ("operator" if keys is None else "msprobe")
    check_standard(standard)
    way, golden = against(reference, None)
    model = str(weights.resolve()) if weights else ""
    job = Job(str((out / RECEIVED).resolve()), model, globs, (), way, golden, standard)
    serving = Serving(job, endpoint, out, selected, budget=int(max_gb * 1e9),
                      ahead=int(ahead * 1e9), say=typer.echo)  # fmt: skip
    try:
        serving.wait(wait)
        found = serving.finish(jobs)
    finally:
        serving.close()
    if found is None:
        raise NothingThere(f"{out}: no rank sent anything that was taken")
    conclude(found, Path(job.dump), job, out, standard, bool(globs), verbose,
             lambda out: write_by_rank(out, job.dump) if keys is not None else [])  # fmt: skip


def send(
    *,
    dump: Path | None = argument("[DUMP]", "Directory of a dump, also while it is written; by default dump_path of "
                                 "--config.", None),
    follow: bool = option("--follow", False, "Continue until the capture ends; DUMP may not exist yet."),
    patience: float = option("--patience", 120.0, "How long to try where the receiver does not answer.", min=0.0,
                             metavar="S"),
    line: LineOptions,
) -> None:  # fmt: skip
    """Send a dump's calls to the machine where `accprobe online serve` checks them.

    Reads what is on the disk, in a process of its own. A broken connection is opened again and continues after what
    arrived.
    Exit code 0: all is there, 2: it cannot be sent, or is refused.
    """
    from vllm_accprobe.online.keys import SENDS, Endpoint, read_keys
    from vllm_accprobe.online.sending import send_dump

    keys = read_keys(line.config, SENDS) if line.config is not None else None
    endpoint, dump = line.endpoint(keys), dump or (keys.dump if keys else None)
    if dump is None:
        raise CommandError("DUMP is missing: name a dump's directory, or dump_path in the file of --config")
    if keys is not None and line.tls is not None:  # msprobe's sending side has no such key
        endpoint = Endpoint(endpoint.host, endpoint.port, endpoint.shared, line.tls)
    say_notes(keys.notes if keys else ())
    if endpoint.port == 0 and endpoint.shared is None:
        raise CommandError("--port: name the receiver's port")
    require_directory(endpoint.tls, "--tls")
    if not follow and not dump.is_dir():
        raise CommandError(f"{dump} does not exist: name a dump's directory, or --follow one that is to come")
    selected = _ranks(line.ranks or "") or (keys.ranks if keys else None)
    going_on("what arrived is", None)
    done = send_dump(dump, endpoint, selected, follow=follow, patience=patience,
                     say=lambda text: typer.echo(text, err=True))  # fmt: skip
    typer.echo(done)
    answer(dump=dump, receiver=endpoint.shared or f"{endpoint.host}:{endpoint.port}", said=done)


def _ranks(text: str) -> tuple[int, ...] | None:
    found = ranges(text, "--ranks")
    if any(high >= _LEAST for _, high in found):
        raise CommandError(f"--ranks: there are fewer than {_LEAST:,} ranks")
    return tuple(sorted({r for low, high in found for r in range(low, high + 1)})) or None


for _function, _short in ((serve, "Receive calls on the golden's machine, and check them as they come"),
                          (send, "Send a dump's calls to the machine that checks them")):  # fmt: skip
    online.command(cls=Command, short_help=_short)(options.expanded(_function, f"online {_function.__name__}"))
