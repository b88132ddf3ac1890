"""Runs `accprobe` on each case in a process of its own that is forked from one which has imported it already, and says
what it did: exit code, what it printed, seconds, peak memory, and every file that Python opened, wrote or ran.

Reads cases from stdin, a JSON list of argument lists; writes a JSON list of results to stdout."""

import contextlib
import json
import os
import resource
import sys
import tempfile
import time

SECONDS = 20


def child(arguments: list[str], out: int, err: int, seen: int) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    os.dup2(out, 1)
    os.dup2(err, 2)

    def hook(event: str, details: tuple[object, ...]) -> None:
        if event == "open" and isinstance(details[0], (str, bytes)):
            os.write(seen, (os.fsdecode(details[0]) + "\n").encode("utf-8", "surrogateescape"))
        elif event in (
            "subprocess.Popen",
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "socket.connect",
        ):
            os.write(seen, f"!{event} {details!r}\n".encode())

    sys.addaudithook(hook)
    from vllm_accprobe.cli import main

    sys.argv = ["accprobe", *arguments]
    return int(main() or 0)


def run(arguments: list[str]) -> dict[str, object]:
    files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = child(arguments, *(f.fileno() for f in files))
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - started
    texts = []
    for f in files:
        f.seek(0)
        texts.append(f.read().decode("utf-8", "replace"))
        f.close()
    return {
        "code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1], "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime, "mb": usage.ru_maxrss / 1024,
        "opened": sorted({line for line in texts[2].splitlines() if line}),
    }  # fmt: skip


if __name__ == "__main__":
    import h5py  # noqa: F401
    import numpy  # noqa: F401
    import pandas  # noqa: F401

    import vllm_accprobe.cli
    import vllm_accprobe.comparison.engine

    with contextlib.redirect_stdout(None):
        vllm_accprobe.cli.main(["--version"])  # imports what every command does
    print(json.dumps([run(case) for case in json.load(sys.stdin)]))
