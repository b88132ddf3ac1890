"""One request to an OpenAI-compatible server, and its answer as numbers.

The problem: of an answer only token ids and log-probabilities can be compared, OpenAI's routes give texts, and after
the first token that two servers choose differently nothing more can be compared. The idea: vLLM is asked for ids, every
shape of answer becomes one `Reply`, and a server is made to answer with named tokens in the first of `WAYS` that works:
our plugin (VLLM_ACCPROBE_FORCE=1) replaces sampled tokens, and all code runs as in serving; vLLM's trace replay (0.32
on, model runner V2); or prompt and answer scored as one prompt, which exercises no decode kernel, no prefix cache and
no batch of decodes. http.client: no proxy of the environment sees a prompt; a refusal has the words of the server,
without the prompt.

Not here: which tokens and when (passes.py), where replies are kept (replies.py).
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from vllm_accprobe.dump.decode import fits, value_at
from vllm_accprobe.dump.schema import OWN_REQUEST
from vllm_accprobe.gate.sending.prompts import SAMPLING, PromptLine

PLUGIN, TRACE, SCORED = "accprobe", "trace replay", "scored"
WAYS = (PLUGIN, TRACE, SCORED)
KEY = "accprobe_along"
"""The same word as in capture/vllm/sampling.py."""
GENERATE = "/inference/v1/generate"
PROBE = PromptLine(OWN_REQUEST, token_ids=tuple(range(3, 19)), along=(7, 3, 9, 4))
"""The request that shows whether a server can: ids that every vocabulary has, in an order that no model chooses.
Not fewer than five: see capture/vllm/runner.allow_tiles, which a server that we did not start lacks."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0}
"""What is sent where a prompt's parameters do not say otherwise."""
ADDED = frozenset(("add_special_tokens",))
"""The parameter of /tokenize for a text."""
_BESIDE = frozenset(("priority", "cache_salt"))
"""Parameters that /inference/v1/generate has beside those of sampling."""
NOT_EXERCISED = "scored as part of a prompt: decode kernels and the prefix cache are not exercised"
HOW_TO_FORCE = (
    "start it with VLLM_ACCPROBE_FORCE=1 (accprobe installed there, no speculative decoding), or vLLM from 0.32 on "
    "with --enable-trace-replay --enable-scale-out"
)


def unsendable(line: PromptLine, way: str | None, longest: int) -> str | None:
    """Why ``line``, whose tokens are named, is not sent at all. longest: tokens that are scored."""
    assert line.along is not None
    if not line.along:
        return "no answer to go along"
    if line.token_ids is None and way != PLUGIN:
        return f"images are not sent along by {way}"
    if way == TRACE and "response_format" in line.parameters:
        return f"response_format is not sent by {way}: write structured_outputs"
    if way == SCORED and len(line.token_ids or ()) + len(line.along) > longest:
        return f"longer than {longest:,} tokens with its answer (--score-tokens)"
    return None


def forced_body(line: PromptLine, way: str | None, model: str, top: int) -> tuple[str, dict[str, Any]]:
    """(route, what is sent) for a line whose tokens are named."""
    assert line.along is not None
    n = len(line.along)
    length: dict[str, Any] = {"max_tokens": n, "ignore_eos": True}
    if "min_tokens" in line.parameters:
        length["min_tokens"] = min(line.parameters["min_tokens"], n)
    if way == TRACE:
        params = GREEDY | line.only(SAMPLING) | length
        params |= {"logprobs": top, "trace_decode_token_ids": list(line.along), "detokenize": False}
        body = {"model": model, "token_ids": list(line.token_ids or ()), "return_token_ids": True}
        return GENERATE, body | line.only(_BESIDE) | {"sampling_params": params}
    common = {"model": model, "return_token_ids": True, "return_tokens_as_token_ids": True} | GREEDY
    if way == SCORED:  # what a server reads is not sampled
        whole = [*(line.token_ids or ()), *line.along]
        how = {"prompt": whole, "prompt_logprobs": top, "max_tokens": 1, "ignore_eos": True}
        return "/v1/completions", common | how
    extra = {**line.parameters.get("vllm_xargs", {}), KEY: " ".join(map(str, line.along))}
    common |= {**line.parameters, **length, "vllm_xargs": extra}
    if line.messages is not None:
        return _chat(common, line, top)
    return "/v1/completions", common | {"prompt": list(line.token_ids or ()), "logprobs": top}


