"""What a newcomer meets: README and tutorial typed on a fresh machine, each command with time, exit code and output.

    python3 scripts/newcomer.py WHERE [--only PART] [--skip WORDS]

The problem: a page is written on a machine where everything is installed. The idea: a new home, no variables, a clone
of the committed checkout, and one shell into which every command is typed as tests/support/documents.py finds it on the
page, in the order of PARTS. A, B, MODEL and the prompts, which a page leaves to the reader, are tiny models and the
examples; a server that runs until Ctrl-C gets two requests and Ctrl-C. WHERE/log.txt has all output, WHERE/table.md a
line per command. Ends 1 where an exit code is not the page's. Needs Python 3.11 and pip's index; 20 minutes.
Not here: the other pages (tests/e2e/test_documents.py), the text of the output (tests/e2e/test_tutorial.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.documents import COMMAND, snippets  # noqa: E402

DROPPED = """
import sys; sys.path += ["{tests}/gate"]
from pathlib import Path
from made_evaluations import right, write_samples
write_samples(Path("golden.jsonl"), right(1319, range(396)))
write_samples(Path("mine.jsonl"), right(1319, [*range(39, 396), *range(396, 488)]))
"""
WRONG_WEIGHT = """
import shutil, torch
from safetensors.torch import load_file, save_file
shutil.copytree("A", "B")
weights = load_file("B/model.safetensors")
weights["model.layers.2.self_attn.o_proj.weight"] *= 1.3
save_file(weights, "B/model.safetensors", {"format": "pt"})
"""
PROMPTS = """
import json
lines = [json.dumps({"id": f"my-{i}", "prompt": p.strip()}) + "\\n" for i, p in enumerate(open("prompts.txt"), 1)]
open("prompts.jsonl", "w").writelines(lines)
open("few.jsonl", "w").writelines(lines[:3])
"""
PLANT = "export PYTHONPATH={root}/lab/planted VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1; "
PLACE = (
    "rm -rf {where}/{place} && mkdir {where}/{place} && cd {where}/{place} && cp -r {root}/model MODEL && "
    "cp {root}/examples/prompts.txt ."
)
REQUEST = '{"model": "MODEL", "prompt": "Which operator was the first to differ?", "max_tokens": 8, "temperature": 0}'


@dataclass(frozen=True)
class Part:
    """A stretch of a page: its headings' first words, and what is there before its first line is typed."""

    name: str
    page: str
    heading: str
    ready: tuple[str, ...] = ()


PARTS = (
    Part("install", "README.md", "## Install", ("cd {where}", "python3.11 -m venv small && source small/bin/activate")),
    Part("tutorial", "docs/tutorial.md", "## Two servers", ("cd {root} && git clean -qfdx -e .venv -e demo-out",)),
    Part("readme", "README.md", "## Start here", (
        "cd {root} && source .venv/bin/activate && " + PLANT + PLACE.replace("{place}", "readme"), "cp -r MODEL A",
        f"python -c {shlex.quote(WRONG_WEIGHT)}", f"python -c {shlex.quote(DROPPED)}",
    )),
    Part("dropped", "docs/tutorial.md", "## A benchmark", (
        "cd {root} && source .venv/bin/activate && " + PLANT + PLACE.replace("{place}", "dropped"),
        f"python -c {shlex.quote(DROPPED)}", "cp -r MODEL A && cp -r MODEL B",
    )),
    Part("machines", "docs/tutorial.md", "## Golden on a GPU", (
        "cd {root} && source .venv/bin/activate && " + PLANT + PLACE.replace("{place}", "machines"),
        f"python -c {shlex.quote(PROMPTS)}",
    )),
)  # fmt: skip
BEFORE = {
    ("readme", "accprobe eval-diff"): (
        "ACCPROBE_FAULT={fault} VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=mine vllm serve MODEL",
    ),
    ("readme", "accprobe golden check"): ("accprobe golden make MODEL --out MODEL_vllm-0.32.golden",),
    ("readme", "accprobe gate golden-sent"): (
        'accprobe send prompts.txt --engine "vllm serve A" --out golden-sent',
        'accprobe send --teacher-force golden-sent --engine "vllm serve B" --out mine-sent',
    ),
}
"""What the page's text takes for done before a line."""
ONCE = ("pip install .", "bash scripts/demo.sh", "accprobe doctor")
"""Typed in the first part that has them."""
FAULTY = re.compile(r"--out mine-\w+$|^VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=mine ")
"""On the second machine, where a fault is planted."""
FAULT = """'{"kind": "scale", "module": "model.layers.2.self_attn.o_proj", "factor": 1.3}'"""
"""In all rows: a condition on them is false while vLLM traces what it compiles, and stays false."""
DIFFERS = ("gate", "compare", "opcheck", "eval-diff")
"""Commands that end with 1 in these parts, since a fault is there to be found."""
ENDS: dict[str, tuple[int, ...]] = {
    "accprobe bisect -- vllm serve MODEL": (0, 1),  # compiled and eager kernels round alike on some processors only
    "(cd accprobe-gentest && python -m pytest -q)": (1,),  # "the test fails, as it should"
    "accprobe opcheck mine --ops RMSNorm": (0,),  # not where the fault is
    'accprobe gate "vllm serve A" "vllm serve B" --prompts flipped.jsonl --out OUT --localize': (0,),  # "if it passes"
}
_SERVES = re.compile(r"([A-Z_]+=(\S+|'[^']*') )*vllm serve |accprobe errcheck -- vllm serve ")
PORT = 8000
"""vllm serve's own."""
_MARK, _USED = "=-=-= typed =-=-=", "=-=-= used =-=-="


