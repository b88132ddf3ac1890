"""What vLLM answers: one real import, and answers of other releases given by hand."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from vllm_accprobe.capture.vllm.names_by_release import PLACES
from vllm_accprobe.doctor import checks as engine, inside
from vllm_accprobe.doctor.checks import ERROR, OK, WARNING

GOOD = {
    "version": {"value": "0.32.0"},
    "platform": {"value": {"class": "vllm.platforms.cpu.CpuPlatform", "device_type": "cpu", "device": "", "own": True}},
    "worker": {"value": "vllm.v1.worker.worker_base"},
    "runners": {"value": {"V1": {"there": True, "missing": []}, "V2": {"there": False}}},
    "default_runner": {"value": "V1"}, "scheduler": {"value": []}, "engine_args": {"value": []},
    "capture": {"value": "x"},
}  # fmt: skip


UNUSED = {"value": {"V1": {"there": True, "missing": []}, "V2": {"there": True, "missing": ["prepare_inputs"]}}}


def levels(**changes):
    """{check: worst level} for GOOD with other answers."""
    worst = {}
    for f in engine.findings(copy.deepcopy(GOOD) | changes):
        worst[f.check] = max(worst.get(f.check, OK), f.level, key=(OK, WARNING, ERROR).index)
    return worst


def test_good_answers_are_ok():
    assert set(levels().values()) == {OK}


@pytest.mark.parametrize(("changes", "check", "level"), [
    ({"worker": {"error": "LookupError: no WorkerWrapperBase.init_device"}}, "hook point", ERROR),
    ({"scheduler": {"value": ["SchedulerOutput.num_scheduled_tokens"]}}, "scheduler", ERROR),
    ({"engine_args": {"value": ["enforce_eager"]}}, "eager", WARNING),
    ({"capture": {"error": "ImportError: no xxhash"}}, "capture", ERROR),
    ({"platform": {"error": "RuntimeError: two plugins"}}, "platform", ERROR),
    ({"runners": {"value": {"V1": {"there": True, "missing": ["execute_model"]}}}}, "model runner", ERROR),
    ({"platform": {"value": {"class": "vllm.platforms.interface.UnspecifiedPlatform", "device_type": "", "device": "",
                             "own": True}}}, "platform", ERROR),
    ({"runners": {"value": {"V1": {"there": False}, "V2": {"there": False}}}}, "model runner", WARNING),
    ({"runners": UNUSED}, "model runner", WARNING),  # one that is not used may lack what it likes
    ({"runners": UNUSED, "default_runner": {"value": "V2 or V1, by model"}}, "model runner", ERROR),
    ({"runners": {"value": {"V1": {"there": True, "missing": []}, "V2": {"there": True, "error": "x"}}}},
     "model runner", OK),
])  # fmt: skip
def test_what_each_answer_means(changes, check, level):
    assert levels(**changes)[check] == level


LATER = """
from dataclasses import dataclass

@dataclass
class InputBatch:
    req_ids: list
    idx_mapping_np: object
    num_scheduled_tokens: object
    num_tokens: int
    num_tokens_after_padding: int
    input_ids: object
    positions: object
    num_computed_tokens_np: object
    prefill_len_np: object

class RequestState:
    def __init__(self):
        self.prefill_len = object()

class GPUModelRunner:
    def __init__(self):
        self.req_states, self.device = RequestState(), object()
        self.vllm_config = object()
    def get_model(self): ...
    def load_model(self): ...
    def execute_model(self): ...
    def prepare_inputs(self): ...
"""
"""The V2 runner of vLLM 0.23 (v1/worker/gpu/model_runner.py, input_batch.py, states.py), as far as capture reads it."""
EARLY = LATER.replace("    num_computed_tokens_np: object\n    prefill_len_np: object\n", "")
"""That of 0.13 to 0.22.1."""


@pytest.mark.parametrize(("source", "release", "missing"), [
    (LATER, (0, 23), []),
    (LATER.replace("self.prefill_len", "self.prefill"), (0, 23), []),
    (LATER.replace("    positions: object\n", ""), (0, 23), ["InputBatch.positions"]),
    (EARLY, (0, 22, 1), []),
    (EARLY, (0, 23), ["InputBatch.prefill_len_np"]),
    (EARLY.replace("self.prefill_len", "self.prefill"), (0, 22, 1), ["RequestState.prefill_len"]),
    (LATER.replace("    idx_mapping_np: object\n", ""), (0, 23), ["InputBatch.idx_mapping_np"]),
    (LATER.replace("prepare_inputs", "prepare"), (0, 23), ["GPUModelRunner.prepare_inputs"]),
    (LATER.replace("self.req_states", "self.states"), (0, 23), ["GPUModelRunner.req_states"]),
    (LATER.replace("class InputBatch", "class Batch"), (0, 23), ["InputBatch"]),
    ("raise OSError('no driver')", (0, 23), "OSError: no driver"),
    (None, (0, 23), None),
])  # fmt: skip
def test_what_the_newer_runner_lacks_is_found_in_its_own_classes(tmp_path, monkeypatch, source, release, missing):
    """The names are those of the declaration without which no row is told, in a release that has them."""
    if source is not None:
        (tmp_path / "v2_runner_of_a_release.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "v2_runner_of_a_release", raising=False)
    names = inside.RUNNERS["V2"]
    places = [
        replace(place, at=(f"v2_runner_of_a_release:{place.at[0].partition(':')[2]}",))
        for place in PLACES if place.name in names and place.due(release)
    ]  # fmt: skip
    said = {"error": missing} if isinstance(missing, str) else {"missing": missing}
    expected = {"there": False} if missing is None else {"there": True, **said}
    assert inside._runner(places, release) == expected
    sys.modules.pop("v2_runner_of_a_release", None)


@pytest.mark.parametrize(("code", "said"), [
    ("import time; time.sleep(60)", "importing vLLM did not end within 1 s"),
    ("raise SystemExit('no driver')", "importing vLLM ended with exit code 1: no driver"),
    ("import os; os.kill(os.getpid(), 9)", "importing vLLM ended with signal 9"),
    ("print('accprobe-doctor:{nonsense')", "importing vLLM ended with exit code 0"),
])  # fmt: skip
def test_a_process_that_does_not_answer_is_one_error(code, said):
    answers = engine.answers_of(
        os.environ, timeout=1.0 if "sleep" in code else 30.0, command=[sys.executable, "-c", code]
    )
    (finding,) = engine.findings(answers)
    assert (finding.level, finding.text) == (ERROR, said)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_vllm_that_is_installed_has_all_hook_points(tmp_path):
    environ = {**os.environ, "VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(tmp_path / "dump")}
    answers = engine.answers_of(environ, timeout=180.0)
    found = engine.findings(answers)
    assert [f for f in found if f.level == ERROR] == []
    checks = [f.check for f in found]
    assert checks[:3] == ["platform", "hook point", "model runner"]
    assert not (tmp_path / "dump").exists()


def test_asking_imports_no_vllm_here():
    code = (
        "import sys, vllm_accprobe.doctor.checks as d; d.examine({}, quick=True); "
        "sys.exit(', '.join(m for m in ('vllm', 'torch', 'numpy', 'pandas') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
