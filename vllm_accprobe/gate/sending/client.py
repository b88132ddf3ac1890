"""One request to an OpenAI-compatible server.

The problem: of an answer only token ids and log-probabilities can be compared, and OpenAI's routes give texts; a server
that is killed or hangs must be told from one that refuses a prompt. The idea: vLLM is asked for ids
(``return_token_ids``, ``return_tokens_as_token_ids``). The standard library's http.client: a request on a connection of
its own needs no more, and no proxy of the environment sees a prompt. No text of a request or an answer is in an error.
Not here: the answer as numbers (reply.py), what is sent where tokens are named beforehand (ways.py), when (arrival.py,
passes.py), where it is kept (replies.py).
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from vllm_accprobe.gate.sending import reply as shapes
from vllm_accprobe.gate.sending import ways
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.reply import Reply

__all__ = ["NotForced", "OtherIds", "Reply", "SendError", "Sender", "ServerLost"]

SCORE_TOKENS = 1024
"""Chosen: longer prompts are not scored. A server computes the logits of a whole chunk for that, float32, and their
logarithms beside them: 1.2 GB for 1,024 tokens of a vocabulary of 152,000, which it has not kept free."""
_LOST = (OSError, http.client.HTTPException)
MAX_ANSWER = 1 << 30
"""Chosen: bytes; 8,000 tokens with 20 log-probabilities each are 10 MB."""


INTRODUCTION_S = 60.0
"""Chosen: seconds; the list of models needs no model, so a server that does not say it in a minute is hung."""


class SendError(Exception):
    """One line: the server cannot be asked at all."""


class ServerLost(SendError):
    """One line: it answered before, and does not any more."""


class NotForced(SendError):
    """One line: it was to answer with named tokens, and gave others."""


class OtherIds(SendError):
    """One line: its token ids do not mean what golden's do. Exit code 3."""