class Shell:
    """One bash with a new home and no variables; both its streams go to the log."""

    def __init__(self, where: Path) -> None:
        (where / "home").mkdir(parents=True, exist_ok=True)
        self.log = where / "log.txt"
        keep = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k.lower().endswith("_proxy")}
        env = keep | {"HOME": str(where / "home"), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        self._process = subprocess.Popen(["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, env=env, encoding="utf-8", errors="replace",
                                         bufsize=1)  # fmt: skip
        self.type(f"set -m; TIMEFORMAT=$'\\n{_USED} %U %S'", quiet=True)

    def type(self, line: str, *, quiet: bool = False) -> tuple[int, float, float]:
        """Its exit code, seconds, and CPU seconds of it and all that it waited for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begin = time.monotonic()
        self._process.stdin.write(f"time {{ {line}\n}} </dev/null\nprintf '\\n%s %d\\n' '{_MARK}' $?\n")
        used = 0.0
        with self.log.open("a", encoding="utf-8") as log:
            if not quiet:
                log.write(f"\n$ {line}\n")
            for out in self._process.stdout:
                if out.startswith(_USED):
                    used = sum(map(float, out.split()[-2:]))
                elif out.startswith(_MARK):
                    code, took = int(out.split()[-1]), time.monotonic() - begin
                    if not quiet:
                        log.write(f"[exit code {code}, {took:.1f} s, {used:.1f} s of CPU]\n")
                        log.flush()
                    return code, took, used
                else:
                    log.write(out)
        raise SystemExit("the shell ended")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def served(line: str) -> str:
    """``line`` in the background until it answers, two requests, Ctrl-C."""
    curl = f"curl -s --noproxy '*' localhost:{PORT}"
    ask = f"{curl}/v1/completions -o /dev/null -H 'Content-Type: application/json' -d {shlex.quote(REQUEST)}"
    wait = f"for i in $(seq 600); do {curl}/health -f && break; kill -0 %% || break; sleep 1; done"
    return f"{line} &\n{wait}; {ask}; {ask}; kill -INT %%; wait %%"


def lines(part: Part) -> list[str]:
    """The commands between the part's heading and the next one of its rank."""
    text = (ROOT / part.page).read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(text, 1) if line.startswith(part.heading))
    others = {p.heading for p in PARTS if p.page == part.page}
    after = [i for i, line in enumerate(text, 1) if i > begin and any(line.startswith(h) for h in others)]
    end = min(after, default=len(text) + 1)
    return [s.text for s in snippets(part.page) if s.kind == COMMAND and begin < s.line < end]


def expected(line: str) -> tuple[int, ...]:
    word = re.search(r"\baccprobe ([\w-]+)", line)
    return ENDS.get(line, (int(bool(word and word[1] in DIFFERS)),))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", type=Path, help="a new folder; with --only, that of an earlier run")
    parser.add_argument("--only", action="append", choices=[p.name for p in PARTS])
    parser.add_argument("--skip", action="append", default=[], help="commands with these words, e.g. bisect")
    arguments = parser.parse_args()
    where = arguments.where.resolve()
    where.mkdir(parents=True, exist_ok=True)
    if not arguments.only and any(where.iterdir()):
        parser.error(f"{where} is not empty: name a new folder, or parts with --only")
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            port.bind(("127.0.0.1", PORT))
        except OSError:
            parser.error(f"port {PORT} is taken, and the README's own `vllm serve` needs it")
    names = {"where": shlex.quote(str(where)), "root": shlex.quote(str(where / "accprobe")), "fault": FAULT,
             "tests": str(ROOT / "tests")}  # fmt: skip
    wrong = 0
    with (where / "table.md").open("a", encoding="utf-8") as table:
        table.write("| part | command | s | CPU s | load | exit code |\n| --- | --- | --- | --- | --- | --- |\n")
        for part in PARTS:
            if arguments.only and part.name not in arguments.only:
                continue
            before = PARTS[: PARTS.index(part)]
            done = {line for earlier in before for line in lines(earlier) if line in ONCE}
            shell = Shell(where)
            for line in part.ready:
                if shell.type(_filled(line, names))[0]:
                    raise SystemExit(f"could not prepare {part.name}: {line}; see {shell.log}")
            for line in lines(part):
                if line in done or any(words in line for words in arguments.skip):
                    continue
                done.add(line)
                prepared = [b for (name, begin), b in BEFORE.items() if name == part.name and line.startswith(begin)]
                for earlier in (b for some in prepared for b in some):
                    earlier = _filled(earlier, names)
                    shell.type(served(earlier) if _SERVES.match(earlier) else earlier)
                typed = line.replace("REPOSITORY", shlex.quote(str(ROOT)))
                if part.name == "machines" and FAULTY.search(line):
                    typed = f"VLLM_DISABLE_COMPILE_CACHE=1 ACCPROBE_FAULT={FAULT} {typed}"  # nobody else loads it
                load = os.getloadavg()[0]
                code, took, used = shell.type(served(typed) if _SERVES.match(line) else typed)
                good = code in expected(line)
                wrong += not good
                shown = line.replace("|", "\\|")
                end = f"{code}" if good else f"{code}, not {' or '.join(map(str, expected(line)))}"
                row = f"| {part.name} | `{shown}` | {took:.1f} | {used:.1f} | {load:.0f} | {end} |"
                table.write(row + "\n")
                table.flush()
                print(row, flush=True)
            shell.close()
    return int(wrong > 0)


def _filled(line: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        line = line.replace("{" + name + "}", value)
    return line


if __name__ == "__main__":
    sys.exit(main())
