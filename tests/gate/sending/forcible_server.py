"""A server by hand that can be forced: one answer for each of the ways, with numbers that tell what was asked."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from odd_server import Answer, odd, running

from vllm_accprobe import arm_file
from vllm_accprobe.gate.sending import client


def forcible(can: Collection[str], *, swaps: bool = False, vocabulary: int = 1) -> Answer:
    """can: of `ways.WAYS`. swaps: its last named token is another. vocabulary: times the length of a text is its id.
    The log-probability of token i is -i / 100, and the best is token 1 with -0.01."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, json.dumps({"tokens": [len(body["prompt"]) * vocabulary]}).encode()
        if path == "/inference/v1/generate" and client.TRACE in can:
            ids = list(body["sampling_params"]["trace_decode_token_ids"])
            content = [_place(i) | {"top_logprobs": [_place(i), _place(1)]} for i in _swapped(ids, swaps)]
            choice = {"token_ids": _swapped(ids, swaps), "finish_reason": "length", "logprobs": {"content": content}}
            return 200, json.dumps({"choices": [choice], "prompt_token_ids": body["token_ids"]}).encode()
        if path != "/v1/completions" or (body.get("prompt_logprobs") and client.SCORED not in can):
            return 404, b""
        named = (body.get("vllm_xargs") or {}).get(client.KEY)
        ids = [2] * body["max_tokens"]
        if named is not None and client.PLUGIN in can:
            ids = _swapped([int(i) for i in named.split()], swaps)
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [len(body["prompt"])]
        top = [{f"token_id:{i}": -i / 100, "token_id:1": -0.01} for i in ids]
        choice = {"token_ids": ids, "prompt_token_ids": prompt, "finish_reason": "length",
                  "logprobs": {"token_logprobs": [-i / 100 for i in ids], "top_logprobs": top}}  # fmt: skip
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [None, *({str(j): {"logprob": -j / 100} for j in {i, 1}} for i in prompt[1:])]
        return 200, json.dumps({"choices": [choice]}).encode()

    return answer


def _place(i: int) -> dict[str, Any]:
    return {"token_id": i, "logprob": -i / 100}


def _swapped(ids: list[int], swaps: bool) -> list[int]:
    return [*ids[:-1], ids[-1] + 1] if swaps else ids


class Machine:
    """Starts such servers in place of gate/served_run.py's `served`. write: writes a dump where the capture is to be.
    starts: each one's command and environment; asked: each request, with what was armed then; salts: its cache_salt."""

    def __init__(self, write: Callable[[Path], object]) -> None:
        self.write, self.vocabulary, self.breaks = write, 1, False
        self.starts: list[tuple[str, Mapping[str, str]]] = []
        self.asked: list[tuple[str, dict[str, Any] | None]] = []
        self.salts: list[str | None] = []

    @contextlib.contextmanager
    def served(self, name: str, command: str, environ: Mapping[str, str], out: Path, *_: object) -> Iterator[Any]:
        self.starts.append((command, environ))
        dump = Path(environ["VLLM_ACCPROBE_DIR"])
        self.write(dump)
        answers = forcible(client.WAYS, vocabulary=self.vocabulary)

        def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            if self.breaks and len(seen) > 6:
                return 0, b""
            if seen and path.startswith("/v1/completions"):
                control = dump / arm_file.NAME
                self.asked.append((seen[-1][1], arm_file.read(control).to_json() if control.exists() else None))
                self.salts.append(body.get("cache_salt"))
            return answers(path, body)

        with odd(answer, forced=True) as (url, seen):
            yield running(url, out / f"engine-{len(self.starts) - 1}.log")
