"""What a person types by mistake: one line on stderr names it, stdout is empty, and nothing is written or started.

One table for all commands: wrong values, options that do not go together, and sides that are none. What cannot be read,
and trouble while writing: test_bad_input_table.py."""

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.conftest import Typed
from cli.test_bad_input_table import (
    DOWN,
    there as there,  # a fixture
)
from cli_dumps import TAPS
from made_evaluations import right, write_opencompass, write_samples
from made_folders import folder
from synthetic_model import capture, write

EMBED, NORM = TAPS[0][0], TAPS[1][0]
SHOW, COMPARE, SEND = f"inspect plain {EMBED}", "compare golden mine -o out", "send p.txt --out out --timeout 5"
RATE = "is a probability above 0 and below 1, not"
SERVE = "vllm serve M --max-num-batched-tokens 64 --block-size 32 --async-scheduling"
BISECT = "bisect --out out --prompts p.jsonl --hold compilation --hold 'custom operators'"
USAGE = {
    # --- compare
    "compare golden mine --standard lax": "lax",
    "compare golden mine --op-mapping-file nowhere": "nowhere",
    "compare golden mine --format xml": "xml",
    f"{COMPARE} -cl layer": "-cl: every level is compared at once",
    f"{COMPARE} --soc-version Ascend910B": "--soc-version: no chip is named",
    f"{COMPARE} --dtype fp16": "--dtype: dtypes are read from the files",
    f"{COMPARE} -l loud": "--log-level loud: known are",
    f"{COMPARE} --false-alarm-rate 0": f"{RATE} 0.0",
    f"{COMPARE} --false-alarm-rate 1": f"{RATE} 1.0",
    f"{COMPARE} --false-alarm-rate -1": f"{RATE} -1.0",
    f"{COMPARE} --false-alarm-rate nan": f"{RATE} nan",
    f"{COMPARE} --false-alarm-rate often": "'--false-alarm-rate'",
    "compare golden nowhere --plan --false-alarm-rate 2": "not 2.0",
    "opdiff x.npy x.npy --standard lax": "lax",
    "labels plain --limit 7": "--tolerance",
    "labels plain --acl nowhere": "nowhere",
    "labels": "name a DUMP, or with --exec a command",
    "labels plain --exec true": "one of the two",
    "labels plain --type tensor": "--dir and --type are for --exec",
    "labels --exec true --type onnx": "draws what model or layer writes",
    "labels --exec nosuchprogram": "nosuchprogram: no such command",
    # --- inspect
    "inspect golden --step x": "--step",
    f"inspect golden {DOWN} --call 3-1": "--call",
    "inspect plain model.layers.0.mlp.down_prj": "nearest: model.layers.0.mlp.down_proj, ",
    "inspect plain zzz": "no tap zzz in ",
    "inspect plain model.rotary": "is a module of the model, but nothing of it was captured (not a plain tensor)",
    f"{SHOW} --step 0 --rows 5": "model.embed_tokens/input.x has rows 0 to 4, not 5",
    f"{SHOW} --step 0 --rows 5-2": "--rows: '5-2' is no range of numbers",
    f"{SHOW} --rows 1 --position 1": "use one or the other",
    f"{SHOW} --save x.pt": "must end in .npy or .safetensors",
    f"{SHOW} --save never.npy": "6 tensors match, e.g. input.x (step 0, rank 0), ",
    "summary plain sum.json": "FILE.csv is written to",
    "inspect plain a.txt b.txt": "b.txt reads like a file",
    "inspect plain a.csv --csv b.csv": "name one file",
    "inspect plain p.txt": "nothing is overwritten",
    "inspect --formats empty": "empty is an empty directory, not a dump",
    "inspect plain --level 2": "--level: how deep --tree shows",
    "inspect plain --tree --csv x.csv": "--tree shows one step",
    # --- convert, opcheck, gentest, patches
    "convert plain x.zip": "--to",
    "convert plain MODEL": "no ending",
    "convert plain x.npz --level 2": "--level: npz holds tensors",
    "convert plain x.onnx *.mixer": "--to onnx draws a whole step",
    "convert plain x.onnx --step 0-1": "--steps: '0-1' is not one number",
    "convert plain x.onnx --step 5": "no tensor of a step was recorded",
    "opcheck golden --standard lax": "lax",
    "opcheck golden --ids x": "--ids",
    "opcheck golden --against nothing": "--against",
    "gentest golden": "--failed",
    "patches look": "look",
    # --- golden, gate, self-check
    "golden check golden -- vllm serve MODEL": "is a folder",
    "gate 'HF_HUB_OFFLINE=1 vllm serve MODELL' 'vllm serve MODEL'": "did you mean MODEL?",
    "gate sent equal --samples --localize": "--localize are for servers",
    "gate sent equal --localize --localize-gb 0": "--localize-gb",
    "gate sent sent": "the same",
    "gate 'vllm serve M' nowhere --prompts p.jsonl --out out": "nowhere is no folder of accprobe send",
    "gate 'vllm serve M' 'sh -c pass' --prompts p.jsonl --out out": "mine: sh is no `vllm serve`",
    "gate 'vllm serve M' http://127.0.0.1:9 --prompts p.jsonl --out out": "mine: http://127.0.0.1:9 does not answer",
    "gate http://127.0.0.1:9 http://127.0.0.1:9 --out out": "are the same server",
    "gate http://127.0.0.1:9 'vllm serve M' --floor-dtype float16 --out out": "--floor-dtype is for a GOLDEN that",
    "gate 'a b' 'c d' --heal": "--heal heals what --localize names: give both",
    "gate --self http://127.0.0.1:9": "--out",
    "gate --self http://127.0.0.1:9 --out o": "does not answer",
    "gate a b --self http://127.0.0.1:9 --out o": "leave GOLDEN, MINE",
    "gate a": "self-check",
    "self-check": "Missing argument",
    "self-check --out o http://127.0.0.1:9": "does not answer",
    "self-check --out o -- true": "no `vllm serve`",
    'self-check --out o "\'"': "CMD",
    "self-check --out full http://127.0.0.1:9": "other files",
    # --- eval-diff
    "eval-diff golden mine": "it is a dump",
    "eval-diff golden.jsonl nowhere": "nowhere does not exist",
    "eval-diff golden.jsonl oc": "no common name",
    "eval-diff golden.jsonl golden.jsonl": "the same",
    "eval-diff golden.jsonl mine.jsonl --false-alarm-rate 2": "--false-alarm-rate",
    "eval-diff golden.jsonl mine.jsonl --prompts-out mine.jsonl": "what is read",
    "eval-diff golden.jsonl mine.jsonl --csv /proc/accprobe/x.csv": "nothing can be written",
    "eval-diff t.jsonl http://127.0.0.1:9": "--out",
    "eval-diff t.jsonl http://127.0.0.1:9 --out o": "does not answer",
    "eval-diff t.jsonl nowhere": "nowhere does not exist",
    "eval-diff t.jsonl 'echo hello' --out o": "no `vllm serve`",
    "eval-diff none.jsonl sent": "no sample of a question",
    # --- send
    SEND: "one of the two",
    f"{SEND} --url http://x --engine 'vllm serve M'": "one of the two",
    "send nowhere.jsonl --url http://x --out out": "nowhere.jsonl",
    "send p.txt --url http://x --out full": "other files",
    "send p.txt --url http://x --out p.txt": "is a file",
    f"{SEND} --url x": "--url",
    f"{SEND} --url http://x --arrive twice": "--arrive",
    f"{SEND} --url http://127.0.0.1:{{closed}}": "does not answer",
    f"{SEND} --engine true": "is no `vllm serve`",
    f'{SEND} --engine "\'"': "--engine",
    f"{SEND} --engine ' '": "no command is named",
    # --- bisect
    "bisect --out out -- sh -c pass": "is no `vllm serve`",
    "bisect --out out -- no-such-program serve": "no such command",
    f"{BISECT} --only nonsense -- {SERVE}": "is no setting that can be varied here",
    f"{BISECT} --share 1.5 -- {SERVE}": "--share",
    f"{BISECT} --plain attention -- {SERVE}": "SETTING=VALUE",
    f"{BISECT} --plain colour=red -- {SERVE}": "have other plain values",
    f"{BISECT} --switches none.toml -- {SERVE}": "is no file",
    f"{BISECT} -- vllm serve M -cc {{{{": "no json",
    f"bisect --out out --prompts nowhere.jsonl -- {SERVE}": "is no file",
    # --- run, errcheck, arm, doctor
    "run --set x -- true": "--set",
    "run -- no-such-command": "no-such-command",
    "run --tokens x -- 'touch started'": "VLLM_ACCPROBE_TOKENS=x: 'x' is not a number",
    "run --atb --atb-ids x -- 'touch started'": "--atb-ids=x: write operations as 2,3_1",
    "run --config no.toml -- 'touch started'": "/no.toml: No such file",
    "run --set tokns=3 -- 'touch started'": "VLLM_ACCPROBE_TOKNS is not a setting of accprobe; did",
    "run --set tokens -- 'touch started'": "--set tokens: write NAME=VALUE",
    "run -- nosuchprogram": "nosuchprogram: no such command",
    "run": "no command is named",
    "run --exec true -- true": "the command is named twice",
    "run --atb-type onnx -- 'touch started'": "onnx draws what model or layer writes",
    "run --exec 'touch started' -child maybe": "--save-operation-child maybe: write True or False",
    "run -seed 3 -- 'touch started'": "-seed: the probe changes no seed",
    "errcheck": "no command",
    "arm nowhere": "nowhere is no directory",
    "arm p.txt": "p.txt is no directory",
    "arm full --off --tokens 3": "leave --tokens away",
    "arm full --tokens 4-1": "ends before it begins",
    "arm full --steps soon": "is not a number",
    "arm full": "full: no server captures here",
    "doctor --timeout x": "--timeout",
    "doctor --no-such-option": "--no-such-option",
    "doctor --graphs": "a command is missing; write `accprobe doctor --graphs -- vllm serve MODEL ...`",
    "doctor --graphs -- no-such-program": "no-such-program: no such command; is it installed, and on PATH?",
    "doctor -- true": "a command is run with --graphs only: accprobe doctor --graphs -- CMD ...",
    "doctor --full": "--full goes with --graphs",
    "doctor --graphs -- vllm serve m --uds x": "--uds: servers are reached over plain HTTP only",
    # --- online
    "online serve --host 0.0.0.0": "0.0.0.0 is not this machine, and without certificates nothing goes over",
    "online serve --tls full": "has no ca.crt, no server.crt, no server.key",
    "online serve --config nowhere.json": "nowhere.json: No such file or directory",
    "online serve --standard none": "standard 'none': known are",
    "online send nowhere": "nowhere does not exist",
    "online send full --patience 0": "is no dump of accprobe",
}
"""What is typed → what its line says; exit code 2."""
NOTHING = {
    "compare golden other -o out": "different prompt tokens",
    f"{COMPARE} --taps nothing*": "--taps 'nothing*' matches no tap that both dumps have; the nearest: ",
    "labels --exec true": "no label was captured",
    f"{SHOW} --role output.7": "it has input.x, output.0 at steps 0 to 2, rank 0",
    f"{SHOW} --step 0 --request chat-7": "nothing matches the options: it has input.x, ",
    f"{SHOW} --step 0 --position 7": "nothing matches the options",
    f"inspect plain {NORM} --role param.weight --position 1": "nothing matches the options",
    "inspect plain *.nothing": "*.nothing",
    "eval-diff golden.jsonl other.jsonl": "no question is on both sides",
    "eval-diff golden.jsonl mine.jsonl --metric bleu": "--metrics choose nothing",
    "eval-diff t.jsonl sent": "nothing could be compared",
}
"""The same where nothing is left to be done; exit code 3."""
SHOWN = (f"{SHOW} --step 0 --rows 5", "inspect plain *.nothing")
"""Those that show what there is."""


