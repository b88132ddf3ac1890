"""A table, commands x kinds of trouble, generated from data: one line, the right exit code, nothing lost.

How it is read: a row is a command, a column a kind; each cell is one test, named [command-kind]. READ: what a command
reads is missing (nowhere), empty, foreign, damaged, cut off (`WORKS`, cut.golden) or locked; NO_FAULT has the cells
that are none. WRITE: the disk is full, the folder is locked, Ctrl-C comes before a file is in place; and a pipe that
closes, another locale or a narrow terminal, which change neither exit code nor files. PLACES: commands that start
something, which refuse a locked place before they do. All in this process: root loses its power over permissions for a
moment, a full disk is RLIMIT_FSIZE, a terminal is a stream. Not here: processes that are killed
(test_killed_commands.py, test_endings.py), in a locale of their own (test_bad_inputs.py), on a real terminal
(test_output.py)."""

import contextlib
import io
import json
import os
import re
import resource
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cli.cli_dumps import make
from dump.dumps import put_event
from made_folders import folder
from support.peer_dumps import unpack
from support.permissions import permissions_count
from synthetic_model import capture, scaled, write

from vllm_accprobe import labels, set_label, set_task_id
from vllm_accprobe.cli import main
from vllm_accprobe.dump.writer import RankWriter, write_run_json

