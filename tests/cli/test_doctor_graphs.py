"""``accprobe doctor --graphs`` as typed: programs, a server, and commands that fail.

What is run writes the dumps of an engine (doctor/graphs/small_engine.py) and takes a fraction of one's time; a real
one is in tests/e2e/test_taps_change_nothing.py.
"""

import json
import sys
from pathlib import Path

import pytest
from cli.conftest import Typed
from doctor import small_engine
from doctor.small_engine import CHANGES, TAPS

from vllm_accprobe.doctor import graph_proof

ENGINE = "from doctor.small_engine import main; main()"
SERVER = """
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from doctor.small_engine import main
asked = open(os.environ["VLLM_ACCPROBE_DIR"] + ".asked", "w")
class Handler(BaseHTTPRequestHandler):
    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps([self.headers["X-Request-Id"], self.headers["Authorization"], body]), file=asked, flush=True)
        n = len(body["prompt"])
        says = {"token_logprobs": [-0.25], "top_logprobs": [{f"token_id:{n}": -0.25, "token_id:9": -1.5}]}
        choice = {"text": "", "token_ids": [n], "logprobs": says, "finish_reason": "length"}
        self.answer({"id": os.urandom(4).hex(), "choices": [choice]})
    def log_message(self, *args):
        pass
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
server = HTTPServer(("127.0.0.1", port), Handler)
def end(number, frame):
    main()
    print("closed", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
server.serve_forever()
"""


def test_a_program_whose_taps_change_nothing(tmp_path: Path, typed: Typed) -> None:
    done = typed("doctor", "--graphs", "--", sys.executable, "-c", ENGINE)
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in table[:5]] == ["run", "off", "off again", "on", "selected"]
    assert table[3].split()[1:3] == ["6", "(default)"]
    assert table[5].startswith("looking changed nothing: ")
    out = tmp_path / "accprobe-doctor-graphs"
    assert {p.name for p in out.iterdir()} == {
        f"{name}{end}" for name in ("off", "off-again", "on", "selected") for end in ("", ".log")
    }
    assert (out / "on.log").stat().st_mode & 0o777 == 0o600
    again = typed("doctor", "--graphs", "--", sys.executable, "-c", ENGINE)
    assert (again.returncode, again.stderr) == (2, f"accprobe: --out {out} is not empty: name a new directory\n")


def test_taps_that_change_the_result_are_exit_code_1(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine in this process: its runs are eight."""
    monkeypatch.setattr(graph_proof, "carry_out", lambda run, *_: small_engine.main(run.environ) or ())
    done = typed("doctor", "--graphs", "--json", "-o", "there", "--", "true", **{CHANGES: TAPS[3]})
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert (said["verdict"], said["culprits"][0]["module"]) == ("changed", TAPS[3])
    assert "which of 6: at most 4 more runs" in done.stderr


def test_a_server_is_asked_and_ended(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "vllm").write_text(f"#!{sys.executable}\n{SERVER}")
    (tmp_path / "vllm").chmod(0o700)
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL/config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a secret"}\n{"token_ids": [5, 6]}\n"plain text"\n')
    words = ("doctor", "--graphs", "--prompts", "prompts.jsonl", "--max-tokens", "3", "--")
    words += ("./vllm", "serve", "MODEL", "--api-key=k")
    done = typed(*words, http_proxy="http://127.0.0.1:1")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "accprobe-doctor-graphs"
    for name in ("off", "off-again", "on", "selected"):
        asked = [json.loads(line) for line in (out / f"{name}.asked").read_text().splitlines()]
        assert [one[0] for one in asked] == [f"accprobe-doctor-{i}" for i in range(3)]
        assert {one[1] for one in asked} == {"Bearer k"}
        assert [one[2]["prompt"] for one in asked] == ["a secret", [5, 6], "plain text"]
        assert asked[0][2] | {"prompt": ""} == {
            "model": "tiny", "prompt": "", "max_tokens": 3, "temperature": 0.0, "seed": 0, "logprobs": 5,
            "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        assert (out / f"{name}.log").read_text() == "closed\n"
    assert "secret" not in done.stdout + done.stderr


def test_a_command_that_fails_says_why(tmp_path: Path, typed: Typed) -> None:
    done = typed("doctor", "--graphs", "--", sys.executable, "-c", "import sys; print('why'); sys.exit(5)")
    assert done.returncode == 2
    log = tmp_path / "accprobe-doctor-graphs" / "off.log"
    last = f"accprobe: run `off`: the command ended with exit code 5: why; read {log}"
    assert done.stderr.splitlines()[-1] == last
    words = ("doctor", "--graphs", "-o", "b", "--timeout", "1", "--", "sleep", "60")
    done = typed(*words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "accprobe: run `off`: the command still runs after 1 s (--timeout)"
    )
    (tmp_path / "vllm").write_text("#!/bin/sh\necho no model >&2\nexit 3\n")
    (tmp_path / "vllm").chmod(0o700)
    done = typed("doctor", "--graphs", "-o", "c", "--", "./vllm", "serve", "MODEL")
    assert done.returncode == 2
    log = tmp_path / "c" / "off.log"
    last = f"accprobe: run `off`: the command ended with exit code 3 before it served: no model; read {log}"
    assert done.stderr.splitlines()[-1] == last
