"""Prompts from a file (jsonl, ShareGPT, OpenAI's batches, plain text), or the 24 that ship with us.

The problem: two captures are comparable only if they got the same prompts under the same names, and most errors need
something special to show: a length beyond a chunk or window, a cached prefix, digits, a script of many tokens for each
word. The idea: each prompt becomes one line of one format (docs/gate.md), with an id that is the same in every run. The
shipped ones have 5 to about 8,000 tokens; long ones are composed with a fixed seed, at 4 characters a token. A line may
have vLLM's parameters, which tables below name; what they do not name is refused before anything is sent.

Not here: sending (client.py), what a server makes of messages (rendering.py).
"""

from __future__ import annotations

import base64
import codecs
import difflib
import hashlib
import json
import mimetypes
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from vllm_accprobe.dump.decode import Text, TokenId, fits
from vllm_accprobe.dump.files import bounded_lines

NAME = "default"
_HEAD = 1 << 16
LENGTHS = (64, 250, 510, 1030, 2050, 4100, 8000)
"""Chosen: tokens, about; around the powers of two at which chunks, blocks and windows end."""
_SHORT = {
    "five": "The capital of France is",
    "count": "One, two, three, four, five, six,",
    "numbers": "3.14159 * 2.71828 = 8.5397; 1234567 + 7654321 = 8888888; 2**31 - 1 = 2147483647; 0.1 + 0.2 =",
    "table": "| n | n squared | n cubed |\n|---|---|---|\n| 1 | 1 | 1 |\n| 2 | 4 | 8 |\n| 3 | 9 | 27 |\n| 4 |",
    "code-python": 'def merge(left, right):\n    """Merges two sorted lists."""\n    out, i, j = [], 0, 0\n    while',
    "code-c": "#include <stdint.h>\n\n/* Adds n bfloat16 numbers in float32. */\nvoid add(const uint16_t *a,",
    "json": '{"name": "probe", "version": 3, "layers": [{"index": 0, "norm": 1.25}, {"index": 1, "norm":',
    "chinese": "请用三句话说明，为什么同一个模型在两种加速卡上会给出不同的结果：",
    "chinese-poem": "春江潮水连海平，海上明月共潮生。滟滟随波千万里，",
    "mixed": "GPU 上的结果是 0.4271，NPU 上的结果是 0.4268。The difference is",
    "repeat": "again and again " * 40 + "and",
    "symbols": "∑ α² ≤ ∫ f(x) dx, ∀ x ∈ ℝ; 🙂 → ☂ → ❄; naïve café; ﬁ ",
}
_SUBJECTS = ("the kernel", "a router", "the cache", "one head", "the sampler", "an expert", "the driver", "a block")
_VERBS = ("reads", "writes", "rotates", "projects", "drops", "keeps", "splits", "adds", "scales", "forgets")
_OBJECTS = ("a page", "every token", "the residual", "two numbers", "its mask", "the prefix", "a key", "the last row")
_WHEN = ("at once", "in the morning", "after the first chunk", "without a word", "twice", "by chance", "as before")


def shipped_lines() -> Iterator[dict[str, Any]]:
    """Objects as a user's jsonl has them."""
    for name, text in _SHORT.items():
        yield {"id": name, "prompt": text}
    for tokens in LENGTHS:
        yield {"id": f"long-{tokens}", "prompt": _story(tokens, seed=tokens)}
    shared = _story(600, seed=1)  # longer than one block of any cache
    for k, end in enumerate(("The first to fail was", "What nobody noticed was", "那一天最先出错的是")):
        yield {"id": f"prefix-{k}", "prompt": f"{shared} {end}"}
    yield {"id": "long-code", "prompt": _table(700)}
    yield {
        "id": "long-chinese",
        "prompt": "第一章。" + "夜里下着雨，机房里只有一盏灯亮着，他又看了一遍那两行数字。" * 30,
    }


def _story(tokens: int, seed: int) -> str:
    draw = random.Random(seed)
    lines: list[str] = []
    left = tokens * 4
    while left > 0:
        words = " ".join(draw.choice(of) for of in (_SUBJECTS, _VERBS, _OBJECTS, _WHEN))
        lines.append(words[0].upper() + words[1:] + ".")
        left -= len(lines[-1]) + 1
    return " ".join(lines)