@dataclass(frozen=True)
class Sender:
    """A server. url: http(s)://host:port, a path in front of /v1 allowed. key: a bearer token, never shown. timeout:
    seconds without an answer after which it is taken for hung. top: log-probabilities for each token. way: how it is
    made to answer with the tokens that a line names (ways.py). score_tokens: longer ones are not scored."""

    url: str
    key: str = ""
    timeout: float = 600.0
    top: int = 20
    max_tokens: int = 32
    model: str = ""
    way: str | None = None
    score_tokens: int = SCORE_TOKENS

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise SendError("--url: write http://HOST:PORT or https://HOST, without a name, a password or a question")
        try:
            _ = parts.port
        except ValueError:
            raise SendError("--url: the port is no number") from None

    def __repr__(self) -> str:
        return f"Sender({self.url!r})"

    def introduced(self) -> tuple[Sender, dict[str, Any]]:
        """With the name of the model, the first that the server has, and what it says of itself. Raises SendError."""
        status, models = replace(self, timeout=min(self.timeout, INTRODUCTION_S))._exchange(
            "GET", "/v1/models", None, "", {}
        )
        if status in (401, 403):
            raise SendError(f"{self.url} wants a key ({status}): put it into VLLM_API_KEY")
        try:
            first = models["data"][0]
            model = self.model or str(first["id"])
        except (KeyError, IndexError, TypeError):
            raise SendError(
                f"{self.url}/v1/models names no model ({status}): is it an OpenAI-compatible server?"
            ) from None
        _, version = self._exchange("GET", "/version", None, "", {})
        known = {"version": version.get("version") if isinstance(version, dict) else None, "model": model}
        return replace(self, model=model), known | {"max_model_len": first.get("max_model_len")}

    def healthy(self) -> bool:
        """Whether it still answers anything."""
        try:
            status, _ = replace(self, timeout=min(self.timeout, 10.0))._exchange("GET", "/health", None, "", {})
        except SendError:
            return False
        return status < 500

    def body(self, line: PromptLine) -> tuple[str, dict[str, Any]]:
        """(route, what is sent)."""
        if line.along is not None:
            return ways.body(line, self.way, self.model, self.top)
        common: dict[str, Any] = {
            "model": self.model, "max_tokens": line.max_tokens or self.max_tokens, "temperature": 0.0, "seed": 0,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        if line.stop:
            common["stop"] = list(line.stop)
        if line.messages is not None:
            return "/v1/chat/completions", common | {
                "messages": list(line.messages), "logprobs": True, "top_logprobs": self.top
            }  # fmt: skip
        prompt = line.text if line.token_ids is None else list(line.token_ids)
        return "/v1/completions", common | {"prompt": prompt, "logprobs": self.top}

    def ask(self, line: PromptLine, request_id: str, open_ones: dict[int, socket.socket], zero: float) -> Reply:
        """Sends one prompt and waits. open_ones: where its socket stands meanwhile, so that another thread can close
        it. zero: time.monotonic() at which the pass began. Raises ServerLost, NotForced, OtherIds, SendError."""
        began = time.monotonic()
        if line.along is not None and (why := ways.unsendable(line, self.way, self.score_tokens)):
            return Reply(line.name, round(began - zero, 6), 0.0, refused=why)
        route, body = self.body(line)
        status, answer = self._exchange("POST", route, body, request_id, open_ones)
        reply = Reply(line.name, round(began - zero, 6), round(time.monotonic() - began, 6))
        disabled = status == 403 and route == ways.GENERATE  # what vLLM says there without --enable-scale-out
        if status in (401, 403) and not disabled:
            raise SendError(f"{self.url} wants a key ({status}): put it into VLLM_API_KEY")
        if status != 200:
            if status >= 500 and not self.healthy():
                raise ServerLost(f"the server says {status} and is not healthy")
            return replace(reply, refused=f"HTTP {status}{_field(answer)}")
        if line.along is None:
            return shapes.completion(reply, answer)
        return self._forced(line, replace(reply, forced=self.way), answer)

    def _forced(self, line: PromptLine, reply: Reply, answer: Any) -> Reply:
        """Of a line whose tokens were named. Raises NotForced, OtherIds."""
        if self.way == ways.SCORED:
            reply = shapes.scored(reply, answer, len(line.token_ids or ()))
        else:
            reply = (shapes.generated if self.way == ways.TRACE else shapes.completion)(reply, answer)
        if reply.refused is not None:
            return reply
        got, asked = tuple(reply.token_ids or ()), line.along or ()
        if line.token_ids is not None and reply.prompt_token_ids != list(line.token_ids):
            raise OtherIds("the server read other token ids than were sent: nothing can be compared")
        if got == asked[: len(got)] and len(got) < len(asked):
            return Reply(reply.name, reply.began, reply.seconds, refused="the server's longest sequence is too short")
        if got != asked:
            k = next((k for k, (a, b) in enumerate(zip(got, asked, strict=False)) if a != b), len(asked))
            raise NotForced(
                f"token {k + 1} of {len(asked)} is not the one that was named; to force a server, {ways.HOW_TO}"
            )
        return reply

    def can(self, way: str) -> bool:
        """Whether the server answers with named tokens in this way; it is asked for four. Raises ServerLost."""
        try:
            asking = replace(self, way=way, score_tokens=SCORE_TOKENS)
            return asking.ask(ways.PROBE, ways.PROBE.name, {}, time.monotonic()).refused is None
        except (NotForced, OtherIds):
            return False

    def how_forced(self) -> str | None:
        """The first of `ways.WAYS` that the server can; None where it can none. Raises ServerLost."""
        return next((way for way in ways.WAYS if self.can(way)), None)

    def tokenized(self, text: str) -> list[int] | None:
        """The ids that the server makes of a prompt; None where it does not tell. Raises ServerLost."""
        status, answer = self._exchange("POST", "/tokenize", {"model": self.model, "prompt": text}, "", {})
        found = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return found if isinstance(found, list) and all(type(i) is int for i in found) else None

    def _exchange(
        self, method: str, path: str, body: Any, request_id: str, open_ones: dict[int, socket.socket]
    ) -> tuple[int, Any]:
        """(status, json or None). Raises ServerLost where no answer came."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        headers = {"Accept": "application/json", "Connection": "close"}
        headers |= {"X-Request-Id": request_id} if request_id else {}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        base = parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection.connect()
            open_ones[id(connection)] = connection.sock
            connection.request(method, base + path, data, headers)
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER)
        except TimeoutError:
            raise ServerLost(f"{self.url} did not answer within {self.timeout:g} s (--timeout)") from None
        except ssl.SSLError as e:
            raise ServerLost(f"{self.url}: {_tls(e)}") from None
        except _LOST as e:
            why = getattr(e, "strerror", None) or type(e).__name__
            raise ServerLost(f"{self.url} does not answer ({why})") from None
        finally:
            open_ones.pop(id(connection), None)
            connection.close()
        try:
            return response.status, json.loads(raw)
        except (ValueError, RecursionError):
            return response.status, None


def _tls(e: ssl.SSLError) -> str:
    if isinstance(e, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({e.verify_message}): name its authority's file in SSL_CERT_FILE"
    if e.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "no TLS is spoken there: write http://"
    return f"TLS failed ({e.reason or type(e).__name__})"


def _field(answer: Any) -> str:
    """`` (logprobs)``: the field that a server blames. Its message may quote the prompt, and is not looked at."""
    error = answer.get("error") if isinstance(answer, dict) else None
    name = error.get("param") if isinstance(error, dict) else None
    return f" ({name})" if isinstance(name, str) and re.fullmatch(r"[A-Za-z_]{1,40}", name) else ""