def _chat(common: dict[str, Any], line: PromptLine, top: int) -> tuple[str, dict[str, Any]]:
    body = common | {"messages": list(line.messages or ()), "logprobs": True, "top_logprobs": top}
    if "tools" in body:
        body.setdefault("tool_choice", "none")  # they are rendered, and the server needs no parser of calls
    return "/v1/chat/completions", body


_TOKEN = "token_id:"


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt, one list entry for each generated token.

    prompt_token_ids, token_ids: None where the server does not say. logprobs: of the token that was chosen, natural;
    top: (ids, log-probabilities) of the most likely, and of the chosen one where it is not among them, best first, the
    ids None where the server gives texts; margins: the best log-probability minus the second, None where there is no
    second. finish: stop or length. cached: prompt tokens from the prefix cache. began, seconds: since the pass began.
    refused: why there is no answer. forced: the way in which token_ids were named in advance; then top is
    still the server's own. None: they are the server's own choice.
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
    forced: str | None = None


Tops = list[tuple[list[int] | None, list[float]]]
_Read = tuple[Any, Any, list[float | None] | None, Tops, Any, int | None]
"""Ids of the prompt and of the answer, its log-probabilities (None: it has none), the most likely, finish, cached."""


def read(reply: Reply, answer: Any, way: str | None = None, first: int = 0) -> Reply:
    """A reply with what the json of an answer says; refused where it is none. way: in which its tokens were named.
    first: of a prompt that was scored, the number of the token from which on they are taken for an answer."""
    try:
        found = _scored(answer, first) if way == SCORED else (_generated if way == TRACE else _completion)(answer)
        prompt, ids, logprobs, tops, finish, cached = found
        if logprobs is None:
            return replace(reply, refused="an answer without log-probabilities")
        return replace(reply, prompt_token_ids=_ids(prompt), token_ids=_ids(ids), logprobs=logprobs, top=tops,
                       margins=margins_of(tops), finish=str(finish), cached=cached)  # fmt: skip
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        scored = "an answer without log-probabilities of its prompt"
        return replace(reply, refused=scored if way == SCORED else "an answer that is none of a completion")


def margins_of(tops: Tops) -> list[float | None]:
    return [round(values[0] - values[1], 6) if len(values) > 1 else None for _, values in tops]


def _completion(answer: Any) -> _Read:
    """Of either of OpenAI's routes."""
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    logprobs = choice.get("logprobs")
    chosen: list[float | None] | None = None
    tops: Tops = []
    if isinstance(logprobs, dict) and "content" in logprobs:
        content = logprobs["content"] or []
        chosen = [_number(c.get("logprob")) for c in content]
        tops = [_top([(t["token"], t["logprob"]) for t in c.get("top_logprobs") or []]) for c in content]
    elif isinstance(logprobs, dict):
        chosen = [_number(v) for v in logprobs.get("token_logprobs") or []]
        tops = [_top(list((t or {}).items())) for t in logprobs.get("top_logprobs") or []]
    cached = value_at(details, "cached_tokens")
    return prompt, choice.get("token_ids"), chosen, tops, choice.get("finish_reason"), cached


def _generated(answer: Any) -> _Read:
    """Of vLLM's /inference/v1/generate: numbers throughout."""
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    tops = [_best({int(t["token_id"]): t["logprob"] for t in [*c["top_logprobs"], c]}) for c in content]
    chosen = [_number(c["logprob"]) for c in content]
    prompt, cached = answer.get("prompt_token_ids"), details.get("cached_tokens")
    return prompt, choice["token_ids"], chosen, tops, choice.get("finish_reason"), cached


