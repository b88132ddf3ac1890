"""Every command and every piece of Python in README and docs, typed in as it stands, on dumps of a real engine.

A page's commands run in the order of the page, in one folder in which the names that the pages use (DUMP, golden, mine,
MODEL ...) are there. What cannot run here is listed with its reason, and the list may hold nothing that no page says.
``vllm serve`` is a stand-in for the HTTP part only: a real vLLM that answers requests of its own and then ends.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_evaluations import right, write_samples
from made_folders import folder
from opcheck.opdiff_files import CHINESE, details
from preloaded_vllm import command
from support.captures import Engines
from support.documents import COMMAND, PAGES, PYTHON, ROOT, SYNOPSIS, TRANSLATED, Snippet, snippets
from support.engine import Ask
from support.prompts import prompt
from typer.main import get_command

from vllm_accprobe import cli

pytestmark = pytest.mark.engine

NOT_RUN = {
    "accprobe golden make MODEL --out MODEL_vllm-0.32.golden": "needs a server over HTTP; test_golden_engine.py has it",
    "accprobe golden make MODEL --out MODEL_vllm-0.32.golden -- --dtype=bfloat16 --tensor-parallel-size=2": (
        "the same, with two ranks"
    ),
    "accprobe golden check MODEL_vllm-0.32.golden -- vllm serve MODEL": "the same",
    "accprobe golden make --float32 --stream MODEL --out MODEL_float32.golden": "test_stream.py has it",
    "git clone REPOSITORY accprobe && cd accprobe": "scripts/newcomer.py types it",
    "source .venv/bin/activate": "the environment is this one",
    "export PYTHONPATH=lab/planted VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1": "test_tutorial.py types it",
    "bash scripts/demo.sh": "two servers, a minute and a half; run by hand before a release",
    "bash scripts/test.sh": "this is it",
    "bash scripts/test.sh -k faults": "this is it",
    "bash scripts/test.sh -n 0 --pdb": "this is it",
    "bash scripts/test.sh --all": "this is it",
    "bash scripts/test.sh -k opcheck": "this is it",
    "bash scripts/faults.sh": "an hour; by hand before a release",
    "bash scripts/vendor_wheels.sh --into docs/compatibility.md": "downloads wheels; by hand before a release",
    'bash scripts/test.sh -m "not engine and not browser"': "this is it",
    "ACCPROBE_TEST_KERNELS=avx2 bash scripts/test.sh": "this is it",
    "ACCPROBE_TEST_KERNELS=avx2 bash scripts/faults.sh": "half an hour",
    "pip install .": "the environment has the checkout installed; changing it under running tests breaks them",
    "pip wheel . -w wheels": "builds a wheel of the checkout and downloads what it needs; by hand before a release",
    'pip install "vllm-accprobe[mindspore]"': "needs an environment of its own",
    "python scripts/case_study.py case-study --picture case-study/report.png": "two more engines and a browser",
    "python scripts/case_study.py . --confirm": "loads vLLM for one operator; run by hand with the line above",
    "accprobe compare alone together --out report": "what the case study's script runs itself",
    "bash scripts/faults.sh --only 'one-*'": "minutes",
    "bash scripts/faults.sh --keep /tmp/lab": "an hour",
    "bash scripts/faults.sh --judge-only /tmp/lab": "needs the line above",
    "bash scripts/faults.sh --capture-only --keep /tmp/lab/native --models /tmp/lab/models": "an hour",
    "ACCPROBE_TEST_KERNELS=avx2 bash scripts/faults.sh --capture-only --keep /tmp/lab/avx2 --models /tmp/lab/models": (
        "an hour"
    ),
    "bash scripts/faults.sh --judge-only /tmp/lab/native --across /tmp/lab/avx2": "needs the lines above",
    "bash scripts/faults.sh --only NAME --keep /tmp/lab": "NAME is to be filled in",
    "python -m lab.large --list --half tuned": "test_large_lab.py runs the command",
    "python -m lab.large --keep DIR --delete --replay": "hours",
    "python -m lab.field_cases 03 05 11 12 19": "minutes, and the cases lie outside of the tree",
    "(cd accprobe-gentest && pytest --device cuda --detail-csv gpu.csv)": "no CUDA device here",
    "(cd accprobe-gentest && pytest --device npu --load torch_npu --detail-csv npu.csv)": "no NPU here",
    "(cd cases && pytest --device cuda --detail-csv gpu.csv)": "no CUDA device here",
    "python benchmarks/bench_capture.py --rounds 9": "minutes; timings are no tests",
    "python benchmarks/bench_tap.py": "timings are no tests",
    "python benchmarks/bench_install.py --tree COMMIT --tree .": "installs with pip; timings are no tests",
    "bash scripts/card.sh": "ten minutes; test_card_parts.py runs its parts",
    "bash scripts/card.sh --torch": "inductor takes a minute; test_card.py has what it runs",
    "bash scripts/matrix.sh --into docs/compatibility.md": "an hour or two; by hand before a release",
    "bash scripts/matrix.sh 0.28 0.32": "makes an environment; test_matrix.py has the pure parts",
    "bash scripts/matrix.sh 0.23 --cases plain,again": "makes an environment",
    "accprobe inspect DUMP TAP": "TAP is to be filled in",
    "VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=eager vllm serve MODEL": "for the line below it",
    "VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=compiled VLLM_ACCPROBE_GRAPHS=1 vllm serve MODEL": (
        "inductor takes a minute; test_graph_taps.py has such engines"
    ),
    "accprobe compare eager/ compiled/": "needs the lines above",
    "accprobe doctor --graphs -- vllm serve MODEL": "four engines; test_taps_change_nothing.py has them",
    "accprobe doctor --graphs -- python my_generate.py": "a program of the reader's own",
    "accprobe bisect -- vllm serve MODEL": "a dozen servers; test_bisect_engine.py has some",
    "accprobe bisect -- vllm serve MODEL --max-num-batched-tokens 256 --block-size 32": "a dozen servers",
    "accprobe bisect --golden golden-sent --switches switches.toml -- vllm serve MODEL": "a dozen servers",
    "accprobe send prompts.jsonl --url http://localhost:8000 --out golden-sent": "test_real_server.py has a server",
    'accprobe gate "vllm serve MODEL" "vllm serve MODEL --kv-cache-dtype fp8" --prompts prompts.jsonl --out gated': (
        "three servers; test_gate_servers.py has them by hand"
    ),
    "accprobe gate golden-sent http://new-card:8000 --floor other-good-card-sent --out gated": (
        "test_real_gate.py has a server"
    ),
    'accprobe send --engine "vllm serve MODEL --max-model-len 16384" --out mine-sent': "test_real_server.py starts one",
    "accprobe self-check --out itself -- vllm serve MODEL": "four engines; test_asked_paths.py asks real servers",
    "accprobe self-check --prompts prompts.jsonl --out itself -- http://localhost:8000": "test_asked_paths.py",
    "accprobe self-check --out DIR -- vllm serve MODEL": "four engines; test_asked_paths.py asks real servers",
    "accprobe self-check --prompts prompts.jsonl --out itself -- vllm serve MODEL": "the same",
    'accprobe eval-diff trainer.jsonl "vllm serve MODEL" --out scored': "test_gate_trainer.py has a server",
    'accprobe send prompts.jsonl --engine "vllm serve MODEL" --out golden-sent': "test_real_server.py starts one",
    'accprobe send --teacher-force golden-sent --engine "vllm serve MODEL" --out mine-sent': "test_forced_server.py",
    'accprobe send --teacher-force golden-sent --engine "vllm serve MODEL --dtype float16" --out floor-sent': (
        "the same"
    ),
    "VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=golden VLLM_ACCPROBE_TOKENS=0-3 accprobe send few.jsonl "
    '--engine "vllm serve MODEL" --out golden-few': "needs a server over HTTP; the page's golden lies there",
    "VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR=mine VLLM_ACCPROBE_TOKENS=0-3 accprobe send --teacher-force golden-few "
    '--engine "vllm serve MODEL" --out mine-few': "needs a server over HTTP; the page's mine lies there",
    "VLLM_ACCPROBE_FORCE=1 vllm serve MODEL": "test_forced_server.py has such servers",
    "accprobe send --teacher-force golden-sent --url http://mine:8000 --out mine-sent": (
        "test_forced_server.py has servers"
    ),
    "VLLM_ACCPROBE=1 VLLM_ACCPROBE_ARMED=0 VLLM_ACCPROBE_DIR=armed vllm serve MODEL": "nobody arms it in time",
    "accprobe arm armed --requests 'my-req*' --tokens 0-4": "wants a server that stays; test_digging.py",
    "accprobe arm DIR": "DIR is to be filled in",
    "accprobe arm armed --off": "wants a server that stays; test_digging.py",
    'accprobe gate "vllm serve MODEL" "MY_SWITCH=1 vllm serve MODEL" --prompts prompts.jsonl --out OUT --localize': (
        "four or five servers; test_digging.py has two of them"
    ),
    'accprobe gate "vllm serve A" "vllm serve B" --localize': "A and B are to be filled in; test_digging.py",
    'accprobe gate "vllm serve A" "vllm serve B" --prompts flipped.jsonl --out OUT --localize': "the same",
    "python scripts/tiny_model.py qwen2 model": "test_tutorial.py types the tutorial's first part, with real servers",
    """accprobe gate "vllm serve model --enforce-eager" "ACCPROBE_FAULT='$FAULT' vllm serve model --enforce-eager" """
    "--prompts examples/prompts.txt --out gated --localize": "the same",
    "accprobe compare gated/dig/golden gated/dig/mine --out report": "the same",
    "accprobe opcheck gated/dig/mine --out checked": "the same",
    "accprobe gentest gated/dig/mine --failed": "the same",
    "(cd accprobe-gentest && python -m pytest -q)": "the same",
    "accprobe inspect model.json --tree": "ATB wrote it; test_drawing.py has one",
    "accprobe inspect FILE.json --tree": "ATB wrote it; test_drawing.py has one",
    "accprobe convert XXX_layer.json layer.onnx --level 1": "ATB wrote it; test_drawing.py has one",
    "accprobe online serve --tls certs --host 0.0.0.0 --out result": "waits for a sender; tests/online has both",
    "accprobe online send dump --follow --tls certs --host golden-machine": "another machine; tests/online",
    "accprobe online serve": "waits for a sender; tests/online has both",
    "accprobe online serve --config config.json": "tests/support/seeds/online_lines.py runs it with its sender",
    "accprobe compare gpu.h5 xpu.h5 result.csv": "test_seeds.py types the document's line",
    "accprobe gentest DUMP --cpu_init --blacklist --factory=load": "the same; this page's DUMP has labels alone",
    "accprobe compare gpu.csv xpu.csv result.csv": "test_seeds.py types the document's line",
    "accprobe compare GPU.csv NPU.csv": "the same",
    "VLLM_ACCPROBE_PATCHES=all": "a setting, not a command; the line above it has another",
    "VLLM_ACCPROBE_PATCHES=./mine.toml": "a setting, not a command",
}
"""Command: why it is not typed in."""
ENDS = {
    "accprobe opcheck DUMP --against device --out gpu": (2, "no accelerator"),
    "(cd accprobe-gentest && pytest)": (1, "failed"),  # the fault's calls
}
"""Command: the exit code that it has on a machine without the device or library, and a word of what it says."""
JUDGES = {"compare", "opcheck", "errcheck", "gentest", "gate", "eval-diff"}
"""Commands that may end with 1: differences were found."""
FAULT = '{"kind": "scale", "module": "model.layers.2.self_attn.o_proj", "factor": 1.05, "rows": "position>=20"}'
NAN = '{"kind": "nan", "module": "model.layers.2.mlp.down_proj", "rows": "position>=20", "features": [3]}'
_SERVE = '''"""`vllm serve MODEL` without HTTP: a real vLLM engine answers two requests and ends."""
import os, sys
assert sys.argv[1] == "serve", sys.argv
os.environ |= {{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}}
sys.path.insert(0, {support!r})
from engine_worker import DEFAULTS, spare_the_imports
from vllm import LLM, SamplingParams
spare_the_imports()
llm = LLM(model=sys.argv[2], **DEFAULTS)
asks = [{{"prompt_token_ids": list(range(20 + i, 50 + i))}} for i in range(2)]
for answer in llm.generate(asks, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)):
    print(answer.outputs[0].token_ids)
llm.llm_engine.engine_core.shutdown()
'''


@dataclass(frozen=True)
class Captures:
    model: Path
    golden: Path
    mine: Path
    operators: Path


@pytest.fixture(scope="module")
def captures(engines: Engines) -> Captures:
    asks = [Ask(prompt(30, 1), 6, id="my-req"), Ask(prompt(24, 2), 6, id="other")]
    golden = engines.run("documents-golden", asks=asks, how="serial")
    mine = engines.run("documents-mine", asks=asks, fault=_fault())
    operators = engines.run("documents-operators", asks=asks[:1], fault=_fault(), env={"VLLM_ACCPROBE_OPS": "1"})
    assert golden.dump is not None
    assert mine.dump is not None
    assert operators.dump is not None
    return Captures(engines.model("qwen2"), golden.dump, mine.dump, operators.dump)


def _fault() -> dict[str, Any]:
    fault: dict[str, Any] = json.loads(FAULT)
    return fault


@pytest.fixture
def place(captures: Captures, preloaded_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the pages give a name; the current one."""
    at = tmp_path / "place"
    (at / "bin").mkdir(parents=True)
    for names, source in (
        ("golden GOLDEN G GPU gpu-a", captures.golden),
        ("gpu-b gpu-chunked", captures.golden),
        ("mine MINE M XPU npu dump", captures.mine),
        ("DUMP", captures.operators),
    ):
        for name in names.split():
            shutil.copytree(source, at / name)
    (at / "MODEL").symlink_to(captures.model)
    for name, text in (
        ("CMD", "#!/bin/sh\nexec vllm serve MODEL\n"),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (at / "bin" / name).write_text(text)
        (at / "bin" / name).chmod(0o755)
    (tmp_path / "serve.py").write_text(_SERVE.format(support=str(ROOT / "tests" / "support")))
    command(preloaded_vllm, at / "bin" / "vllm", tmp_path / "serve.py")
    script = "from transformers import AutoModelForCausalLM\nimport torch\nfrom vllm_accprobe import Probe\n"
    script += "model = AutoModelForCausalLM.from_pretrained('MODEL', dtype=torch.float32)\n"
    script += "with Probe(model):\n    model.generate(torch.arange(20, 40)[None], max_new_tokens=2, do_sample=False)\n"
    (at / "my_transformers_script.py").write_text(script)
    (at / "generate.py").write_text("import os\nos.execvp('vllm', ['vllm', 'serve', 'MODEL'])\n")
    (at / "work").mkdir()
    (at / "work" / "start.sh").write_text("cd ..\nexec vllm serve MODEL\n")
    (at / "run.sh").write_text("exec vllm serve MODEL\n")
    (at / "map.yaml").write_text("'**.qkv_proj': '**.qkv_proj'\n")
    for side, seed in (("golden", 1), ("mine", 2)):
        folder(at / f"{side}-sent", seed)
    for side, wrong in (("golden", range(26, 50)), ("mine", range(24, 48))):
        write_samples(at / f"{side}.jsonl", right(50, wrong))
        write_samples(at / f"{side}-run" / "tiny" / "samples_sums_2026-11-23T10-00-00.jsonl", right(50, wrong))
    folder(at / "floor-sent", 3)
    _trainer(at)
    np.save(at / "a.npy", np.arange(6, dtype="f4"))
    monkeypatch.chdir(at)
    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{at / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return at


def _trainer(at: Path) -> None:
    """trainer.jsonl: the tokens of mine-sent with log-probabilities of its own; NeMo-RL's file has both sides."""
    lines = [json.loads(line) for line in (at / "mine-sent" / "pass-0.jsonl").read_text().splitlines()]
    ours = [{"id": r["name"], **{k: r[k] for k in ("prompt_token_ids", "token_ids", "logprobs")}} for r in lines]
    nemo = [
        {"token_ids": [[*r["prompt_token_ids"], *r["token_ids"]]], "prev_logprobs": [r["logprobs"]],
         "generation_logprobs": [r["logprobs"]]}
        for r in ours
    ]  # fmt: skip
    for name, said in (("trainer", ours), ("train_data_step1", nemo)):
        (at / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))


def _of(page: str, kind: str) -> list[Snippet]:
    return [s for s in snippets(page) if s.kind == kind]


def _typed_in(kind: str) -> list[Any]:
    """README always; the other pages take minutes, with ``--all``."""
    more = pytest.mark.extra("README.md")
    return [p if p == "README.md" else pytest.param(p, marks=more) for p in PAGES if _of(p, kind)]


def test_something_is_found_on_the_pages() -> None:
    found = [s for page in PAGES for s in snippets(page)]
    assert sum(s.kind == COMMAND for s in found) > 70
    assert sum(s.kind == PYTHON for s in found) > 8
    assert {s.text for s in found if s.text in NOT_RUN} == set(NOT_RUN), "NOT_RUN has what no page says any more"
    assert {s.text for s in found if s.text in ENDS} == set(ENDS), "ENDS has what no page says any more"


@pytest.mark.parametrize("page", sorted(TRANSLATED))
def test_a_translation_has_the_same_commands(page: str) -> None:
    theirs = {s.text for s in snippets(TRANSLATED[page]) if s.kind == COMMAND}
    ours = [s.text for s in snippets(page) if s.kind == COMMAND]
    assert len(ours) > 5
    assert set(ours) <= theirs, f"{page}: {set(ours) - theirs}"
    if page.startswith("docs/"):
        assert set(ours) == theirs, f"{page}: {theirs - set(ours)}"


@pytest.mark.parametrize("page", _typed_in(COMMAND))
def test_commands(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _prepare(page, place, monkeypatch)
    wrong = []
    for snippet in _of(page, COMMAND):
        if snippet.text in NOT_RUN:
            continue
        code, said = _typed(snippet.text, place)
        want, word = ENDS.get(snippet.text, (None, ""))
        word_of = re.search(r"\baccprobe ([\w-]+)", snippet.text)
        right = (0, 1) if want is None and word_of and word_of[1] in JUDGES else (want or 0,)
        if code not in right or word not in said or "internal error" in said:
            wrong.append(
                f"{page}:{snippet.line}: {snippet.text}\n  ended with {code}, expected {right}\n{said[-1500:]}"
            )
        _after(place)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [p for p in PAGES if _of(p, SYNOPSIS)])
def test_options_of_synopses_are_there(page: str) -> None:
    """A line that leaves something open (`[--csv FILE]`, `--to h5|npz`) is no command; its options are looked up."""
    root = get_command(cli.build())
    for snippet in _of(page, SYNOPSIS):
        words = snippet.text.split()
        if words[0] != "accprobe":
            continue
        command = root.commands[words[1]]  # type: ignore[attr-defined]
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        asked = {w.strip("[]") for w in words if w.strip("[").startswith("-") and w.strip("[]") != "--"}
        assert asked <= known, f"{page}:{snippet.line}: {sorted(asked - known)}"


@pytest.mark.parametrize("page", _typed_in(PYTHON))
def test_python(page: str, place: Path, captures: Captures) -> None:
    """A page's pieces run one after the other, in one process of their own, after what the text takes for granted."""
    program = _GIVEN + "\n" + "\n".join(f"# line {s.line}\n{s.text}" for s in _of(page, PYTHON))
    (place / "page.py").write_text(program)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*_paths(), *_path()])}
    if page == "docs/development.md":
        env |= {"VLLM_ACCPROBE": "1"}
    for name in ("golden", "mine"):  # what a piece writes may be what another page reads
        if page != "docs/compare.md":
            shutil.rmtree(place / name)
    done = subprocess.run([sys.executable, "page.py"], cwd=place, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{page}\n{program}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


_GIVEN = """
import torch
from pathlib import Path
tmp_path = Path("tmp")
page = Path("page.py").read_text().split("# line", 1)[1]
if "model" in page:
    from transformers import AutoModelForCausalLM
    path, input_ids = "MODEL", torch.arange(20, 40)[None]
    inputs = {"input_ids": input_ids, "max_new_tokens": 2, "do_sample": False}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
hidden_states = attention_output = x = torch.randn(4, 8)
acl_model_out = [hidden_states.clone()]
suspicious = torch.relu
if "EngineHost" in page:
    from support.engine import Ask, EngineHost
    from support.prompts import prompt
    from tiny_model import make
"""


def _path() -> list[str]:
    before = os.environ.get("PYTHONPATH")
    return [before] if before else []


def _paths() -> list[str]:
    return [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]


def _prepare(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the text of a page says lies there already."""
    if page == "README.md":  # its first command makes golden; mine is what the same requests gave elsewhere
        for name in ("golden", "mine"):
            shutil.rmtree(place / name)
        faulty = {"ACCPROBE_FAULT": FAULT, "PYTHONPATH": os.pathsep.join([str(ROOT / "lab" / "planted"), *_path()])}
        env = os.environ | {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": "mine"} | faulty
        subprocess.run(["vllm", "serve", "MODEL"], cwd=place, env=env, check=True, capture_output=True)
    if page == "docs/capture.md":  # `run --dir golden` makes it on the page
        import vllm

        shutil.rmtree(place / "golden")
        (place / "DIR").mkdir()
        (place / "DIR" / "vllm").symlink_to(Path(str(vllm.__file__)).parent)
    if page in ("docs/errcheck.md", "docs/laboratory.md"):
        faults = ROOT / "lab" / "planted"
        if page == "docs/errcheck.md":
            monkeypatch.setenv("ACCPROBE_FAULT", NAN)
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(faults), *_path()]))
        else:
            (place / "lab").symlink_to(faults.parent)
    if page in ("docs/labels.md", "docs/migration.md") or any("labels" in s.text for s in _of(page, COMMAND)):
        shutil.rmtree(place / "DUMP")
        _inside_python(_LABELLED.format("DUMP"), place)
    if page == "docs/labels.md":
        (place / "DIR").mkdir()
        np.save(place / "DIR" / "outTensor0.npy", np.zeros((4, 8), "f4"))
    if page in ("docs/opcheck.md", "skills/accprobe/SKILL.md"):
        _operators_of_two_machines(place)
    if page == "docs/formats.md":
        import torch

        shutil.copytree(place / "golden", place / "PATH")
        torch.save(torch.arange(6.0), place / "a.pth")
        torch.save(torch.arange(6.0), place / "b.bin")

    if page == "docs/opcheck.md":
        with tarfile.open(ROOT / "tests" / "formats" / "data" / "mindspore.tar.xz") as packed:
            packed.extractall(place)  # our own; filter= came with 3.11.4
        (place / "mindspore" / "tensor").rename(place / "mindspore_dump")


_LABELLED = """
import torch
from vllm_accprobe import Probe, gen_id, set_label
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x):
        y, name = self.inner(x), gen_id()
        set_label("pta", name, y)
        set_label("acl", name, y + 1e-7)
        return y
with Probe(model := Model(), dir={!r}):
    model(torch.randn(4, 8))
"""


def _inside_python(program: str, place: Path) -> None:
    subprocess.run([sys.executable, "-c", program], cwd=place, check=True, capture_output=True)


def _operators_of_two_machines(place: Path) -> None:
    """gpu/opcheck.csv and npu/opcheck.csv and the other names of the same: one table, twice."""
    assert cli.main(["opcheck", "DUMP", "-j", "0", "--ops", "RMSNorm", "--out", "gpu"]) == 0
    (place / "npu" / "opcheck.csv").write_bytes((place / "gpu" / "opcheck.csv").read_bytes())
    for name in ("gpu.csv", "npu.csv"):
        shutil.copy(place / "gpu" / "opcheck.csv", place / name)
        details(place, f"accuracy_checking_details_{name}", CHINESE, 1)


def _after(place: Path) -> None:
    """DIR on a page is where the command before it wrote."""
    if (place / "accprobe").is_dir() and not (place / "DIR").exists():
        newest = max((place / "accprobe").iterdir(), key=lambda p: p.stat().st_mtime)
        (place / "DIR").symlink_to(newest)
    there = place / "cases" / "gpu.csv"  # what the line for the GPU, which does not run here, would have made
    if there.with_name("cpu.csv").exists() and not there.exists():
        shutil.copy(there.with_name("cpu.csv"), there)


def _typed(line: str, place: Path) -> tuple[int, str]:
    """(exit code, what was printed). A plain accprobe command runs in this process, anything else in a shell."""
    words = line.split()
    if words[0] == "accprobe" and words[1] not in ("run", "errcheck") and not re.search(r"[|>&;]", line):
        return _inside(line)
    home = ROOT if re.match(r"(bash|python) (scripts|benchmarks)/", line) else place
    done = subprocess.run(["bash", "-c", line], cwd=home, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def _inside(line: str) -> tuple[int, str]:
    import contextlib
    import io
    import shlex

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(shlex.split(line)[1:])
    return int(code or 0), said.getvalue()
