"""``accprobe gate`` of a running `vllm serve` and a command, from two servers to the first finding: a planted fault's
condition, or, with another chat template, the first token that differs."""

import json
import os
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import CHAT_TEMPLATE
from tokenizers import Tokenizer
from vllm_server import ENV, SMALL

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import replies

pytestmark = pytest.mark.engine
FAULTS = Path(__file__).resolve().parents[2] / "lab" / "planted"
FAULT = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.05, "rows": "decode"}


def test_a_fault_in_decode(server, served_model, preloaded_vllm, tmp_path, monkeypatch, capsys):
    """Golden's own batches are the limit here, which on a CPU is none: another two servers would be a minute."""
    draw = random.Random(5)
    asked = [{"id": f"decode{i}", "token_ids": [draw.randrange(10, 500) for _ in range(12 + 13 * i)]} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, value in (
        ENV | {"OMP_NUM_THREADS": "1", "ACCPROBE_FAULT": json.dumps(FAULT), "PYTHONPATH": path}
    ).items():
        monkeypatch.setenv(name, value)
    command = shlex.join(
        [
            str(preloaded_vllm / "vllm"),
            "serve",
            str(served_model),
            "--host=127.0.0.1",
            *SMALL,
            "--max-num-batched-tokens=64",
            "--enforce-eager",  # as golden is, which captures: what is compiled rounds in other places
        ]
    )
    out = tmp_path / "out"
    words = ["gate", server.url, command, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(out), "--max-tokens=6"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAIL: further away than golden is from itself in batches, only decode (8 prompts")
    golden, mine = (replies.read(out / side) for side in ("golden", "mine"))
    assert [p["arrive"] for p in mine.about["passes"]] == ["one", "all", "score"]
    for p in (0, 1):
        assert {n: r.token_ids for n, r in mine.passes[p].items()} == {
            n: r.token_ids for n, r in golden.passes[0].items()
        }
    rows = replies.read_steps(out / "mine").rows(0, "decode7")
    assert [row[1] for row in rows[:2]] == [0, 64]
    table = {c["condition"]: c for c in json.loads((out / "gate.json").read_text())["cells"]}
    # A last chunk of one row is decode to the fault, and prefill to the table.
    assert table["prefill"]["away"] < table["decode"]["away"]
    assert table["decode"]["away"] > 0.01
    assert {"chunk 1", "chunk 2-3"} <= table.keys()
    assert main(words) == 1
    assert len(list((out / "mine").glob("engine-*.log"))) == 1


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
ASKED: list[dict[str, Any]] = [
    {"id": "chat", "messages": [{"role": "user", "content": "the quick brown fox"}]},
    {"id": "turns", "messages": [{"role": r, "content": c} for r, c in
                                 (("system", "be short"), ("user", "one"), ("assistant", "two"), ("user", "three"))]},
    {"id": "tools", "messages": [{"role": "user", "content": "rain?"}], "tools": TOOLS,
     "chat_template_kwargs": {"unused": True}},
    # greedy: vLLM 0.32 on a CPU ends where a request with a generator is computed in chunks (_bookkeeping_sync)
    {"id": "punished", "messages": [{"role": "user", "content": "again and again and again"}],
     "repetition_penalty": 1.5, "min_tokens": 6},
    {"custom_id": "biased", "url": "/v1/completions",
     "body": {"prompt": "the tokens go by", "logit_bias": {"65": 100}, "model": "other"}},
    {"id": "choice", "prompt": "the model reads", "structured_outputs": {"choice": ["row by row", "by chance"]}},
    *({"id": f"plain{i}", "prompt": "A number on one machine " * (i + 1)} for i in range(3)),
]  # fmt: skip


def test_another_chat_template(server, served_model, preloaded_vllm, tmp_path, monkeypatch, capsys):
    """Mine ends a message with a blank, not with a line's end. The numbers are compared along golden's token ids, and
    are the same; log-probabilities are those before what a sampler changes, and after what a grammar forbids."""
    (tmp_path / "mine.jinja").write_text(CHAT_TEMPLATE.replace("<|im_end|>\n", "<|im_end|> "))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ASKED))
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    words = [str(preloaded_vllm / "vllm"), "serve", str(served_model), "--host=127.0.0.1", *SMALL, "--enforce-eager",
             "--max-num-batched-tokens=64", f"--chat-template={tmp_path / 'mine.jinja'}"]  # fmt: skip
    out = tmp_path / "out"
    asked = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(out), "--max-tokens=6"]
    assert main(["gate", server.url, shlex.join(words), *asked]) == 1
    tokenizer = Tokenizer.from_file(str(served_model / "tokenizer.json"))
    text = "<|im_start|>user\nthe quick brown fox<|im_end|>{}<|im_start|>assistant\n"
    ours, theirs = (tokenizer.encode(text.format(end), add_special_tokens=False).ids for end in "\n ")
    k = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        f"FAIL: prompt chat: golden renders {len(ours)} tokens, mine {len(theirs)}: they differ first at position {k}: "
        f"golden {ours[k]} ('\\n'), mine {theirs[k]} (' '): chat template or tokenizer"
    )
    assert said[1] == "4 of 4 chats differ: also turns, tools, punished"
    assert said[2].startswith("with golden's token ids for both: ")
    written = json.loads((out / "gate.json").read_text())
    assert (written["verdict"], written["rendering"]["prompts"], written["notes"]) == ("fail", 4, [])
    assert written["numbers"] != "fail"
    golden, mine = (replies.read(out / side) for side in ("golden", "mine"))
    assert all(r.refused is None for one in (*golden.passes, *mine.passes) for r in one.values())
    assert {n: (r.prompt_token_ids, r.token_ids) for n, r in mine.passes[0].items()} == {
        n: (r.prompt_token_ids, r.token_ids) for n, r in golden.passes[0].items()
    }
    assert golden.passes[0]["chat"].prompt_token_ids == ours
    first, _, scored = mine.passes
    biased = first["biased"]
    assert biased.token_ids == [65] * 6
    assert biased.logprobs == pytest.approx((scored["biased"].logprobs or [])[-6:], abs=1e-4)
    assert all(value < best[1][0] for value, best in zip(biased.logprobs or [], biased.top or [], strict=True))
    assert first["punished"].logprobs == pytest.approx(golden.passes[0]["punished"].logprobs, abs=1e-4)
    assert min(first["choice"].top[0][1] if first["choice"].top else [0.0]) < -1000  # what the grammar forbids