def _scored(answer: Any, first: int) -> _Read:
    """Of a prompt that vLLM scored (``prompt_logprobs``)."""
    choice = answer["choices"][0]
    scores, ids = choice["prompt_logprobs"], choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    places = [{int(i): t["logprob"] for i, t in place.items()} for place in scores[first:]]
    chosen = [int(i) for i in ids[first:]]
    logprobs = [_number(place[i]) for place, i in zip(places, chosen, strict=True)]
    return ids[:first], chosen, logprobs, [_best(place) for place in places], "length", None


def ids_in(answer: Any) -> list[int] | None:
    """The token ids of an answer of /tokenize."""
    found = value_at(answer, "tokens")
    return found if fits(list[int], found) else None


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


def _best(values: dict[int, Any]) -> tuple[list[int] | None, list[float]]:
    known = sorted(((i, float(v)) for i, v in values.items()), key=lambda p: (-p[1], p[0]))
    return [i for i, _ in known], [v for _, v in known]


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


class NotServed(SendError):
    """One line: a command that cannot be started, ended, or answered nothing before it served."""


class NotForced(SendError):
    """One line: it was to answer with named tokens, and gave others."""


class OtherIds(SendError):
    """One line: its token ids do not mean what golden's do. Exit code 3."""


@dataclass(frozen=True)
class Sender:
    """A server. url: http(s)://host:port, a path in front of /v1 allowed. key: a bearer token, never shown. timeout:
    seconds without an answer after which it is taken for hung. top: log-probabilities for each token. way: how it is
    made to answer with the tokens that a line names. score_tokens: longer ones are not scored."""

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
        patient = replace(self, timeout=min(self.timeout, INTRODUCTION_S))
        status, models = patient.exchange("GET", "/v1/models")
        if status in (401, 403):
            raise SendError(f"{self.url} wants a key ({status}): put it into VLLM_API_KEY")
        try:
            first = models["data"][0]
            model = self.model or str(first["id"])
        except (KeyError, IndexError, TypeError):
            raise SendError(
                f"{self.url}/v1/models names no model ({status}): is it an OpenAI-compatible server?"
            ) from None
        _, version = self.exchange("GET", "/version")
        known = {"version": value_at(version, "version"), "model": model}
        return replace(self, model=model), known | {"max_model_len": first.get("max_model_len")}

    def healthy(self) -> bool:
        """Whether it still answers anything."""
        try:
            status, _ = replace(self, timeout=min(self.timeout, 10.0)).exchange("GET", "/health")
        except SendError:
            return False
        return status < 500

    def body(self, line: PromptLine) -> tuple[str, dict[str, Any]]:
        """(route, what is sent)."""
        if line.along is not None:
            return forced_body(line, self.way, self.model, self.top)
        common: dict[str, Any] = {
            "model": self.model, "max_tokens": line.max_tokens or self.max_tokens, "return_token_ids": True,
            "return_tokens_as_token_ids": True, **GREEDY, **line.parameters,
        }  # fmt: skip
        if line.stop:
            common["stop"] = list(line.stop)
        if line.messages is not None:
            return _chat(common, line, self.top)
        prompt = line.text if line.token_ids is None else list(line.token_ids)
        return "/v1/completions", common | {"prompt": prompt, "logprobs": self.top}

    def ask(self, line: PromptLine, request_id: str, open_ones: dict[int, socket.socket], zero: float) -> Reply:
        """Sends one prompt and waits. open_ones: where its socket stands meanwhile, so that another thread can close
        it. zero: time.monotonic() at which the pass began. Raises ServerLost, NotForced, OtherIds, SendError."""
        began = time.monotonic()
        if line.along is not None and (why := unsendable(line, self.way, self.score_tokens)):
            return Reply(line.name, round(began - zero, 6), 0.0, refused=why)
        route, body = self.body(line)
        status, answer = self.exchange("POST", route, body, request_id, open_ones)
        reply = Reply(line.name, round(began - zero, 6), round(time.monotonic() - began, 6))
        disabled = status == 403 and route == GENERATE  # what vLLM says there without --enable-scale-out
        if status in (401, 403) and not disabled:
            raise SendError(f"{self.url} wants a key ({status}): put it into VLLM_API_KEY")
        if status != 200:
            if status >= 500 and not self.healthy():
                raise ServerLost(f"the server says {status} and is not healthy")
            return replace(reply, refused=refusal(status, answer, line))
        if line.along is None:
            return read(reply, answer)
        return self._forced(line, replace(reply, forced=self.way), answer)

    def _forced(self, line: PromptLine, reply: Reply, answer: Any) -> Reply:
        """Of a line whose tokens were named. Raises NotForced, OtherIds."""
        reply = read(reply, answer, self.way, len(line.token_ids or ()))
        if reply.refused is not None:
            return reply
        got, forced = tuple(reply.token_ids or ()), line.along or ()
        if line.token_ids is not None and reply.prompt_token_ids != list(line.token_ids):
            raise OtherIds("the server read other token ids than were sent: nothing can be compared")
        if got == forced[: len(got)] and len(got) < len(forced):
            return Reply(reply.name, reply.began, reply.seconds, refused="the server's longest sequence is too short")
        if got != forced:
            k = next((k for k, (a, b) in enumerate(zip(got, forced, strict=False)) if a != b), len(forced))
            raise NotForced(
                f"token {k + 1} of {len(forced)} is not the one that was named; to force a server, {HOW_TO_FORCE}"
            )
        return reply

    def can(self, way: str) -> bool:
        """Whether the server answers with named tokens in this way; it is asked for four. Raises ServerLost."""
        try:
            asking = replace(self, way=way, score_tokens=SCORE_TOKENS)
            return asking.ask(PROBE, PROBE.name, {}, time.monotonic()).refused is None
        except (NotForced, OtherIds):
            return False

    def how_forced(self) -> str | None:
        """The first of `ways.WAYS` that the server can; None where it can none. Raises ServerLost."""
        return next((way for way in WAYS if self.can(way)), None)

    def tokenized(self, line: PromptLine) -> list[int] | None:
        """The ids that the server makes of a text; None where it does not tell. Raises ServerLost."""
        body = {"model": self.model, "prompt": line.text} | line.only(ADDED)
        status, answer = self.exchange("POST", "/tokenize", body)
        return ids_in(answer) if status == 200 else None

    def exchange(
        self, method: str, path: str, body: Any = None, request_id: str = "",
        open_ones: dict[int, socket.socket] | None = None,
    ) -> tuple[int, Any]:  # fmt: skip
        """(status, json or None) of one request on a connection of its own. open_ones: where its socket stands
        meanwhile. Raises ServerLost where no answer came."""
        open_ones = {} if open_ones is None else open_ones
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