def _table(tokens: int) -> str:
    """Lines of code with numbers, about three characters for each token."""
    draw = random.Random(2)
    code = "LIMITS = {\n"
    while len(code) < tokens * 3:
        code += f'    "layer_{draw.randrange(96)}": ({draw.random():.6f}, {draw.randrange(1 << 16)}),\n'
    return code + "}\n\ndef largest(limits):\n    return"


DEFAULT = NAME
MAX_IMAGE = 64 << 20
"""Chosen: bytes of an image; a server would refuse it long before."""
MAX_LINE = 8 * MAX_IMAGE
"""Bytes of a line; images lie in it."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
          "system": "system"}  # fmt: skip


SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens",
    "structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking",
))  # fmt: skip
"""Parameters that vLLM's SamplingParams has: they go to every route."""
REQUEST = frozenset(("response_format", "priority", "cache_salt", "vllm_xargs", "add_special_tokens"))
"""Those of a request to either of OpenAI's routes."""
GRAMMAR = frozenset(("structured_outputs", "response_format"))
"""Those that forbid tokens before a server takes log-probabilities [vLLM: v1/worker/gpu_model_runner.py]."""
RENDERING = frozenset((
    "tools", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "media_io_kwargs",
    "mm_processor_kwargs",
))  # fmt: skip
"""Those that change the tokens of a chat's prompt."""
CHAT = RENDERING | {"tool_choice", "parallel_tool_calls", "include_reasoning"}
IGNORED = frozenset((
    "along", "images", "metadata", "model", "logprobs", "top_logprobs", "prompt_logprobs",
    "logprob_token_ids", "return_token_ids", "user", "store", "return_tokens_as_token_ids",
    "return_token_offsets", "return_prompt_text", "stream_options", "stream_interval", "request_id",
    "session_id", "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs", "service_tier",
    "safety_identifier",
))  # fmt: skip
"""Fields that `send` decides itself, or that change no number."""
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "answers are read whole"),
    "n": ((1,), "each prompt has one answer"),
    "best_of": ((1,), "each prompt has one answer"),
    "use_beam_search": ((False,), "each prompt has one answer"),
    "length_penalty": ((1,), "it is for beam search"),
    "echo": ((False,), "an answer is what follows the prompt"),
    "suffix": (("",), "an answer is what follows the prompt"),
    "truncate_prompt_tokens": ((), "both servers get the whole prompt: shorten it"),
    "truncation_side": ((), "both servers get the whole prompt: shorten it"),
    "prompt_embeds": ((), "a prompt has token ids"),
    "kv_transfer_params": ((), "a prompt is computed where it is sent"),
    "ec_transfer_params": ((), "a prompt is computed where it is sent"),
}
"""Parameters with which nothing can be compared: (values that ask for nothing, why)."""
_NEAR = 0.8
"""Chosen: how alike a field and a parameter are (difflib's ratio) where it is a slip and not a column of a data set."""
_MOST_SHOWN, _MOST_NAMED = 40, 8
"""Chosen: characters of such a field, and fields, in a line."""
_OWN = frozenset(("id", "prompt", "messages", "token_ids", "prompt_token_ids", "max_tokens", "max_completion_tokens",
                  "stop"))  # fmt: skip
_KINDS: Mapping[str, Any] = {"min_tokens": int, "vllm_xargs": dict, "chat_template_kwargs": dict}
"""Of parameters that are changed before they are sent; the others the server judges."""
_BATCH = ("/v1/chat/completions", "/v1/completions")
"""Routes of OpenAI's batch files whose lines are prompts."""


class PromptsError(Exception):
    """One line: which file or line is no prompt, and what to write instead."""


@dataclass(frozen=True)
class PromptLine:
    """One prompt. name: the request's id, printable ASCII. One of text, messages (OpenAI's) and token_ids is not None.
    max_tokens, stop: the line's own, None where it has none. along: the tokens that a server is made to answer with.
    parameters: further ones, by vLLM's names; ignored: fields that are none, as data sets have them."""

    name: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    along: tuple[int, ...] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def only(self, *tables: frozenset[str]) -> dict[str, Any]:
        """The parameters that one of ``tables`` names."""
        return {k: v for k, v in self.parameters.items() if any(k in table for table in tables)}

    def to_json(self) -> dict[str, Any]:
        """The line of OUT/prompts.jsonl, which `read` takes again."""
        what = {"prompt": self.text, "messages": self.messages, "token_ids": self.token_ids}
        how = {"max_tokens": self.max_tokens, "stop": self.stop, "along": self.along}
        return {"id": self.name, **{k: v for k, v in (what | how).items() if v is not None}, **self.parameters}