DOWN = "model.layers.1.mlp.down_proj"
READ = {
    "summary": ["inspect", "@"],
    "show": ["inspect", "@", "lm_head"],
    "labels": ["labels", "@", "--out", "OUT"],
    "convert": ["convert", "@", "OUT.npz"],
    "formats": ["inspect", "--formats", "@"],
    "repair": ["inspect", "--repair", "@"],
    "gentest": ["gentest", "@", "--ops", "SiluAndMul", "--out", "OUT"],
    "opcheck": ["opcheck", "@", "--ops", "SiluAndMul", "--out", "OUT", "-j", "0"],
    "compare": ["compare", "@", "mine", "--no-replay", "--out", "OUT"],
    "compare, mine": ["compare", "golden", "@", "--no-replay", "--out", "OUT"],
    "compare, floor": ["compare", "golden", "mine", "--no-replay", "--floor", "@", "--out", "OUT"],
    "plan": ["compare", "golden", "@", "--plan"],
    "calibrate": ["compare", "golden", "@", "--calibrate", "OUT"],
    "calibrate, golden": ["compare", "@", "golden", "--calibrate", "OUT"],
    "rejudge": ["compare", "--rejudge", "@"],
    "errcheck": ["errcheck", "--read", "@"],
    "opdiff": ["opdiff", "@", "@", "--out", "OUT"],
    "patches": ["patches", "check", "--source", "@"],
    "gate": ["gate", "@", "golden"],
    "gate, mine": ["gate", "--samples", "@", "golden"],
    "pack": ["golden", "pack", "@", "--out", "OUT.golden"],
    "verify": ["golden", "verify", "@"],
    "history": ["golden", "history", "@"],
    "check": ["golden", "check", "@", "--", "vllm", "serve", "MODEL"],
    "make, prompts": ["golden", "make", "MODEL", "--prompts", "@", "--out", "OUT.golden"],
    "stream": ["golden", "stream", "@", "--out", "OUT"],
    "stream, prompts": ["golden", "stream", "MODEL", "--prompts", "@", "--out", "OUT"],
    "self-check": ["self-check", "--prompts", "@", "--out", "OUT", "--", "vllm", "serve", "MODEL"],
    "bisect": ["bisect", "--golden", "@", "--out", "OUT", "--", "vllm", "serve", "MODEL"],
    "send": ["send", "@", "--engine", "vllm serve MODEL", "--out", "OUT"],
    "eval-diff": ["eval-diff", "@", "a.jsonl"],
    "eval-diff, mine": ["eval-diff", "a.jsonl", "@"],
    "compare, mapping": ["compare", "golden", "mine", "--op-mapping-file", "@", "--no-replay", "--out", "OUT"],
    "compare, tokenizer": ["compare", "golden", "mine", "--tokenizer", "@", "--no-replay", "--out", "OUT"],
    "opcheck, against": ["opcheck", "golden", "--against", "@", "--out", "OUT", "-j", "0"],
    "opcheck, api_info": ["opcheck", "-api_info", "@", "-o", "OUT", "-j", "0"],
    "opcheck, load": ["opcheck", "--op", "mul", "--shape", "2x3,2x3", "--load", "@", "-j", "0"],
    "size": ["inspect", "@", "--size"],
    "pack, prompts": ["golden", "pack", "golden", "--prompts", "@", "--out", "OUT.golden"],
    "gate, prompts": ["gate", "vllm serve MODEL", "vllm serve MODEL", "--prompts", "@", "--out", "OUT"],
    "gate, floor": ["gate", "vllm serve MODEL", "vllm serve MODEL", "--floor", "@", "--out", "OUT"],
    "bisect, prompts": ["bisect", "--prompts", "@", "--out", "OUT", "--", "vllm", "serve", "MODEL"],
    "send, forced": ["send", "--teacher-force", "@", "--engine", "vllm serve MODEL", "--out", "OUT"],
    "doctor, dump": ["doctor", "--dump", "@"],
    "doctor, wheel": ["doctor", "--wheel", "@"],
    "online": ["online", "send", "@", "--port", "1", "--patience", "1"],
    "online, config": ["online", "send", "golden", "--config", "@"],
    "online, tls": ["online", "send", "golden", "--tls", "@", "--port", "1", "--patience", "1"],
    "serve, config": ["online", "serve", "--config", "@", "--out", "OUT"],
    "serve, tls": ["online", "serve", "--tls", "@", "--port", "0", "--wait", "1", "--out", "OUT"],
    "arm": ["arm", "@"],
    "run, config": ["run", "--config", "@", "--dir", "OUT", "--", "true"],
    "patches, file": ["patches", "list", "@/x.toml"],
    "gentest, kernel": ["gentest", "calls", "--ops", "*", "--kernel", "@.py:f", "--out", "OUT"],
    "bisect, switches": ["bisect", "--switches", "@", "--out", "OUT", "--", "vllm", "serve", "MODEL"],
    "bisect, floor": ["bisect", "--floor", "@", "--out", "OUT", "--", "vllm", "serve", "MODEL"],
    "doctor, prompts": ["doctor", "--graphs", "--prompts", "@", "--out", "OUT", "--", "vllm", "serve", "MODEL"],
}
TEXTS = ("make, prompts", "stream, prompts", "self-check", "send", "pack, prompts", "gate, prompts", "bisect, prompts",
         "doctor, prompts")  # fmt: skip
