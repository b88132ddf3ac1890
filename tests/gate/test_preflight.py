"""What is known before an engine starts: each fault is one line, and no program was started for it."""

import http.server
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from preloaded_vllm import command

from tests.gate.fake_vllm import installed
from vllm_accprobe.cli import main
from vllm_accprobe.gate import preflight
from vllm_accprobe.gate.bisect import edits
from vllm_accprobe.gate.bisect.edits import ServeCommand
from vllm_accprobe.gate.sending.client import NotServed

CONFIG = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4}
ARGS = 'class EngineArgs:\n    max_model_len: int\n    port: int\n    parser.add_argument("--kv-cache-memory-bytes")\n'
PARSER = "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser): pass\n"
SERVE = (
    "class ServeSubcommand:\n  def subparser_init(self, subs):\n    p = subs.add_parser('serve')\n"
    "    p.add_argument('model')\n    p.add_argument('--vendor-switch')\n"
)


def a_vllm(site: Path, version: str = "0.32.0+cpu") -> Path:
    """A folder on the path of a Python, with a vLLM of few files, as `pip` leaves it."""
    files = {"vllm/__init__.py": "", "vllm/engine/__init__.py": "", "vllm/engine/arg_utils.py": ARGS,
             "vllm/entrypoints/__init__.py": "", "vllm/entrypoints/cli/__init__.py": "",
             "vllm/entrypoints/cli/serve.py": SERVE, "vllm/utils/__init__.py": "",
             "vllm/utils/argparse_utils.py": PARSER,
             f"vllm-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
             f"vllm-{version}.dist-info/top_level.txt": "vllm\n",
             "probe-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: probe\nVersion: 1\n"}  # fmt: skip
    files["probe-1.dist-info/entry_points.txt"] = "".join(
        f"[vllm.{kind}_plugins]\naccprobe = probe:register\n" for kind in ("general", "platform")
    )
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, prompts, and a `vllm` that leaves a file `started` where it runs."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -S\nopen('started', 'w').close()\nraise SystemExit(3)\n")
    program.chmod(0o755)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in (("PATH", f"{program.parent}:/usr/bin:/bin"), ("PYTHONPATH", str(a_vllm(tmp_path / "site"))),
                        ("PYTHONNOUSERSITE", "1"), ("HF_ENDPOINT", "none"), ("HF_HOME", "hub")):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(edits, "interpreter", lambda words, environ: sys.executable)
    monkeypatch.setattr(edits, "installed", of_site(edits.installed.__wrapped__, tmp_path / "site"))
    for name, config in (("m", CONFIG), ("other", CONFIG | {"hidden_size": 128}), ("empty", None)):
        Path(name).mkdir()
        if config:
            Path(name, "config.json").write_text(json.dumps(config))
    Path("p.txt").write_text("one\ntwo\n")
    Path("bad.jsonl").write_text('{"prompt": 7}\n')
    Path("full").mkdir()
    Path("full/notes").write_text("somebody's")
    return tmp_path


def of_site(installed: Callable[..., edits.Installed], site: Path) -> Callable[..., edits.Installed]:
    """``installed``, of what lies in ``site`` alone: the interpreter of the tests has a vLLM of its own."""

    def found(python: str, environ: edits.Environ) -> edits.Installed:
        alone = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        where = edits._WHERE
        edits._WHERE = alone + where
        try:
            return installed(python, environ)
        finally:
            edits._WHERE = where

    return found


