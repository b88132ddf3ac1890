"""What is known of a server's command before it is started: what would stop it minutes later, and what it lacks.

The problem: golden's engine runs for minutes before mine's command fails for a wrong path, and an engine imports torch
before it reads its options. The idea: the words are checked against what lies on this machine: the model's folder, the
port, the options by name in the source of the vLLM that is installed for the command, and its entry points. A name of
the hub that is not kept here is looked up there, which vLLM tries for a minute where it cannot be reached. Only an
option that the source does not name is shown to vLLM's own parser, which takes as long as an import of vLLM. On a CPU,
vLLM takes 92 % of the host's memory for itself and ends where that is not free: `prepared` adds a limit.

What cannot be known is no reason to refuse: another interpreter, a name of a model hub, a line for the shell. Not here:
the start itself and what is reported where it fails (served_run.py), folders of answers (sending/passes.py).
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import object_in
from vllm_accprobe.gate.bisect import edits
from vllm_accprobe.gate.bisect.edits import BisectError, ServeCommand
from vllm_accprobe.gate.sending.client import NotServed
from vllm_accprobe.progress import waiting
from vllm_accprobe.run.launcher import LaunchError, command_line

CONFIGS = ("config.json", "params.json")
"""What a model's folder has one of: Hugging Face's, Mistral's."""
_MOST_OF_CONFIG = 64 << 20
_MEMORY = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--memory-utilization")
_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_SHARE, _MOST = 4, 4 << 30
"""Chosen: a quarter of the free memory for the KV cache of a CPU, at most 4 GiB."""
_WAIT_S = 180.0
_PARSE = """
import sys
try:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    sys.exit(0)
parser = FlexibleArgumentParser(prog="vllm")
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
parser.parse_args(sys.argv[1:])
"""


def command_of(text: str, environ: Mapping[str, str]) -> ServeCommand:
    """A command as one line, settings in front of it included. Raises NotServed."""
    try:
        return edits.command([text], environ)
    except BisectError as e:
        raise NotServed(str(e)) from None


def model_of(command: ServeCommand) -> str | None:
    """As the words name it."""
    words = command.words
    if "serve" in words[:-1] and not (after := words[words.index("serve") + 1]).startswith("-"):
        return after
    return command.get("--model")


def config_of(model: str) -> dict[str, Any]:
    """Its config.json, where that is here; {} elsewhere."""
    return object_in(Path(model) / CONFIGS[0], _MOST_OF_CONFIG)


def check(command: ServeCommand, *, captured: bool = False) -> None:
    """Raises NotServed for what would stop the server. captured: the probe is to be on in it."""
    environ = command.full()
    try:
        command_line(command.words, environ)
    except LaunchError as e:
        raise NotServed(str(e)) from None
    _check_model(model_of(command))
    python = edits.interpreter(command.words, environ)
    there = edits.Installed() if python is None else edits.installed(python, edits.neutral(environ))
    _check_hub(model_of(command), command, there.package is not None)
    if python is None:
        return
    if captured and there.package is not None and not there.plugin:
        raise NotServed(f"{python} has vLLM, and vllm-accprobe is not installed there: nothing could be captured; "
                        f"{python} -m pip install vllm-accprobe")  # fmt: skip
    if "serve" not in command.words or there.package is None or _knows(there.package, command):
        return
    if error := _parser_says(python, command.words[command.words.index("serve") :], edits.neutral(environ)):
        raise NotServed(f"{error}; this release of vLLM reads its options otherwise: vllm serve --help=all")


def _check_model(model: str | None) -> None:
    path = Path(model or "")
    named = model is not None and "://" not in model and path.suffix != ".gguf"
    if not named or not (path.exists() or re.match(r"~|/|\.\.?/", str(model)) or str(model).count("/") > 1):
        return
    if path.is_file():
        with suppress(OSError), path.open("rb") as f:
            if f.read(4) == b"GGUF":  # vLLM reads one by its first bytes, whatever its name
                return
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise NotServed(f"{model} {what}: write the path of the model's folder as it is from here")
    if not any((path / name).is_file() for name in CONFIGS):
        raise NotServed(f"{model} has no {CONFIGS[0]}: write the path of a model's folder as it is from here")


