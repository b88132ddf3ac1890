"""One request to an OpenAI-compatible server, and its answer as numbers.

The problem: of an answer only token ids and log-probabilities can be compared, and OpenAI's routes give texts; a server
that is killed or hangs must be told from one that refuses a prompt. The idea: vLLM is asked for ids
(``return_token_ids``, ``return_tokens_as_token_ids``); what a server that has no such fields leaves out is None. The
standard library's http.client: a request on a connection of its own needs no more, and no proxy of the environment
sees a prompt. No text of a request or an answer is in an error.
Not here: when (arrival.py, passes.py), where it is kept (replies.py).
"""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from vllm_accprobe.gate.sending.prompts import PromptLine

_TOKEN = "token_id:"
_LOST = (OSError, http.client.HTTPException)
MAX_ANSWER = 1 << 30
"""Chosen: bytes; 8,000 tokens with 20 log-probabilities each are 10 MB."""


class SendError(Exception):
    """One line: the server cannot be asked at all."""


class ServerLost(SendError):
    """One line: it answered before, and does not any more."""


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt, one list entry for each generated token.

    prompt_token_ids, token_ids: None where the server does not say. logprobs: of the token that was chosen, natural;
    top: (ids, log-probabilities) of the most likely, best first, the ids None where the server gives texts; margins:
    the best log-probability minus the second, None where there is no second. finish: stop or length. cached: prompt
    tokens from the prefix cache. began, seconds: since the pass began. refused: why there is no answer.
    """

    name: str
    began: float
    seconds: float
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    top: list[tuple[list[int] | None, list[float]]] | None = None
    margins: list[float | None] | None = None
    finish: str | None = None
    cached: int | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Sender:
    """A server. url: http(s)://host:port, a path in front of /v1 allowed. key: a bearer token, never shown. timeout:
    seconds without an answer after which it is taken for hung. top: log-probabilities for each token."""

    url: str
    key: str = ""
    timeout: float = 600.0
    top: int = 20
    max_tokens: int = 32
    model: str = ""

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
        status, models = self._exchange("GET", "/v1/models", None, "", {})
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
        it. zero: time.monotonic() at which the pass began. Raises ServerLost, SendError."""
        route, body = self.body(line)
        began = time.monotonic()
        status, answer = self._exchange("POST", route, body, request_id, open_ones)
        reply = Reply(line.name, round(began - zero, 6), round(time.monotonic() - began, 6))
        if status in (401, 403):
            raise SendError(f"{self.url} wants a key ({status}): put it into VLLM_API_KEY")
        if status != 200:
            if status >= 500 and not self.healthy():
                raise ServerLost(f"the server says {status} and is not healthy")
            return replace(reply, refused=f"HTTP {status}{_field(answer)}")
        return understood(reply, answer)

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


def understood(reply: Reply, answer: Any) -> Reply:
    """A reply with what the json of either route says; refused where it is no answer of a completion."""
    try:
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        said = choice.get("logprobs")
        if isinstance(said, dict) and "content" in said:
            content = said["content"] or []
            chosen = [_number(c.get("logprob")) for c in content]
            tops = [_top([(t["token"], t["logprob"]) for t in c.get("top_logprobs") or []]) for c in content]
        elif isinstance(said, dict):
            chosen = [_number(v) for v in said.get("token_logprobs") or []]
            tops = [_top(list((t or {}).items())) for t in said.get("top_logprobs") or []]
        else:
            return replace(reply, refused="an answer without log-probabilities")
        return replace(
            reply,
            prompt_token_ids=_ids(prompt),
            token_ids=_ids(choice.get("token_ids")),
            logprobs=chosen,
            top=tops,
            margins=[round(t[1][0] - t[1][1], 6) if len(t[1]) > 1 else None for t in tops],
            finish=str(choice.get("finish_reason")),
            cached=details.get("cached_tokens") if isinstance(details, dict) else None,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return replace(reply, refused="an answer that is none of a completion")


def _field(answer: Any) -> str:
    """`` (logprobs)``: the field that a server blames. Its message may quote the prompt, and is not looked at."""
    error = answer.get("error") if isinstance(answer, dict) else None
    name = error.get("param") if isinstance(error, dict) else None
    return f" ({name})" if isinstance(name, str) and re.fullmatch(r"[A-Za-z_]{1,40}", name) else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _ids(value: Any) -> list[int] | None:
    return [int(v) for v in value] if isinstance(value, list) else None


def _top(pairs: list[tuple[str, float]]) -> tuple[list[int] | None, list[float]]:
    """Best first; equal ones by id, so that their order says nothing about the server."""
    known = [(token, float(value)) for token, value in pairs if isinstance(value, (int, float))]
    if all(token.startswith(_TOKEN) for token, _ in known):
        numbered = sorted(((int(token[len(_TOKEN) :]), value) for token, value in known), key=lambda p: (-p[1], p[0]))
        return [i for i, _ in numbered], [v for _, v in numbered]
    return None, sorted((v for _, v in known), reverse=True)
