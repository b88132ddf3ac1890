"""The same few requests for every run of a server, one after the other.

The problem: what is computed depends on what else is in the batch, so that two runs are the same only if their requests
come in the same order and none beside another. The idea: each is sent when the answer of the one before is there,
greedily sampled, with a fixed id. Of the answers only a hash is kept: no text of a request or an answer is written
anywhere by us. Not here: starting the server (run/background.py), what its dump says (same_bits.py).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.run.server_command import ServerCommand

PROMPTS = (
    "The first computers filled whole rooms, and",
    "Q: What is 17 times 23?\nA: 17 times 23 is",
    "def mean(values):\n    return sum(values) /",
    "Water boils at a lower temperature on a mountain, because the air up there has less pressure. The same holds for",
)
"""chosen: short, of several lengths, in words and in code."""
LOGPROBS = 5
_MOST_PROMPTS = 256
_MOST_BYTES = 4 << 20

Prompt = str | tuple[int, ...]


class AskingError(Exception):
    """The server did not come up, or refused a request; one line."""


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """A prompt on each line: JSON (a text, a list of token ids, or an object with ``prompt`` or ``prompt_token_ids``)
    or, where the line is none, the line itself. Raises AskingError; OSError."""
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise AskingError(f"{path}: more than {_MOST_BYTES >> 20} MB of prompts")
    found = [_prompt(line, path, number) for number, line in enumerate(data.decode(errors="replace").splitlines(), 1)
             if line.strip()]  # fmt: skip
    if not found or len(found) > _MOST_PROMPTS:
        raise AskingError(f"{path}: {len(found)} prompts; give 1 to {_MOST_PROMPTS}")
    return tuple(found)


def _prompt(line: str, path: Path, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict):
        value = value.get("prompt", value.get("prompt_token_ids"))
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, (int, float)):  # a line of plain text that happens to be a number
        return line
    raise AskingError(f"{path}, line {number}: neither a text nor a list of token ids, nor an object with `prompt`")


class Client:
    """The requests of one server. alive: whether its command still runs; until: time.monotonic() that ends it."""

    def __init__(self, command: ServerCommand, alive: Callable[[], bool], until: float):
        self._url, self._key = command.url, command.key
        self._alive, self._until = alive, until
        # What a proxy of the environment would see is for this machine only.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ready(self) -> bool:
        """Waits until the server answers; False where its command has ended instead. Raises AskingError when it is
        time to give up."""
        while time.monotonic() < self._until:
            if not self._alive():
                return False
            try:
                with self._opener.open(f"{self._url}/health", timeout=2):
                    return True
            except urllib.error.HTTPError as error:
                if error.code in (401, 403, 404):  # it listens, and has another idea of who may ask
                    return True
                time.sleep(0.25)
            except (OSError, http.client.HTTPException):
                time.sleep(0.25)
        raise AskingError(f"the server did not answer {self._url}/health in time (--timeout)")

    def ask(self, prompts: Sequence[Prompt], max_tokens: int) -> list[str]:
        """Sends all, and gives a hash of each answer: its texts, tokens and log-probabilities. Raises AskingError."""
        models = self._json("/v1/models", None, "")
        try:
            model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise AskingError(f"{self._url}/v1/models names no model: is it an OpenAI-compatible server?") from None
        return [self._ask(str(model), prompt, max_tokens, number) for number, prompt in enumerate(prompts)]

    def _ask(self, model: str, prompt: Prompt, max_tokens: int, number: int) -> str:
        body = {
            "model": model, "prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens,
            "temperature": 0.0, "seed": 0, "logprobs": LOGPROBS, "ignore_eos": True,
        }  # fmt: skip
        name = f"accprobe-doctor-{number}"
        answer = self._json("/v1/completions", body, name)
        try:
            said = [[one.get("text"), one.get("logprobs"), one.get("finish_reason")] for one in answer["choices"]]
        except (KeyError, TypeError, AttributeError):
            raise AskingError(f"request {name}: the answer has no choices") from None
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def _json(self, path: str, body: dict[str, Any] | None, name: str) -> Any:
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        what = f"request {name}" if name else path
        left = max(self._until - time.monotonic(), 1.0)
        try:
            with self._opener.open(request, timeout=left) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:  # its body may hold the request's text
            raise AskingError(f"{what}: the server says {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise AskingError(f"{what}: {type(error).__name__}: {why}") from None
        except ValueError:
            raise AskingError(f"{what}: the answer is no JSON") from None