GATE = ("gate", "vllm serve ./m")
FAULTS = {
    # what is typed -> what is said
    (*GATE, "vllm serve ./m --port={taken}", "--out", "o"): "mine: something listens on port",
    (*GATE, "vllm serve ./none", "--out", "o"): "mine: ./none does not exist: write the path",
    (*GATE, "HF_HUB_OFFLINE=1 vllm serve org/none", "--out", "o"):
        "mine: org/none is not a folder on this machine, HF_HUB_OFFLINE=1",
    (*GATE, "TRANSFORMERS_OFFLINE=true HF_ENDPOINT=http://127.0.0.1:{hub} vllm serve org/none", "--out", "o"):
        "TRANSFORMERS_OFFLINE=true forbids downloading it",
    (*GATE, "HF_ENDPOINT=http://127.0.0.1:{hub} vllm serve org/none", "--out", "o"):
        "has no such model (HTTP 401), and hub/hub/models--org--none does not exist: give the path",
    ("golden", "make", "HF_ENDPOINT=http://127.0.0.1:{closed} vllm serve nomodel", "--out", "o.golden"):
        "cannot be reached ([Errno 111] Connection refused), and hub/hub/models--nomodel does not exist: give the path",
    (*GATE, "vllm serve ./p.txt", "--out", "o"): "mine: ./p.txt is a file: write the path of the model's folder",
    (*GATE, "vllm serve ./empty", "--out", "o"): "mine: ./empty has no config.json",
    (*GATE, "vllm serve ./other", "--out", "o"): "are two models (hidden_size 64 and 128)",
    (*GATE, "vllm serve ./m --no-such=1", "--out", "o"): "error: unrecognized arguments: --no-such=1; this release",
    (*GATE, "serve-it ./m", "--out", "o"): "mine: serve-it: no such command",
    (*GATE, "http://127.0.0.1:{closed}", "--out", "o"): "mine: http://127.0.0.1:",
    (*GATE, "full", "--out", "o"): "mine: full is no folder of `accprobe send`",
    (*GATE, "vllm serve ./m", "--out", "o", "--prompts", "bad.jsonl"): "golden: bad.jsonl, line 1: prompt is a text",
    (*GATE, "vllm serve ./m", "--out", "o", "--floor", "vllm serve ./none"): "floor 0: ./none does not exist",
    (*GATE, "vllm serve ./m", "--out", "o", "--localize", "--localize-gb", "1e9"): "--localize: o has",
    ("send", "p.txt", "--engine", "vllm serve ./none", "--out", "o"): "--engine: ./none does not exist",
    ("send", "bad.jsonl", "--engine", "vllm serve ./m", "--out", "o"): "bad.jsonl, line 1",
    ("self-check", "--out", "o", "--", "vllm", "serve", "./none"): "CMD: ./none does not exist",
    ("self-check", "--out", "full", "--", "vllm", "serve", "./m"): "--out full has other files",
    ("bisect", "--out", "o", "--", "vllm", "serve", "./none", "--async-scheduling"): "./none does not exist",
    ("bisect", "--out", "o", "--golden", "vllm serve ./other", "--", "vllm", "serve", "./m"): "are two models",
    ("bisect", "--out", "o", "--floor", "full", "--", "vllm", "serve", "./m"): "full is no folder of `accprobe send`",
    ("doctor", "--graphs", "--out", "o", "--", "vllm", "serve", "./none"): "./none does not exist",
    ("doctor", "--graphs", "--out", "full", "--", "vllm", "serve", "./m"): "/full is not empty",
    ("run", "--dir", "d", "--", "vllm", "serve", "./none"): "./none does not exist",
    ("run", "--dir", "d", "--", "vllm", "serve", "./m", "--no-such"): "unrecognized arguments: --no-such",
}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/models/org/public" else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    with socket.socket() as taken, socket.socket() as closed, http.server.HTTPServer(("127.0.0.1", 0), Hub) as hub:
        for one in (taken, closed):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        threading.Thread(target=hub.serve_forever, args=(0.01,)).start()
        yield {"taken": taken.getsockname()[1], "closed": closed.getsockname()[1], "hub": hub.server_port}
        hub.shutdown()


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_found_before_a_start(words, here, ports, capsys, monkeypatch):
    if "--localize" in words:
        full = shutil._ntuple_diskusage(10**12, 10**12, 10**6)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda place: full)
    assert main([w.format(**ports) for w in words]) == 2
    said = capsys.readouterr()
    assert FAULTS[words] in said.err
    assert (said.out, len([line for line in said.err.splitlines() if not line.startswith("note: ")])) == ("", 1), said
    assert not (here / "started").exists()


def test_what_the_hub_may_have_is_started(ports: dict[str, int]) -> None:
    hub = f"http://127.0.0.1:{ports['hub']}"
    assert [preflight._hub_lacks(hub, *of) for of in (("org/public", False), ("org/none", True))] == ["", ""]
    assert preflight._hub_lacks(hub, "org/none", False)


def serve(hub: int, name: str = "org/none", **environ: str) -> ServeCommand:
    return edits.command(["vllm serve " + name], os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub}"} | environ)


@pytest.mark.parametrize("environ", [
    {"HUGGINGFACE_HUB_CACHE": "$PWD/kept"}, {"HF_TOKEN_PATH": "m/config.json"}, {"VLLM_MODEL_REDIRECT_PATH": "m"},
    {"HF_ENDPOINT": "http://127.0.0.1:{closed}", "all_proxy": "socks5://127.0.0.1:{closed}"},
    {"HF_ENDPOINT": "http://me:secret@127.0.0.1:{closed}"},
])  # fmt: skip
def test_what_vllm_may_have_from_elsewhere_is_no_fault(
    environ: dict[str, str], here: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "kept" / "models--org--none").mkdir(parents=True)
    monkeypatch.setenv("PWD", str(here))
    with pytest.raises(NotServed, match="no such model"):
        preflight._check_hub("org/none", serve(ports["hub"]), True)
    found = {name: value.format(**ports) for name, value in environ.items()}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    preflight._check_hub("org/none", serve(ports["hub"], **found), True)