@pytest.fixture(scope="module")
def home(there: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("typed")
    for name in ("golden", "mine", "plain", "empty", "MODEL", "x.npy"):
        (home / name).symlink_to(there / name)
    write(capture(prompts={"a": [9]}, tokens=2), home / "other")
    for name, seed in (("sent", 1), ("equal", 2)):
        folder(home / name, seed)
    write_samples(home / "golden.jsonl", right(50, range(26, 50)))
    write_samples(home / "mine.jsonl", right(50, [0, 1, *range(28, 50)]))
    write_samples(home / "other.jsonl", [{**line, "doc_hash": "x"} for line in right(5, [])])
    write_opencompass(home / "oc", "gsm8k", [True, False])
    line = {"id": "s", "prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-1.0, -2.0]}
    for name, text in (("t.jsonl", json.dumps(line)), ("none.jsonl", "{}"), ("p.txt", "a secret prompt\nanother"),
                       ("p.jsonl", '{"token_ids": [1, 2, 9]}'), ("full/thesis.tex", "x"),
                       ("bin/vllm", "#!/bin/sh\ntouch started\nexit 3")):  # fmt: skip
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(text + "\n")
    (home / "bin/vllm").chmod(0o755)
    return home


@pytest.fixture
def here(home: Path, typed: Typed, tmp_path: Path) -> Iterator[Path]:
    """A folder with links to all of it, whose files must be as they were in the end, and no more."""
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)

    def files() -> dict[Path, int]:
        found = (p for root in (home, tmp_path) for p in root.rglob("*") if p.is_file() and p.name != ".lock")
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    yield tmp_path
    assert files() == before


@pytest.mark.parametrize(("code", "line"), [(2, line) for line in USAGE] + [(3, line) for line in NOTHING])
def test_it_is_one_line(code: int, line: str, here: Path, typed: Typed) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        done = typed(*shlex.split(line.format(closed=closed.getsockname()[1])), PATH=f"{here / 'bin'}:/usr/bin:/bin")
    said = [one for one in done.stderr.splitlines() if not one.startswith("note: ")]
    assert (done.returncode, len(said)) == (code, 1), done.stderr
    assert done.stdout == "" or line in SHOWN
    assert (USAGE | NOTHING)[line] in said[0]
    assert said[0].startswith("accprobe: ")
    assert not any(word in done.stderr for word in ("internal error", "secret"))