def digest(lines: list[PromptLine]) -> str:
    """SHA-256 of all that is sent; two folders with the same were asked the same."""
    return hashlib.sha256(to_text(lines).encode("utf-8", "backslashreplace")).hexdigest()


def to_text(lines: list[PromptLine]) -> str:
    return "".join(json.dumps(line.to_json(), ensure_ascii=False) + "\n" for line in lines)


def read(source: str, note: Callable[[str], object] | None = None) -> list[PromptLine]:
    """``default``, or the path of a file. note: gets a line on fields that are not sent.
    Raises PromptsError, OSError, DumpError."""
    path = Path(source)
    if source == NAME and not path.exists():
        return _named([_line(line, "the shipped set", Path()) for line in shipped_lines()])
    if not path.is_file():
        raise PromptsError(f"{source} is no file: name a jsonl, a ShareGPT json or a text, or `{NAME}`")
    try:
        found = list(_lines(path))
    except UnicodeDecodeError:
        raise PromptsError(f"{path} is no text in UTF-8: convert it, e.g. `iconv -f UTF-16 -t UTF-8`") from None
    if not found:
        raise PromptsError(f"{path} has no prompts: write one on each line")
    ignored = Counter(name for line in found for name in line.ignored)
    if ignored and note is not None:
        names = [f"{name} ({n:,})" for name, n in ignored.most_common(_MOST_NAMED)]
        more = f" and {len(ignored) - len(names):,} more" if len(ignored) > len(names) else ""
        listed = ", ".join(names) + more
        note(f"{path}: fields that are no parameters of vLLM's, and not sent, with how many lines: {listed}")
    return _named(found)


_Message = Annotated[dict[str, Any], lambda message: "" if isinstance(message.get("role"), str) else "a message"]


def _lines(path: Path) -> Iterator[PromptLine]:
    with path.open("rb") as f:
        begin = f.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
    if path.suffix != ".jsonl" and (path.suffix == ".json" or begin.startswith(b"[{")) and begin[:1] != b"{":
        value = _parse(path.read_text(encoding="utf-8-sig"), str(path))
        if not isinstance(value, list):
            raise PromptsError(f"{path} is no list of prompts or conversations")
        for number, item in enumerate(value, 1):
            yield _line(item, f"{path}, item {number}", path.parent)
        return
    for number, line in enumerate(bounded_lines(path, MAX_LINE), 1):
        text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode().rstrip("\r\n")
        if not text.strip():
            continue
        if path.suffix == ".jsonl" or begin[:1] == b"{":
            yield _line(_parse(text, f"{path}, line {number}"), f"{path}, line {number}", path.parent)
        else:
            yield PromptLine("", text=text)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise PromptsError(f"{where} is no json") from None


def _line(value: Any, where: str, folder: Path) -> PromptLine:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise PromptsError(f"{where}: write an object with prompt, messages, token_ids or conversations")
    if isinstance(value.get("body"), dict) and "url" in value:
        if value["url"] not in _BATCH:
            raise PromptsError(f"{where}: url is none of {' and '.join(_BATCH)}")
        value = {**value["body"], "id": value.get("custom_id")}
    text, messages, ids = value.get("prompt"), value.get("messages"), _first(value, "token_ids", "prompt_token_ids")
    if isinstance(text, list):
        text, ids = None, text
    if messages is None and "conversations" in value:
        messages = _conversation(value["conversations"], where)
    kinds = [v for v in (text, messages, ids) if v is not None]
    if len(kinds) != 1 or not kinds[0]:
        raise PromptsError(f"{where}: write one of prompt, messages, token_ids and conversations, and not an empty one")
    images = value.get("images")
    if images:
        if not isinstance(images, list) or not isinstance(text, str):
            raise PromptsError(f"{where}: images is a list of files or URLs beside a prompt that is a text")
        parts = [{"type": "image_url", "image_url": {"url": _image(i, where, folder)}} for i in images]
        messages, text = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], None
    if ids is not None and not fits(list[TokenId], ids):
        raise PromptsError(f"{where}: token_ids is a list of numbers")
    if text is not None and not isinstance(text, str):
        raise PromptsError(f"{where}: prompt is a text or a list of token ids")
    if messages is not None and not fits(list[_Message], messages):
        raise PromptsError(f"{where}: messages is a list of objects with role and content")
    data_set = "conversations" in value  # whose other fields are no parameters
    parameters, ignored = ({}, ()) if data_set else _parameters(value, where, messages is not None)
    limit, stop = _first(value, "max_tokens", "max_completion_tokens"), value.get("stop")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise PromptsError(f"{where}: max_tokens is a number from 1 on")
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None and not fits(list[Text], stop):
        raise PromptsError(f"{where}: stop is a text or a list of texts")
    return PromptLine(
        _name(value.get("id"), where),
        text=text,
        messages=None if messages is None else tuple(messages),
        token_ids=None if ids is None else tuple(ids),
        max_tokens=limit,
        stop=tuple(stop) if stop else None,
        parameters=parameters,
        ignored=ignored,
    )