_MOST_SAID = 300
"""Chosen: characters of a server's message."""
_QUOTED = 12
"""Chosen: characters that a message and a prompt have in common; fewer are common words."""


def refusal(status: int, answer: Any, line: PromptLine) -> str:
    """``HTTP 400: `` and the server's words."""
    return f"HTTP {status}{_message(answer, line)}"


def _message(answer: Any, line: PromptLine) -> str:
    """``: This model's maximum context length is ...``: what the server says, in one line. Where it quotes the prompt
    of ``line``, which is a user's, there is ``...``."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    candidates = [error, error.get("message"), error.get("detail")] if isinstance(error, dict) else [error]
    text = next((v for v in candidates if isinstance(v, str)), "")
    for quoted in (line.text, *(m.get("content") for m in line.messages or ())):
        text = _without(text, quoted) if isinstance(quoted, str) else text
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f": {text if len(text) <= _MOST_SAID else text[:_MOST_SAID] + '...'}" if text else ""


def _without(text: str, quoted: str) -> str:
    """``text`` with ``...`` for each stretch of _QUOTED characters, or more, that ``quoted`` has as well."""
    n = min(_QUOTED, len(quoted))
    known = {quoted[i : i + n] for i in range(len(quoted) - n + 1)} if n > 2 else set()
    found, i = "", 0
    while i < len(text):
        j = i
        while text[j : j + n] in known:
            j += 1
        found, i = (found + "...", j + n - 1) if j > i else (found + text[i], i + 1)
    return found