def test_an_endpoint_may_end_with_a_slash(here: Path, ports: dict[str, int]) -> None:
    endpoint = f"http://127.0.0.1:{ports['hub']}/"
    preflight._check_hub("org/public", serve(0, "org/public", HF_ENDPOINT=endpoint), True)


def test_a_name_of_the_hub_that_resembles_a_folder_here_is_started(here: Path, capsys: Any) -> None:
    for trained, name in (("gpt-2", "gpt2"), ("bert-base-cased", "bert-base-uncased")):
        shutil.copytree("m", trained)
        assert main(["send", "p.txt", "--engine", f"vllm serve {name}", "--out", "o"]) == 2
        assert f"{name} is no folder here; did you mean {trained}?" in (said := capsys.readouterr().err)
        assert "ended with exit code 3 before it served" in said
        (here / "started").unlink()


@pytest.mark.parametrize("model", ["m", "blob", "m.gguf"])
def test_a_start_is_seen(model: str, here: Path, capsys: Any) -> None:
    """Else the table above could not fail: a command without a fault is started, with its limit on a CPU. blob: GGUF
    under a hash, as the hub's cache names files."""
    if model != "m":
        Path(model).write_bytes(b"GGUF\3\0\0\0")
    assert main(["send", "p.txt", "--engine", f"vllm serve ./{model}", "--out", "o"]) == 2
    said = capsys.readouterr().err
    assert "ended with exit code 3 before it served" in said
    assert "would take 92 % of the memory: added --kv-cache-memory-bytes=" in said
    assert (here / "started").exists()


@pytest.mark.parametrize("command", ["gate", "run", "doctor"])
def test_a_missing_plugin(command: str, here: Path, capsys: Any) -> None:
    shutil.rmtree(here / "site" / "probe-1.dist-info")
    words = {"gate": [*GATE, "vllm serve ./m", "--out", "o", "--localize"], "run": ["run", "--dir", "d"],
             "doctor": ["doctor", "--graphs", "--out", "o"]}[command]  # fmt: skip
    assert main([*words, *([] if command == "gate" else ["--", "vllm", "serve", "./m"])]) == 2
    assert "vllm-accprobe is not installed there: nothing could be captured" in capsys.readouterr().err
    assert not (here / "started").exists()


@pytest.mark.parametrize(
    ("words", "version", "environ", "added"),
    [
        ("", "0.32.0+cpu", {}, True),
        ("--kv-cache-memory-bytes=1G", "0.32.0+cpu", {}, False),
        ("--gpu_memory_utilization 0.3", "0.32.0+cpu", {}, False),
        ("", "0.32.0+cpu", {"VLLM_CPU_KVCACHE_SPACE": "2"}, False),
        ("", "0.32.0", {}, False),
    ],
)
def test_flags_of_a_cpu(words: str, version: str, environ: dict[str, str], added: bool, here: Path) -> None:
    shutil.rmtree(here / "site")
    a_vllm(here / "site", version=version)
    base = {"PATH": "/usr/bin", "PYTHONPATH": str(here / "site"), "PYTHONNOUSERSITE": "1", **environ}
    command = ServeCommand(("vllm", "serve", "m", *words.split()), base=base)
    made, note = preflight.prepared(command)
    assert made[: len(command.words)] == command.words
    assert [w.partition("=")[0] for w in made[len(command.words) :]] == ["--kv-cache-memory-bytes"] * added
    assert bool(note) == added
    if added:
        assert 0 < int(made[-1].partition("=")[2]) <= 4 << 30


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("./m", "--max-model-len=5", "--kv_cache_memory_bytes", "5", "--no-max-model-len"), ""),
        (("./m", "--vendor-switch", "1"), ""),  # only the parser knows it
        (("./m", "--max-modle-len=5"), "unrecognized arguments: --max-modle-len=5"),
    ],
)
def test_options_are_read_by_name_and_then_by_the_parser(words: tuple[str, ...], error: str, here: Path) -> None:
    """A stand-in for vLLM's parser."""
    environ = {"PATH": f"{here}/bin:/usr/bin", "PYTHONPATH": str(here / "site"), "PYTHONNOUSERSITE": "1"}
    command = ServeCommand(("vllm", "serve", *words), base=environ)
    if not error:
        preflight.check(command)
        return
    with pytest.raises(preflight.NotServed, match=error):
        preflight.check(command)