"""Commands that take a text, a prompt on each line."""
NO_FAULT = {
    "formats": ("deep", "locked-files"),  # decided by the names of files; nobody has read them then
    "arm": ("empty", "deep"),  # where a server may capture
    "run, config": ("zero.csv",),  # a TOML file without settings
    **dict.fromkeys(TEXTS, ("text.txt",)),
}
REFUSED = ("nowhere", "empty", "zero.csv", "text.txt", "bad.json", "two", "deep", "locked", "locked-files")
WORKS = ("cut", "killed")
"""Dumps of a run that was killed, and with a segment that was cut off: the exit code is that of the whole dump."""
OTHER_KIND = {
    "labels": ["plain", "stats", "params", "x.npy", "a_msprobe_stat/golden"],
    "convert": ["stats", "a_msprobe_stat/golden"],
    "gentest": ["params", "x.npy"],
    "opcheck": ["stats", "params", "x.npy"],
    "compare": ["stats", "params", "x.npy", "a_msprobe_tensor/golden", "plain"],
    "compare, mine": ["stats", "params", "x.npy", "a_msprobe_stat/golden"],
    "calibrate": ["stats", "params", "x.npy", "a_msprobe_tensor/golden"],
    "show": ["stats", "x.npy"],
    "repair": ["x.npy", "a_msprobe_tensor/golden"],
    "errcheck": ["golden", "x.npy"],
    "rejudge": ["golden", "x.npy"],
    "opdiff": ["golden", "x.npy"],
    "patches": ["golden", "x.npy"],
    "check": ["cut.golden"],
    "verify": ["cut.golden"],
}
"""A dump that can be read, and in which there is nothing for the command."""
HEADER = "op,class,tap,call,role,step,rank,dtype,shape,max_abs_err,ulp_share,ulp_mean,ulp_max\n"
ROW = "matmul,Tensor.matmul,a,{},output.0,0,0,float32,[2],0.0,0.0,0.0,0.0\n"
ONE = "inspect plain model.embed_tokens --role output.0 --step 0 --save OUT/"
WRITE = {
    "compare": ("compare plain plain2 --no-replay --out OUT", 400, "PASS"),
    "compare --json": ("compare plain plain2 --no-replay --json --out OUT", 400, '"verdict": "pass"'),
    "compare, measured.npz": ("compare plain plain2 --no-replay --out OUT", 90_000, "PASS"),
    "tables": ("compare 1.csv 2.csv --out OUT", 400, "pass"),
    "tables --json": ("compare 1.csv 2.csv --json --out OUT", 400, '"exit_code": 2'),
    "calibrate": ("compare plain plain2 --calibrate OUT", 10, ""),
    "inspect --csv": ("inspect plain --csv OUT/x.csv", 400, ""),
    "inspect FILE": ("inspect plain OUT/x.txt", 400, ""),
    "inspect --save npy": (ONE + "x.npy", 40, ""),
    "inspect --save": (ONE + "x.safetensors", 40, ""),
    "convert h5": ("convert plain OUT/x.h5", 400, ""),
    "convert npz": ("convert plain OUT/x.npz", 400, ""),
    "convert safetensors": ("convert plain OUT/x.safetensors", 400, ""),
    "opcheck": ("opcheck calls -j 0 --out OUT", 1000, "1 of 1"),
    "opcheck, at once": ("opcheck calls -j 0 --out OUT", 100, ""),
    "gentest": ("gentest calls --ops * --out OUT/new", 400, ""),
    "eval-diff": ("eval-diff a.jsonl b.jsonl --csv OUT/x.csv", 100, "PASS"),
    "pack": ("golden pack golden --out OUT/x.golden", 400, ""),
    "rejudge": ("compare --rejudge report --out OUT", 400, "PASS"),
    "labels": ("labels labels --out OUT", 10, ""),
    "repair": ("inspect --repair OUT", 0, ""),
    "verify --index": ("golden verify OUT --index", 10, "PASS"),
    "gate": ("gate sent1 sent2 --out OUT", 400, "no verdict"),
    "arm": ("arm OUT --tokens 3", 10, ""),
    "verify": ("golden verify packs/a.golden", 0, ""),
    "history": ("golden history packs", 0, ""),
    "inspect": ("inspect plain", 0, ""),
    "show": ("inspect plain model.embed_tokens --role output.0 --step 0", 0, ""),
    "tree": ("inspect golden --tree", 0, ""),
    "patches": ("patches list", 0, ""),
    "doctor": ("doctor --quick", 0, ""),
    "doctor --dump": ("doctor --dump golden", 0, ""),
}
"""The command, the largest file that it may write on a full disk (0: it writes none), and what
stdout has of the result all the same."""
SEEDS = {"repair": "killed", "verify --index": "packs"}
"""What OUT is before."""
PLACES = {
    "run": "run --dir OUT/new -- true",
    "errcheck": "errcheck --dir OUT/new -- true",
    "make": "golden make MODEL --out OUT/x.golden",
    "make, keep": "golden make MODEL --keep OUT/new --out x.golden",
    "check": "golden check packs/a.golden --keep OUT/new -- vllm serve MODEL",
    "stream": "golden stream MODEL --prompts text.txt --out OUT/new",
    "send": "send text.txt --engine 'vllm serve MODEL' --out OUT/new",
    "gate A B": "gate 'vllm serve MODEL' 'vllm serve MODEL' --prompts text.txt --out OUT/new",
    "self-check": "self-check --prompts text.txt --out OUT/new -- vllm serve MODEL",
    "bisect": "bisect --prompts text.txt --out OUT/new -- vllm serve MODEL --async-scheduling",
    "doctor --graphs": "doctor --graphs --out OUT/new -- vllm serve MODEL",
    "serve": "online serve --port 0 --wait 1 --out OUT/new",
    "eval-diff --prompts-out": "eval-diff a.jsonl b.jsonl --prompts-out OUT/x.jsonl",
    "convert --at-end": "convert plain OUT/new --to h5 --at-end",
}
"""Commands that are refused where nothing can be written, before they start anything."""
KINDS = ("full disk", "locked", "below a file", "interrupted", "closed pipe", "latin-1", "ascii", "gbk", "narrow")


