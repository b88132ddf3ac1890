"""The child process of gate_lab.py: engines one after another, each of which fills a folder of `send`.

The problem: the laboratory of the gate needs dozens of servers, and most of a server's start is importing vLLM. The
idea: one process builds an engine for each job and sends it the requests of all passes as `accprobe send` would, with
the same words to our plugin, which forces the tokens and writes the steps; only HTTP is missing (its own tests have
it). A job is a line of json, the answer too. Not here: the cases (gate_pairs.py), running and judging (gate_lab.py).
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support import engine_worker

from vllm_accprobe.gate.sending import passes as along, prompts as prompts_file, replies
from vllm_accprobe.gate.sending.client import Reply, _best, margins_of
from vllm_accprobe.gate.sending.prompts import PromptLine

TOP = 20
ARRIVE = ("one", "all", along.SCORE)


def fill(job: dict[str, Any]) -> None:
    """job: model, engine (LLM's arguments), env, fault, prompts (a file), golden (a folder, or empty), out."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE_") or n == "ACCPROBE_FAULT"]:
        del os.environ[name]
    out = Path(job["out"])
    os.environ |= {"VLLM_ACCPROBE_FORCE": str(out / replies.folder_name(0))} | job["env"]
    if job["fault"]:
        os.environ["ACCPROBE_FAULT"] = job["fault"]
    from vllm_accprobe.plugin import register

    register()
    engine_worker.spare_the_imports()
    registry._run_in_subprocess = lambda inspect: inspect()
    golden = replies.read(Path(job["golden"])) if job["golden"] else None
    lines = along.forced_lines(golden) if golden else prompts_file.read(job["prompts"])
    digest = along.digest(golden) if golden else None
    llm = LLM(model=job["model"], **(engine_worker.DEFAULTS | {"max_logprobs": TOP} | job["engine"]))
    plan = along.Forcing("accprobe", digest, True)
    passes = [{"arrive": word, "answered": len(lines), "refused": 0, "resumed": 0} for word in ARRIVE]
    about = {"schema": replies.SCHEMA, "prompts": {"count": len(lines), "sha256": prompts_file.digest(lines)}}
    about |= {"passes": passes, "complete": False} | ({"along": {"sha256": digest, "how": plan.how}} if digest else {})
    replies.begin(out, prompts_file.to_text(lines), about)
    try:
        for index, word in enumerate(ARRIVE):
            first = replies.read_pass(out, 0) if index else {}
            writer = replies.ReplyWriter(out / replies.pass_name(index))
            for reply in _pass(llm.llm_engine, index, word, plan.lines(index, word, lines, first)):
                writer.add(reply)
            writer.close()
    finally:
        engine_worker._end(llm)
    replies.write_about(out, about | {"complete": True})


def _pass(engine: Any, index: int, word: str, lines: list[PromptLine]) -> list[Reply]:
    waiting, found = list(lines), []
    by_id = {replies.request_id(line.name, index): line for line in lines}
    while waiting or engine.has_unfinished_requests():
        join = len(waiting) if word == "all" else int(not engine.get_num_unfinished_requests())
        for line in waiting[:join]:
            ids = list(line.token_ids or ()) + (list(line.along or ()) if word == along.SCORE else [])
            prompt = {"prompt_token_ids": ids}
            engine.add_request(replies.request_id(line.name, index), prompt, _sampling(line, word))
        del waiting[:join]
        for output in engine.step():
            if output.finished:
                found.append(_reply(output, by_id[output.request_id], word))
    return found


def _sampling(line: PromptLine, word: str) -> Any:
    from vllm import SamplingParams

    if word == along.SCORE:
        return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    named = {"accprobe_along": " ".join(map(str, line.along))} if line.along else None
    tokens = len(line.along) if line.along else line.max_tokens
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, logprobs=TOP, ignore_eos=True, detokenize=False, extra_args=named
    )


def _reply(output: Any, line: PromptLine, word: str) -> Reply:
    if word == along.SCORE:
        ids = list(output.prompt_token_ids)
        places, prompt, answer = output.prompt_logprobs[1:], ids[:1], ids[1:]
    else:
        places, prompt = output.outputs[0].logprobs, list(output.prompt_token_ids)
        answer = list(output.outputs[0].token_ids)
    numbers = [{int(t): float(p.logprob) for t, p in place.items()} for place in places]
    if line.along and word != along.SCORE and tuple(answer) != line.along:
        raise RuntimeError(f"{line.name} was not forced")
    tops = [_best(place) for place in numbers]
    chosen = [place[t] for place, t in zip(numbers, answer, strict=True)]
    how = "scored" if word == along.SCORE else "accprobe" if line.along else None
    return Reply(line.name, 0.0, 0.0, prompt, answer, chosen, tops, margins_of(tops), "length", None, None, how)


def answered(job: dict[str, Any]) -> dict[str, Any]:
    fill(job)
    return {}


if __name__ == "__main__":
    engine_worker.main(answered)
