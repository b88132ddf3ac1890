"""A `vllm serve` that starts at once: numbers that depend on dtype and fault, tokens that can be forced.

Put into a folder on PATH as `vllm` (`installed`). Options: --dtype (float8 is refused), --fault SIZE, --dies-after N
(answers, then the process ends without a word), --template NAME (old: a chat's messages are rendered in another way;
none: they are refused; gone: there is no /tokenize).
"""

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import odd_server

HERE = Path(__file__).resolve().parent
ROUNDING = {"bfloat16": 0.02, "float16": 0.0025, "float32": 1e-6}


def installed(folder: Path) -> str:
    """The folder, with `vllm` in it; for PATH."""
    folder.mkdir(exist_ok=True)
    script = folder / "vllm"
    paths = [str(HERE), str(HERE / "sending"), str(HERE.parents[1])]
    code = f"import sys; sys.path[:0] = {paths!r}; import fake_vllm; fake_vllm.main()"
    # A shell's script: nobody can read from it which interpreter, and which vLLM, it starts.
    script.write_text(f"#!/bin/sh\nset -e\nexec {shlex.join([sys.executable, '-c', code])} \"$@\"\n")
    script.chmod(0o755)
    return str(folder)


def main() -> None:
    """`vllm serve MODEL --port=N ...`"""
    words = sys.argv[1:]
    with odd_server.odd(answers(words), forced=True, port=int(option(words, "--port", "0"))):
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        while not stop.is_set():
            time.sleep(0.02)


def answers(words: list[str]) -> odd_server.Answer:
    """What the command answers. Ends this process where it should."""
    dtype, fault = option(words, "--dtype", "bfloat16"), float(option(words, "--fault", "0"))
    dies, template = int(option(words, "--dies-after", "0")), option(words, "--template", "")
    if dtype not in ROUNDING:
        sys.exit("no such dtype")
    answered = [0]

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path in ("/health", "/version"):
            return 200, b"{}"
        if "messages" in body and template == "none":
            return 400, json.dumps({"error": {"message": "no chat template"}}).encode()
        if path == "/tokenize" and "messages" in body:
            return (404, b"") if template == "gone" else (200, json.dumps(rendered(body, template)).encode())
        if path == "/tokenize":
            return 200, json.dumps({"tokens": ids_of(body["prompt"])}).encode()
        if path == "/v1/chat/completions":
            body["prompt"] = rendered(body, template)["tokens"]
            return 200, json.dumps(as_chat(completion(body, dtype, fault))).encode()
        if path != "/v1/completions" or body.get("prompt_logprobs"):
            return 404, b""
        answered[0] += 1
        if dies and answered[0] > dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return 200, json.dumps(completion(body, dtype, fault)).encode()

    return answer


def option(words: list[str], name: str, default: str) -> str:
    return next((w.split("=", 1)[1] for w in reversed(words) if w.startswith(name + "=")), default)


def ids_of(prompt: str | list[int]) -> list[int]:
    """Of a text one for each letter, all the same."""
    return list(prompt) if isinstance(prompt, list) else [7] * len(prompt)


def rendered(body: dict[str, Any], template: str) -> dict[str, Any]:
    """An answer of /tokenize: a token for each letter of the messages; one between them, and of the old template two.
    What the template's own arguments name comes last."""
    end = ["\u010a", "\u010a"] if template == "old" else ["\u010a\u010a"]
    pieces = [piece for m in body["messages"] for piece in [*m["content"], *end]]
    pieces += (body.get("chat_template_kwargs") or {}).get("end", [])
    return {"tokens": [198 if p == "\u010a" else 271 if len(p) > 1 else ord(p) for p in pieces], "token_strs": pieces}


def as_chat(answer: dict[str, Any]) -> dict[str, Any]:
    """A completion's answer as one of a chat."""
    choice = answer["choices"][0]
    old = choice["logprobs"]
    content = [
        {"token": "", "logprob": x, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
        for x, top in zip(old["token_logprobs"], old["top_logprobs"], strict=True)
    ]
    return {"choices": [choice | {"logprobs": {"content": content}}], "prompt_token_ids": choice["prompt_token_ids"]}


def completion(body: dict[str, Any], dtype: str, fault: float) -> dict[str, Any]:
    """Token k of a prompt of n ids: five candidates, as tests/gate/made_folders.py has them."""
    import numpy as np

    prompt = ids_of(body["prompt"])
    named = (body.get("vllm_xargs") or {}).get("accprobe_along")
    forced = [int(i) for i in named.split()] if named else []
    ids, chosen, tops = [], [], []
    for k in range(len(forced) or body["max_tokens"]):
        base = np.array([-0.4, -1.6, -3.0, -4.0, -5.0]) - 0.01 * ((len(prompt) * 7 + k * 3) % 11)
        seeds = np.random.default_rng((len(dtype), ord(dtype[-1]), len(prompt), k))
        values = base + seeds.normal(0, ROUNDING[dtype], 5)
        values += np.random.default_rng((len(prompt), k)).normal(0, fault, 5) if fault and k else 0
        names = [100 + 5 * k + i for i in range(5)]
        token = forced[k] if forced else names[int(values.argmax())]
        ids.append(token)
        place = dict(zip(names, values.tolist(), strict=True))
        chosen.append(place.get(token, -9.0))
        tops.append({f"token_id:{i}": v for i, v in (place | {token: chosen[-1]}).items()})
    logprobs = {"token_logprobs": chosen, "top_logprobs": tops}
    choice = {"token_ids": ids, "prompt_token_ids": prompt, "finish_reason": "length", "logprobs": logprobs}
    return {"choices": [choice]}