def params_only(root: Path) -> None:
    write_run_json(root, {"model": "tiny"})
    writer = RankWriter(root, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    weight = np.ones((4, 4), np.float32)
    event = {"event": "param", "tap": "lm_head", "class": "Linear", "role": "param.weight"}
    put_event(writer, weight, {**event, "dtype": "float32", "shape": [4, 4]})
    writer.close("done", {})


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from opcheck.opcheck_dumps import one_call

    root = tmp_path_factory.mktemp("table")
    one: dict[str, Any] = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    for name in ("golden", "one/deep/run1", "two/run1", "two/run2", "killed", "cut", "locked-files"):
        write(capture(**one), root / name)
    write(capture(faults={DOWN: scaled(1.2)}, **one), root / "mine")
    journal = root / "killed/rank0000/journal.jsonl"
    journal.write_bytes(journal.read_bytes().rsplit(b"\n", 2)[0] + b'\n{"event": "ten')
    segment = root / "cut/rank0000/seg-00000.safetensors"
    os.truncate(segment, segment.stat().st_size - 1000)
    for name in ("empty", "deep", "locked"):
        (root / name).mkdir()
    for name, text in (("text.txt", "hello\n"), ("zero.csv", ""), ("bad.json", "{"), ("deep/run.json", "[" * 100_000)):
        (root / name).write_text(text)
    make(root / "locked" / "run1")
    for path in (root / "locked", *(p for p in (root / "locked-files").rglob("*") if p.is_file())):
        path.chmod(0)
    for name in ("plain", "plain2"):
        make(root / name)
    one_call(root / "calls")
    (root / "packs").mkdir()
    for name in ("a", "b"):
        assert main(["golden", "pack", str(root / "golden"), "--out", str(root / f"packs/{name}.golden")]) == 0
    (root / "cut.golden").write_bytes((root / "packs/a.golden").read_bytes()[:-1000])
    plain = [str(root / "plain"), str(root / "plain2")]
    assert main(["compare", *plain, "--no-replay", "--out", str(root / "report")]) == 0
    for i in (1, 2):
        folder(root / f"sent{i}", i, prompts=4)
    with mock.patch.dict(os.environ, {"VLLM_ACCPROBE_DIR": str(root / "labels")}):
        set_task_id()
        for label in ("pta", "acl"):
            set_label(label, "x", np.ones((2, 3), np.float32))
        labels.close()
    (root / "MODEL").mkdir()
    (root / "MODEL/config.json").write_text("{}")
    for name in ("1.csv", "2.csv"):
        (root / name).write_text(HEADER + "".join(ROW.format(call) for call in range(40)))
    for name in ("a.jsonl", "b.jsonl"):
        lines = [{"doc_id": i, "doc": {}, "target": "x", "resps": [["x"]], "filtered_resps": ["x"], "acc": 1.0,
                  "metrics": ["acc"], "filter": "none", "arguments": {}} for i in range(30)]  # fmt: skip
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.save(root / "x.npy", np.ones((2, 3), np.float32))
    make(root / "stats", stats=True)
    params_only(root / "params")
    for name in ("a_msprobe_tensor", "a_msprobe_stat"):
        unpack(name, root)
    return root


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state(root: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time: what a command reads it does not change."""
    found = {}
    for at, folders, names in os.walk(root):
        for path in (os.path.join(at, name) for name in folders + names):
            stat = os.lstat(path)
            found[path] = stat.st_size, stat.st_mtime_ns
    return found


def one_line(err: str) -> str:
    """The one line of an error; notes may stand before it."""
    said = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert len([line for line in said if line.startswith("accprobe: ")]) == 1, err
    assert all(line.startswith("accprobe: ") or "accprobe" not in line for line in said), err
    assert "internal error" not in err
    assert "Traceback" not in err
    return next(line for line in said if line.startswith("accprobe: ")).removeprefix("accprobe: ")


def by_default(cells: list[tuple[str, str]]) -> list[Any]:
    """Extra: one more file that is no dump, and two more locales."""
    more = ("text.txt", "latin-1", "gbk")
    return [pytest.param(*cell, marks=pytest.mark.extra) if cell[1] in more else cell for cell in cells]


TABLE = [(command, what) for what in REFUSED for command in READ if what not in NO_FAULT.get(command, ())]
TABLE += [(command, what) for command, kinds in OTHER_KIND.items() for what in kinds]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is started, no disk is measured."""
    monkeypatch.setattr("vllm_accprobe.gate.served_run.ServedRun.__enter__", lambda self: pytest.fail("started"))
    monkeypatch.setattr("vllm_accprobe.doctor.checks.write_rate", lambda *_: (1e9, True))


def same_environment(monkeypatch: pytest.MonkeyPatch, there: Path) -> None:
    """So what `vllm` is there is found out once. Not in a fixture: pytest sets the variable anew for the call."""
    monkeypatch.chdir(there)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")


@pytest.mark.parametrize(("command", "what"), by_default(TABLE))
def test_what_cannot_be_read_is_one_line(command, what, there, tmp_path, monkeypatch, capsys):
    same_environment(monkeypatch, there)
    words = [w.replace("@", what).replace("OUT", str(tmp_path / "out")) for w in READ[command]]
    before = state(there)
    with permissions_count() if what.startswith("locked") else contextlib.nullcontext():
        code = main(words)
    line = one_line(capsys.readouterr().err)
    assert code == 2 or (code == 3 and (what == "locked-files" or what in OTHER_KIND.get(command, ()))), line
    assert what in line
    assert not list(tmp_path.iterdir())
    assert state(there) == before


_whole: dict[str, int] = {}
DUMPS = (*[*READ][:20], "pack", "doctor, dump", "opcheck, against")


@pytest.mark.parametrize(("command", "what"), [(c, w) for w in WORKS for c in DUMPS])
def test_what_is_there_of_a_damaged_dump_is_read(command, what, there, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(there)
    copy = tmp_path / what
    shutil.copytree(there / what, copy)
    if command not in _whole:
        shutil.copytree(there / "golden", tmp_path / "whole")
        _whole[command] = run(READ[command], tmp_path / "whole", tmp_path / "first")
    capsys.readouterr()
    before = state(copy)
    assert run(READ[command], copy, tmp_path / "out") == _whole[command]
    out, err = capsys.readouterr()
    assert "internal error" not in err
    if _whole[command] >= 2:
        one_line(err)
    if command == "repair":
        assert ("lost the payload" if what == "cut" else "torn line cut off") in out
    if (command, what) != ("repair", "killed"):
        assert state(copy) == before


def run(words: list[str], dump: Path, out: Path) -> int:
    return main([str(dump) if w == "@" else w.replace("OUT", str(out)) for w in words])


class Narrow(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def trouble(kind: str, most: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with contextlib.ExitStack() as now:
        if kind == "full disk":
            now.enter_context(largest_file(most))
        elif kind == "locked":
            out.chmod(0o500)
            now.callback(out.chmod, 0o700)
            now.enter_context(permissions_count())
        elif kind == "interrupted":
            replace = os.replace

            def interrupted(source: Any, target: Any, *more: Any, **named: Any) -> None:
                if str(out) in str(target):
                    raise KeyboardInterrupt
                replace(source, target, *more, **named)

            monkeypatch.setattr(os, "replace", interrupted)
        elif kind == "closed pipe":
            reader, writer = os.pipe()
            os.close(reader)
            stream = now.enter_context(os.fdopen(writer, "w"))
            now.enter_context(contextlib.redirect_stdout(stream))
        elif kind == "narrow":
            monkeypatch.setenv("COLUMNS", "20")
            now.enter_context(contextlib.redirect_stdout(Narrow()))
        elif kind in ("latin-1", "ascii", "gbk"):
            stream = io.TextIOWrapper(io.BytesIO(), encoding=kind)
            now.enter_context(contextlib.redirect_stdout(stream))
        yield


_plain: dict[str, tuple[int, set[str]]] = {}


def files(out: Path) -> set[str]:
    return {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}


CELLS = [(c, k) for k in KINDS for c in WRITE if WRITE[c][1] or k in KINDS[4:]]
CELLS = [(c, k) for c, k in CELLS if k != "below a file" or c not in SEEDS]
CELLS += [(c, k) for k in ("locked", "below a file") for c in PLACES]


def begun(out: Path, command: str) -> None:
    if command in SEEDS:
        shutil.copytree(SEEDS[command], out)
    else:
        out.mkdir()


@pytest.mark.parametrize(("command", "kind"), by_default(CELLS))
def test_trouble_while_writing(command, kind, there, tmp_path, monkeypatch, capsys):
    same_environment(monkeypatch, there)
    typed, most, verdict = WRITE[command] if command in WRITE else (PLACES[command], 0, "")
    words: Callable[[Path], list[str]] = lambda out: [w.replace("OUT", str(out)) for w in shlex.split(typed)]  # noqa: E731
    out, whole = tmp_path / "out", tmp_path / "whole"
    if kind == "below a file":
        out = tmp_path / "file/out"
        out.parent.write_text("mine")
    else:
        begun(out, command)
    if kind in KINDS[4:] and typed not in _plain:
        begun(whole, command)
        _plain[typed] = main(words(whole)), files(whole)
        capsys.readouterr()
    before, seed = state(there), state(out)
    with trouble(kind, most, out, monkeypatch):
        code = main(words(out))
    shown, err = capsys.readouterr()
    assert state(there) == before
    if kind in KINDS[4:]:
        assert "internal error" not in err
        assert (code, files(out)) == _plain[typed], err
        return
    line = one_line(err)
    assert code == (130 if kind == "interrupted" else 2), line
    parts = [p for p in out.rglob("*") if p.name.endswith("part")]
    if kind == "interrupted":
        assert line.startswith("interrupted; ")
        assert all(str(p) in line for p in parts), (line, parts)
        return
    assert not parts
    assert str(out) in line
    if kind == "full disk":
        needed = r"(more than )?[\d,]+ bytes are needed, " if "--csv" in typed or "compare " in typed else ""
        assert re.search(needed + r"[\d,]+ are allowed, [\d,]+ bytes are free\): it was not written; ", line), line
        assert verdict in shown, shown
        assert not [p for p in out.rglob("*") if p.stat().st_size == most]
    else:
        assert state(out) == seed
        assert shown == "" or kind == "locked", shown  # refused before the work