@pytest.mark.engine
def test_the_real_vllm_names_its_options(preloaded_vllm: Path, tmp_path: Path) -> None:
    """Its source alone answers for options that it has; its parser takes as long as an import of vLLM."""
    environ = edits.neutral(os.environ)
    package = edits.installed(sys.executable, environ).package
    assert package is not None
    words = "--port=1 --host x --served-model-name a -tp 2 --no-async-scheduling -cc.mode=0 --enable-trace-replay"
    assert preflight._knows(package, ServeCommand(("vllm", "serve", "m", *words.split())))
    assert not preflight._knows(package, ServeCommand(("vllm", "serve", "m", "--no-such-option")))
    program, python = tmp_path / "program.py", tmp_path / "python"
    program.write_text("import sys\n_, _, program, *words = sys.argv\nsys.argv[:] = ['-c', *words]\nexec(program)\n")
    command(preloaded_vllm, python, program)
    assert "arguments: --no-such" in preflight._parser_says(str(python), ("serve", "m", "--no-such-option"), environ)


# --- folders that were begun ---


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Path:
    """Folders with the answers of fakes to p.txt; from then on a start is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{installed(tmp_path / 'bin')}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", "")
    Path("p.txt").write_text("one\ntwo and three\n")
    Path("q.txt").write_text("another\n")
    assert main(["send", "p.txt", "--engine", "vllm serve M", "--out", "sent"]) == 0
    assert main(["send", "q.txt", "--engine", "vllm serve M", "--out", "others"]) == 0
    assert main(["self-check", "--prompts", "p.txt", "--out", "self", "--", "vllm", "serve", "M"]) in (0, 1)
    capsys.readouterr()
    Path("bin/vllm").write_text("#!/bin/sh\ntouch started\nexit 3\n")
    return tmp_path


ENGINE = ("--engine", "vllm serve M", "--out", "sent")
BEGUN = {
    ("send", "q.txt", *ENGINE): "sent has other prompts",
    ("send", "p.txt", *ENGINE, "--max-tokens", "5"): "sent has other settings",
    ("send", "--teacher-force", "others", *ENGINE): "sent was begun along no tokens",
    ("gate", "vllm serve M", "others", "--out", "o", "--prompts", "p.txt"): "others has answers to other prompts",
    ("gate", "sent", "vllm serve M", "--out", "o", "--prompts", "q.txt"): "golden's own prompts are sent",
    ("self-check", "--prompts", "q.txt", "--out", "self", "--", "vllm", "serve", "M"): "self/alone has other prompts",
    ("self-check", "--prompts", "p.txt", "--out", "self", "--", "vllm", "serve", "N"): "self is of another command",
}


def test_folders_are_read_before_a_start(begun: Path, capsys: Any) -> None:
    for words, says in BEGUN.items():
        assert main(list(words)) == 2, words
        said = capsys.readouterr()
        assert says in said.err, words
        assert len(said.err.splitlines()) == 1, said.err
        assert not (begun / "started").exists(), words


FREE, EAGER = 1 << 30, "vllm serve m --enforce-eager"


@pytest.mark.parametrize(
    ("words", "eager"),
    [
        (EAGER, True), ("vllm serve m", False), (f"{EAGER} --no-enforce-eager", False),
        (f"{EAGER} -cc.mode=3", False), (f"VLLM_ACCPROBE_HEAL=x {EAGER}", False), (f"OTHER=1 {EAGER}", True),
    ],
)  # fmt: skip
def test_an_engine_that_a_capture_does_not_change(words: str, eager: bool, here: Path) -> None:
    assert preflight.eager(preflight.command_of(words, dict(os.environ))) == eager


@pytest.mark.parametrize(
    ("one", "other", "weights", "fit"),
    [
        (EAGER, EAGER, FREE // 8, True), (EAGER, EAGER, FREE // 8 + 1, False), (EAGER, EAGER, 0, False),
        (EAGER, "vllm serve elsewhere/of/hub", 8, False), (EAGER, f"{EAGER} --gpu-memory-utilization=0.3", 8, False),
        (f"{EAGER} --port=1234", f"{EAGER} --port 1234", 8, False), (f"{EAGER} --port=1234", EAGER, 8, True),
        (f"CUDA_VISIBLE_DEVICES=0,1 {EAGER}", f"CUDA_VISIBLE_DEVICES=2 {EAGER}", FREE, True),
        (f"CUDA_VISIBLE_DEVICES=0,1 {EAGER}", f"CUDA_VISIBLE_DEVICES=1 {EAGER}", 8, False),
    ],
)  # fmt: skip
def test_two_servers_at_once(one, other, weights, fit, here, monkeypatch):
    with (here / "m" / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    monkeypatch.setattr(preflight, "_available", lambda: FREE)
    environ = dict(os.environ)
    assert preflight.fit_together(*(preflight.command_of(words, environ) for words in (one, other))) == fit
