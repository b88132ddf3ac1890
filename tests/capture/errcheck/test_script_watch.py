"""Plain scripts under `accprobe errcheck`: what is named, what is kept, and that the script is as it would be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_accprobe.dump.findings import read
from vllm_accprobe.formats import open_dump

MODEL = """
import copy, os, pickle, sys
import torch

class Breaks(torch.nn.Module):
    def forward(self, x):
        self.n = getattr(self, "n", 0) + 1
        return x / 0 if self.n == 3 else x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = torch.nn.Linear(4, 4), Breaks(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))

class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        return x.masked_fill(attention_mask[..., None] == 0, float("nan")) if attention_mask is not None else x
"""
TRAINS = """
net, loss = Net(), torch.nn.MSELoss()
for k in range(5):
    loss(net(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
    print("after", k)
pickle.loads(pickle.dumps(net.state_dict()))
copy.deepcopy(net)(torch.ones(2, 4))
assert "forward" not in net.__dict__
"""


def under(
    tmp_path: Path, script: str, *options: str, shell: bool = False, code: int = 0
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(MODEL + script)
    accprobe = [sys.executable, "-m", "vllm_accprobe.cli", "errcheck", "--dir", str(tmp_path / "d"), *options]
    words = [sys.executable, str(tmp_path / "script.py")]
    if shell:
        (tmp_path / "x.sh").write_text(f"echo begun\n{' '.join(words)}\n")
        words = ["--exec", f"bash {tmp_path / 'x.sh'}"]
    else:
        words = ["--", *words]
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*accprobe, *words], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_first_bad_module_of_a_training_script(tmp_path: Path) -> None:
    done = under(tmp_path, TRAINS, code=1)
    assert "after 4" in done.stdout  # the script goes on
    first = [line for line in done.stdout.splitlines() if line.startswith("errcheck: ")]
    assert first[0] == "errcheck: first: Inf in inner output.0 [Breaks], step 2: good in, bad out (8 Inf), rank 0"
    assert first[1] == "errcheck:   input input.x: good"
    (report,) = read(tmp_path / "d")
    assert (report.state, report.steps, report.later) == ("closed", 11, 1)  # five of each, and the copy's
    dump = open_dump(tmp_path / "d")
    assert {(r.tap, r.role, r.shape) for r in dump.records} == {
        ("inner", "input.x", (2, 4)), ("inner", "output.0", (2, 4)),
    }  # fmt: skip


def test_exit_and_the_document_s_spellings(tmp_path: Path) -> None:
    done = under(tmp_path, TRAINS, "--type", "overflow", "--exit", "-o", str(tmp_path / "out"), shell=True, code=1)
    assert "begun\nafter 0\nafter 1\nerrcheck: first: Inf in inner output.0 [Breaks], step 2" in done.stdout
    assert "after 2" not in done.stdout
    assert "ScriptExit: accprobe errcheck stops this script" in done.stderr
    assert read(tmp_path / "out")[0].kinds == ("overflow",)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("Tokens()(torch.ones(2, 3, dtype=torch.long))", 0, "nothing bad in 1 steps of 1 rank(s), 2 modules"),
        ("Net(); torch.ones(3) / 0", 3, "nothing was watched"),
    ],
)
def test_nothing_bad_and_nothing_watched(tmp_path: Path, script: str, code: int, said: str) -> None:
    assert f"errcheck: {said}" in under(tmp_path, script, code=code).stdout


def test_padding_is_no_error_and_rows_have_requests(tmp_path: Path) -> None:
    calls = """
net = Tokens()
ids, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
net(input_ids=ids, attention_mask=mask)
with torch.no_grad():
    net.embed.weight[4] = float("nan")
net(input_ids=ids, attention_mask=mask)
"""
    done = under(tmp_path, calls, code=1)
    assert "errcheck: bad values in padding rows of <root> alone: no error" in done.stderr
    assert "first: NaN in embed output.0 [Embedding], step 1, request call-3 position 1 (prefill)" in done.stdout


def test_a_probe_s_model_is_watched_too(tmp_path: Path) -> None:
    """The capture is as it would be, and names and arguments are those of the model."""
    calls = """
from vllm_accprobe import Probe
net = Net()
with Probe(net, dir=sys.argv[0] + ".dump"):
    for _ in range(4):
        net(torch.ones(2, 4))
"""
    done = under(tmp_path, calls, code=1)
    assert "first: Inf in inner output.0 [Breaks], step 2: good in, bad out (8 Inf)" in done.stdout
    assert "input input.x: good" in done.stdout
    assert len(open_dump(tmp_path / "script.py.dump").steps) == 4


def test_a_sitecustomize_of_somebody_else_s_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import sys\nsys.stdout.write('theirs\\n')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    done = under(tmp_path, "print('sitecustomize' in sys.modules, any('startup' in p for p in sys.path))", code=3)
    assert "theirs\n" in done.stdout
    assert "True False\n" in done.stdout
