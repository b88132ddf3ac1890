"""An HTTP server that answers as badly as one can: what no real server does when it is asked to."""

import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_accprobe.gate.sending.client import PROBE, NotServed

Answer = Callable[[str, dict[str, Any]], tuple[int, bytes]]
"""Of a path and the body that came: a status and the bytes; the status 0 closes the connection."""
MODELS = {"data": [{"id": "tiny", "max_model_len": 512}]}


def completion(body: dict[str, Any]) -> bytes:
    """A good answer of vLLM's to /v1/completions: one token."""
    top = {"token_id:7": -0.25, "token_id:9": -1.5}
    choice = {
        "token_ids": [7], "prompt_token_ids": [1, 2], "finish_reason": "length",
        "logprobs": {"token_logprobs": [-0.25], "top_logprobs": [top]},
    }  # fmt: skip
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}).encode()


def running(url: str, log: Path) -> Any:
    """What `served` gives of such a server, as far as it is used."""
    return SimpleNamespace(command=SimpleNamespace(url=url, key=""), log=log, reporting=nullcontext)


class Ended(Exception):
    """The command ends with this code before it serves."""


def started_here(answers: Callable[[list[str]], Answer]) -> Callable[..., AbstractContextManager[Any]]:
    """In place of gate/served_run.py's `served`: no time is spent on processes. answers: of the command's words, with
    the command's environment; it may raise Ended."""

    @contextmanager
    def served(name: str, command: str, environ: Mapping[str, str], out: Path, *_: object) -> Iterator[Any]:
        log = out / f"engine-{len(list(out.glob('engine-*.log')))}.log"
        log.write_text("")
        log.chmod(0o600)
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(environ)
        try:
            said = answers(shlex.split(command))
        except Ended as e:
            raise NotServed(f"the command ended with exit code {e} before it served; read {log}") from None
        finally:
            os.environ.clear()
            os.environ.update(before)
        with odd(said, forced=True) as (url, _):
            yield running(url, log)

    return served


@contextmanager
def odd(answer: Answer, *, forced: bool = False, port: int = 0) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(url, the (path, request id) of what came). forced: whether ``answer`` also gets what asks if it can be forced;
    else it cannot."""
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                return self._say(200, json.dumps(MODELS).encode())
            self._say(*answer(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers.get("X-Request-Id") == PROBE.name and not forced:
                return self._say(404, b"")
            seen.append((self.path, self.headers.get("X-Request-Id", "")))
            self._say(*answer(self.path, body))

        def _say(self, status: int, raw: bytes) -> None:
            if not status:
                self.connection.close()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *_: Any) -> None: ...  # a connection that was closed, which is the point

    server = Server(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        time.sleep(0)
