"""A `vllm` command without vLLM: serves numbers that depend on its own words and environment, as a bad card's would.

FAKE_FAULT: a JSON list of sets, each a list of words or NAME=VALUE; where all of one set are there, log-probabilities
are off by half a nat. FAKE_ROUNDING: the same, by 0.01 nats up and down; FAKE_BROKEN: by 5; FAKE_DEAD: for a server
that ends before it serves; FAKE_LOST: for one that ends in the middle; FAKE_STARTS: a file that gets a line for each
start.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from odd_server import Answer, Ended, odd


def install(folder: Path) -> Path:
    """Makes the command ``vllm`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vllm"
    here = Path(__file__).resolve().parent
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[str(here), str(here.parent / 'sending')]}\n"
                    "from settings_server import main\nmain(sys.argv)\n")  # fmt: skip
    path.chmod(0o700)
    return path


def holds(name: str, words: list[str]) -> bool:
    """Whether one of the sets of this variable is there."""
    joined = " ".join(words)

    def there(part: str) -> bool:
        if part.startswith("$"):
            variable, _, value = part[1:].partition("=")
            return os.environ.get(variable) == value
        return part[1:] not in joined if part.startswith("!") else part in joined

    return any(all(there(p) for p in one) for one in json.loads(os.environ.get(name, "[]")))


def answers(words: list[str]) -> Answer:
    """What the command answers. Raises Ended."""
    if starts := os.environ.get("FAKE_STARTS"):
        with open(starts, "a") as f:
            f.write(" ".join(words) + "\n")
    if holds("FAKE_DEAD", words):
        raise Ended(3)
    bad, lost = 0.5 * holds("FAKE_FAULT", words), holds("FAKE_LOST", words)
    rounds = 0.01 * holds("FAKE_ROUNDING", words) + 5.0 * holds("FAKE_BROKEN", words)
    asked = [0]

    def said(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        asked[0] += bool(body)
        if lost and asked[0] > 3:
            return 0, b""
        return 200, json.dumps(answer(body, bad, rounds) if body else {"version": "0.32.0"}).encode()

    return said


def main(argv: list[str]) -> None:
    """As a command."""
    port = next(int(w.partition("=")[2]) for w in argv if w.startswith("--port="))
    try:
        said = answers(argv[1:])
    except Ended as e:
        print("ValueError: no such combination")
        sys.exit(e.args[0])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # and for the threads that follow
    with odd(said, forced=True, port=port):
        signal.sigwait({signal.SIGTERM})  # a handler that sets an Event can stop within the wait, which has its lock


def answer(body: dict[str, Any], bad: float, rounds: float) -> dict[str, Any]:
    """Four tokens, of a prompt of token ids."""
    ids = body["prompt"]
    chosen = [-0.25 - 0.01 * ((sum(ids) + k) % 7) - bad + rounds * (-1) ** k for k in range(4)]
    tops = [{f"token_id:{100 * (i + 1) + k}": v - 2.0 * i for i in range(6)} for k, v in enumerate(chosen)]
    choice = {
        "token_ids": [100 + k for k in range(4)], "prompt_token_ids": ids, "finish_reason": "length",
        "logprobs": {"token_logprobs": chosen, "top_logprobs": tops},
    }  # fmt: skip
    return {"choices": [choice], "usage": {}}
