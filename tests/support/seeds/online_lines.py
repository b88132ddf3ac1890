"""The lines of document 001's online pre-check, run on a made dump: both sides on this machine."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from online.online_certificates import Authority
from online.online_runs import Run, ended, free_port
from opcheck.layer_dumps import build
from support.seeds.line import Line

from vllm_accprobe.cli import main

FOLDER = "online"
"""Below the home of the document's lines."""


def _configs(where: Path, gpu: dict[str, object], npu: dict[str, object]) -> None:
    """The document's two files: as they are there, but for what is given."""
    receives = {"white_list": [], "black_list": [], "error_data_path": "./", "is_online": True, "rank_list": [0], **gpu}
    sends = {"scope": [], "list": [], "online_run_ut": True, **npu}
    around = {"dump_path": "./dump_path", "rank": [0], "step": [0], "level": "L1", "seed": 1234}
    (where / "gpu.json").write_text(json.dumps({"task": "run_ut", "run_ut": receives}))
    (where / "npu.json").write_text(
        json.dumps({"task": "tensor", **around, "is_deterministic": True, "tensor": sends})
    )


def _both(where: Path, *more: str) -> None:
    """run_ut on the GPU's side, then the sender on the NPU's, with ``more``; the tables are opcheck's."""
    out = where / "out"
    receive = Run("serve", "--config", str(where / "gpu.json"), "--out", str(out), anew=True)
    with ended(receive):
        receive.until("waiting for calls")
        assert main(["online", "send", "--config", str(where / "npu.json"), *more]) == 0
        assert receive.code() == 0, receive.said
    assert (out / "opcheck.csv").is_file()
    assert (out / "result.csv").is_file()


def _openssl(*words: str) -> Callable[[Path], None]:
    """A line of the document that is OpenSSL's own, typed in the folder that tls_path names."""

    def run(home: Path) -> None:
        tls = home / FOLDER / "tls"
        tls.mkdir(parents=True, exist_ok=True)
        if shutil.which("openssl") is None:
            pytest.skip("OpenSSL is not installed here")
        subprocess.run(["openssl", *words], cwd=tls, check=True, capture_output=True, timeout=120)

    return run


def _certificates(home: Path) -> None:
    """The document's folder: server.key and server.crt, self-signed; refused in a line that says what is missing."""
    where = home / FOLDER
    _openssl("x509", "-req", "-days", "365", "-in", "server.csr", "-signkey", "server.key", "-out", "server.crt")(home)
    build(where / "dump")
    tls = where / "tls"
    assert {p.name for p in tls.iterdir()} == {"server.key", "server.csr", "server.crt"}
    line = {"nfs_path": "", "host": "127.0.0.1", "port": free_port()}
    _configs(where, {**line, "tls_path": str(tls)}, line)
    run = Run("serve", "--config", str(where / "gpu.json"), "--out", str(where / "refused"), anew=True)
    assert run.code() == 2
    assert "has no ca.crt" in run.said
    assert len([x for x in run.lines if x.startswith("accprobe: ")]) == 1


def _line(home: Path) -> None:
    where = home / FOLDER / "line"
    where.mkdir()
    authority = Authority()
    tls = {side: str(authority.folder(where / side, side)) for side in ("server", "client")}
    line = {"nfs_path": "", "host": "127.0.0.1", "port": free_port()}
    _configs(where, {**line, "tls_path": tls["server"]}, line)
    _both(where, str(where.parent / "dump"), "--tls", tls["client"])


def _shared(home: Path) -> None:
    """The dump is dump_path of the file."""
    where = home / FOLDER / "folder"
    where.mkdir()
    line = {"nfs_path": str(where / "nfs"), "host": "", "port": -1}
    _configs(where, line, line)
    config = json.loads((where / "npu.json").read_text()) | {"dump_path": str(where.parent / "dump")}
    (where / "npu.json").write_text(json.dumps(config))
    _both(where)


def _script(home: Path) -> None:
    """The debugger captures, and sends while it does; the receiver writes msprobe's two files."""
    where = home / FOLDER / "script"
    where.mkdir()
    line = {"nfs_path": str(where / "nfs"), "host": "", "port": -1}
    _configs(where, line, line)
    config = json.loads((where / "npu.json").read_text()) | {"dump_path": str(where / "dump")}
    (where / "npu.json").write_text(json.dumps(config))
    (where / "train.py").write_text(
        "import torch\nfrom vllm_accprobe import PrecisionDebugger\n"
        f"debugger = PrecisionDebugger({str(where / 'npu.json')!r})\nmodel = torch.nn.Linear(4, 4)\n"
        "debugger.start(model)\nmodel(torch.ones(2, 4))\ndebugger.stop()\ndebugger.step()\n"
    )
    (where / "train.sh").write_text(f"{sys.executable} {where / 'train.py'}\n")
    receive = Run("serve", "--config", str(where / "gpu.json"), "--out", str(where / "out"), anew=True)
    with ended(receive):
        receive.until("waiting for calls")
        done = subprocess.run(["bash", str(where / "train.sh")], capture_output=True, text=True, check=True)
        assert "sent: 1 rank" in done.stderr, done.stderr
        assert receive.code() == 0, receive.said
    assert (where / "out/received/rank0000/journal.jsonl").is_file()
    for kind, column in (("result", "Forward Test Success"), ("details", "余弦相似度")):
        (file,) = (where / "out").glob(f"accuracy_checking_{kind}_*_rank0.csv")
        table = file.read_text(encoding="utf-8-sig").splitlines()
        assert column in table[0]
        assert len(table) > 1


LINES: list[Line] = [
    Line(948, "openssl genrsa -out server.key 2048", _openssl("genrsa", "-out", "server.key", "2048")),
    Line(954, "openssl req -new -key server.key -out server.csr",
         _openssl("req", "-new", "-key", "server.key", "-subj", "/CN=gpu", "-out", "server.csr")),
    Line(960, "openssl x509 -req -days 365 -in server.csr -signkey server.key -out server.crt", _certificates),
    Line(1140, "msprobe -f pytorch run_ut -config ./config.json  # 3.1.3, host and port", _line, also=(850,)),
    Line(1140, "msprobe -f pytorch run_ut -config ./config.json  # 3.1.4, nfs_path", _shared),
    Line(1170, 'debugger = PrecisionDebugger("config.json"); bash train.sh', _script,
         also=(1166, 1176, 1184, 1186, 1202)),
]  # fmt: skip