def _parameters(value: dict[str, Any], where: str, chat: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(parameters, fields that are none). Raises PromptsError for a misspelt one, and for what has no meaning here."""
    found, ignored = {}, []
    for name, setting in value.items():
        if setting is None or name in _OWN or name in IGNORED:
            continue
        if name in NEUTRAL:
            neutral, why = NEUTRAL[name]
            if setting not in neutral:
                raise PromptsError(f"{where}: {name} does not go with a comparison: {why}")
        elif name in SAMPLING or name in REQUEST or (chat and name in CHAT):
            if not isinstance(setting, _KINDS.get(name, object)):
                raise PromptsError(f"{where}: {name} is {'a number' if _KINDS[name] is int else 'an object'}")
            found[name] = setting
        elif name in CHAT:
            raise PromptsError(f"{where}: {name} is a parameter of chats: write messages, or leave it out")
        else:
            near = difflib.get_close_matches(name, [*_OWN, *SAMPLING, *REQUEST, *CHAT], 1, _NEAR)
            if near:
                raise PromptsError(f"{where}: {name} is no parameter of vLLM's ({near[0]}?): correct it, or move it to "
                                   "metadata")  # fmt: skip
            ignored.append(name[:_MOST_SHOWN] if name.isprintable() else "?")
    return found, tuple(ignored)


def _first(value: dict[str, Any], *keys: str) -> Any:
    return next((value[k] for k in keys if value.get(k) is not None), None)


def _name(value: Any, where: str) -> str:
    if value is None:
        return ""
    name = str(value)
    if not name or len(name) > 200 or not all("!" <= c <= "~" for c in name):
        raise PromptsError(f"{where}: id is at most 200 printable ASCII characters without blanks: it is the request's")
    return name


def _conversation(turns: Any, where: str) -> list[dict[str, Any]]:
    """ShareGPT's turns up to the last question; the answers before it are part of the prompt."""
    if not fits(list[dict[str, Any]], turns) or not all(isinstance(t.get("value"), str) for t in turns):
        raise PromptsError(f"{where}: conversations is a list of objects with from and value")
    messages = [{"role": _ROLES.get(str(t.get("from")), "user"), "content": t["value"]} for t in turns]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages


def _image(value: Any, where: str, folder: Path) -> str:
    if not isinstance(value, str):
        raise PromptsError(f"{where}: an image is a file or a URL")
    if value.startswith(("data:", "http://", "https://")):
        return value
    path = folder / value
    try:
        if path.stat().st_size > MAX_IMAGE:
            raise PromptsError(f"{where}: {path} is larger than {MAX_IMAGE >> 20} MiB")
        data = path.read_bytes()
    except OSError as e:
        raise PromptsError(f"{where}: {path}: {e.strerror}") from None
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _named(lines: list[PromptLine]) -> list[PromptLine]:
    """With ids: those that have none get the number of their line. Raises PromptsError where two are the same."""
    from dataclasses import replace

    width = max(len(str(len(lines) - 1)), 4)
    named = [line if line.name else replace(line, name=f"p{i:0{width}}") for i, line in enumerate(lines)]
    seen: set[str] = set()
    for line in named:
        if line.name in seen:
            raise PromptsError(f"the id {line.name} stands twice: two requests cannot have one name")
        seen.add(line.name)
    return named