def meant(model: str | None) -> str:
    """``M is no folder here; did you mean N?``, of a folder with almost the same name; else "". A guess: the hub has
    names without a slash, too (`gpt2`), and whoever trains one further calls the folder alike."""
    if model is None or not model or Path(model).name != model or Path(model).exists():
        return ""
    here = [p.parent.name for name in CONFIGS for p in Path().glob(f"*/{name}")]
    near = difflib.get_close_matches(model, here, 1, _NEAR)
    return f"{model} is no folder here; did you mean {near[0]}?" if near else ""


_NEAR = 0.8
"""Chosen: difflib's ratio of a name to what was meant, a letter or two apart."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""huggingface_hub's (constants.py): the first that is set counts; so are the other names here."""
_HUB_S = 5.0
"""Chosen: seconds for one answer of the hub; vLLM tries for a minute."""


def _check_hub(model: str | None, command: ServeCommand, reached: bool) -> None:
    """A name of the hub that huggingface_hub does not keep, where nothing may be downloaded, or the hub has no such
    model. reached: the server is known to be vLLM, which would send this request, too."""
    environ = command.full()
    elsewhere = any(command.get(name) is not None for name in ("--download-dir", "--hf-config-path"))
    elsewhere |= environ.get("VLLM_USE_MODELSCOPE", "0") != "0" or bool(environ.get("VLLM_MODEL_REDIRECT_PATH"))
    if elsewhere or not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?", model or "") or Path(str(model)).exists():
        return

    def place(*names: str, otherwise: str) -> str:
        return os.path.expandvars(os.path.expanduser(next(filter(None, map(environ.get, names)), otherwise)))

    home = place("HF_HOME", otherwise=f"{environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface")
    cache = place("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", otherwise=f"{home}/hub")
    kept = Path(cache, f"models--{str(model).replace('/', '--')}")
    if kept.is_dir():
        return
    name = next((name for name in _OFFLINE if environ.get(name)), "")
    value = environ.get(name, "")
    why = f"{name}={value} forbids downloading it" if value.upper() in ("1", "ON", "YES", "TRUE") else ""
    if not why and reached and not any(name.lower().endswith("_proxy") for name, _ in command.environ):
        tokens = environ.get("HF_TOKEN"), environ.get("HUGGING_FACE_HUB_TOKEN"), command.get("--hf-token")
        token = any(tokens) or Path(place("HF_TOKEN_PATH", otherwise=f"{home}/token")).exists()
        why = _hub_lacks((environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"), str(model), token)
    if why:
        todo = meant(model) or "give the path of the model's folder"
        raise NotServed(f"{model} is not a folder on this machine, {why}, and {kept} does not exist: {todo}")


@functools.lru_cache(maxsize=8)
def _hub_lacks(endpoint: str, model: str, token: bool) -> str:
    """Why a model cannot be downloaded; "" where it can be, or that is not known. token: there is one, which is not
    used here, and whose owner may see more models. A password in the endpoint is neither sent nor shown, and of a proxy
    only answers count: vLLM's clients know kinds that this one does not (SOCKS)."""
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import getproxies, urlopen

    if not endpoint.startswith(("http://", "https://")) or "@" in endpoint:
        return ""
    try:
        with urlopen(f"{endpoint}/api/models/{model}", timeout=_HUB_S):
            return ""
    except HTTPError as e:
        return f"{endpoint} has no such model (HTTP {e.code})" if e.code in (401, 404) and not token else ""
    except (OSError, HTTPException, ValueError) as e:
        why = getattr(e, "reason", e)
        unknown = isinstance(why, (ssl.SSLError, TimeoutError)) or getproxies()
        return "" if unknown else f"{endpoint} cannot be reached ({why})"


def _knows(package: Path, command: ServeCommand) -> bool:
    """Whether vLLM's source names all options of a command."""
    names = {name.lstrip("-") for name in command.names()}
    return all(n in _named(package) or n.removeprefix("no-") in _named(package) for n in names)


_OPTION = re.compile(r"""["']--([a-z0-9][a-z0-9-]*)["']|^ +([a-z]\w*) *:""", re.MULTILINE)


@functools.lru_cache(maxsize=8)
def _named(package: Path) -> frozenset[str]:
    """Whatever may be an option in vLLM's source: fields of its settings become options."""
    files = [*(package / "config").glob("*.py"), *(package / "engine").glob("arg_utils.py"),
             *(f for name in ("*cli_args.py", "serve.py") for f in (package / "entrypoints").rglob(name))]  # fmt: skip
    return frozenset((a or b).replace("_", "-") for file in files for a, b in _OPTION.findall(edits.source(file)))


@functools.lru_cache(maxsize=8)
def _parser_says(python: str, words: tuple[str, ...], environ: edits.Environ) -> str:
    """The error of vLLM's own parser; "" where it has none, or cannot be run."""
    try:
        with waiting(lambda: "vLLM's own parser reads the options"):
            done = subprocess.run(
                [python, "-c", _PARSE, *words], env=dict(environ), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=_WAIT_S,
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    errors = [line for line in done.stderr.splitlines() if re.match(r"vllm[\w. ]*: error: ", line)]
    return errors[-1][:400] if done.returncode == 2 and errors else ""


def prepared(command: ServeCommand) -> tuple[tuple[str, ...], str]:
    """(its words as they are started, a line that says what was added, "" for nothing)."""
    environ = command.full()
    python = edits.interpreter(command.words, environ)
    if python is None or environ.get(_SPACE) or any(command.get(name) is not None for name in _MEMORY):
        return command.words, ""
    if not edits.installed(python, edits.neutral(environ)).cpu:
        return command.words, ""
    added = f"{_MEMORY[0]}={min(_available() // _SHARE, _MOST) >> 20 << 20}"
    return (*command.words, added), f"this vLLM is of a CPU, and would take 92 % of the memory: added {added}"


def _available() -> int:
    """Bytes of this machine's memory that is free."""
    found = re.search(r"^MemAvailable: +(\d+) kB", edits.source(Path("/proc/meminfo")), re.MULTILINE)
    return int(found[1]) << 10 if found else _MOST


_COMPILES = frozenset(("--compilation-config", "--optimization-level"))
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES",
            "XPU_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # fmt: skip


def eager(command: ServeCommand) -> bool:
    """Whether its words make the engine eager, so that a capture changes nothing of it, and do not set the probe."""
    own = any(name.startswith("VLLM_ACCPROBE") for name, _ in command.environ)
    return command.flag("--enforce-eager") is True and not own and not _COMPILES & {*command.names()}


def fit_together(one: ServeCommand, other: ServeCommand) -> bool:
    """Whether both servers can run at once, as far as is known: on devices that their environments name apart, or on a
    CPU with four times the memory of their weights."""
    both = (one, other)
    ports = {c.get("--port") for c in both} - {None}
    if len(ports) == 1 and all(c.get("--port") for c in both):
        return False
    for name in _DEVICES:
        named = [{d.strip() for d in c.full().get(name, "").split(",")} - {""} for c in both]
        if all(named):
            return not named[0] & named[1]
    if not all(_on_cpu(c) for c in both) or any(c.get(name) is not None for c in both for name in _MEMORY[1:]):
        return False
    weights = [_weights(model_of(c)) for c in both]
    return all(weights) and _SHARE * sum(weights) <= _available()


def _on_cpu(command: ServeCommand) -> bool:
    python = edits.interpreter(command.words, command.full())
    return python is not None and edits.installed(python, edits.neutral(command.full())).cpu


def _weights(model: str | None) -> int:
    """Bytes of the files of a model's folder; 0 where it is not here."""
    folder = Path(model or "")
    files = [f for end in ("*.safetensors", "*.bin", "*.pth") for f in folder.glob(end)] if model else []
    return sum(f.stat().st_size for f in files)


_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")


def other_model(golden: ServeCommand, mine: ServeCommand) -> str:
    """In what their two models differ that no conversion of one model changes; "" where in nothing that is known."""
    if any(c.get("--hf-overrides") is not None for c in (golden, mine)):
        return ""
    models = [str(model_of(c)) for c in (golden, mine)]
    left, right = ({**c, **(c.get("text_config") or {})} for c in map(config_of, models))
    found = [f"{n} {left[n]} and {right[n]}" for n in _SIZES if n in left and n in right and left[n] != right[n]]
    return f"{models[0]} and {models[1]} are two models ({', '.join(found)})" if found else ""


def room_for(place: Path, gigabytes: float) -> float:
    """How many of ``gigabytes`` the disk of ``place`` has free, with a tenth left over."""
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return min(gigabytes, shutil.disk_usage(place).free * 0.9 / 1e9)
