"""Who ends an engine waits for what it writes, and not for what it does not."""

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from vllm_accprobe import plugin
from vllm_accprobe.dump import journal_writer
from vllm_accprobe.dump.journal_writer import writing

ENGINE = """
import signal, sys, time
from pathlib import Path
from vllm_accprobe.dump.journal_writer import JournalFile
root, writes, then = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
(root / "rank0000").mkdir(parents=True)
journal = JournalFile(root / "rank0000")
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready", flush=True)
while not told:
    time.sleep(0.01)
until = time.monotonic() + writes
while time.monotonic() < until:
    time.sleep(0.1)
    if then != "stalls":
        journal.append(b"{}\\n")
journal.close()
while then == "hangs":
    time.sleep(1)
"""


class Engine:
    """A process with the face of those that vLLM ends."""

    def __init__(self, root: Path, writes: float, then: str):
        argv = [sys.executable, "-c", ENGINE, str(root), str(writes), then]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.terminate()

    def join(self, timeout: float) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(
    ("root", "writes", "then", "least", "alive"),
    [
        ("d", 1.5, "hangs", 1.4, True),  # longer than the settling time, because it writes
        ("d", 0.0, "hangs", 0.5, True),  # it has written: no reason to wait for half a minute
        ("d", 0.0, "ends", 0.0, False),
        ("d.2", 1.5, "hangs", 1.4, True),  # a second engine's dump
        ("d/errcheck", 1.5, "hangs", 1.4, True),
    ],
)
def test_a_front_end_waits_while_a_dump_is_written(tmp_path, monkeypatch, root, writes, then, least, alive):
    monkeypatch.setattr(journal_writer, "SETTLE_S", 0.5)
    engine = Engine(tmp_path / root, writes, then)
    try:
        assert writing(tmp_path / "d")
        begin = time.monotonic()
        journal_writer.end([engine], 0.0, str(tmp_path / "d"))
        assert least <= time.monotonic() - begin < 15
        assert engine.is_alive() is alive
        assert not writing(tmp_path / "d")
    finally:
        engine.kill()


@pytest.mark.parametrize(
    ("then", "most", "closed"), [("ends", 60.0, True), ("ends", 1.0, False), ("stalls", 60.0, False)]
)
def test_a_dump_that_grows_is_waited_for_and_not_for_ever(tmp_path, monkeypatch, then, most, closed):
    for name, value in {"SETTLE_S": 0.2, "GRACE_S": 1.0, "GROWING_S": most}.items():
        monkeypatch.setattr(journal_writer, name, value)
    for wait in (lambda procs, root: journal_writer.end(procs, 0.0, root), journal_writer.settle):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        engine = Engine(root, 3.0, then)
        try:
            engine.terminate()
            wait([engine], str(root))
            assert writing(root) is not closed
        finally:
            engine.kill()


@pytest.mark.parametrize("newer", [False, True])
def test_the_front_end_of_each_release_waits_before_it_kills(tmp_path, monkeypatch, newer):
    """0.11 to 0.15 (v1/utils.py: 301): ``shutdown(procs)``, five seconds; from 0.18 on with a ``timeout``, 0 as it is
    configured. Both are looked up in v1/engine/utils.py when the engine ends."""
    found: list[tuple[bool, dict[str, float]]] = []

    def early(procs: list[Engine]) -> None:
        found.append((procs[0].is_alive(), {}))

    def late(procs: list[Engine], timeout: float | None = None) -> None:
        found.append((procs[0].is_alive(), {} if timeout is None else {"timeout": timeout}))

    utils, package = ModuleType("vllm.v1.engine.utils"), ModuleType("vllm.v1.engine")
    utils.shutdown = late if newer else early  # type: ignore[attr-defined]
    package.utils = utils  # type: ignore[attr-defined]
    for module in (package, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugin, "_patched", set())
    monkeypatch.setattr(journal_writer, "SETTLE_S", 20.0)  # an interpreter ends some time after its last line
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    plugin._patch_shutdown()
    plugin._patch_shutdown()  # once
    engine = Engine(tmp_path / "d", 1.0, "ends")
    try:
        utils.shutdown([engine], timeout=0.0) if newer else utils.shutdown([engine])
        assert found == [(False, {"timeout": 0.0} if newer else {})]  # it had ended by itself
        assert not writing(tmp_path / "d")
    finally:
        engine.kill()


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("writes", "then"), [(1.5, "ends"), (0.5, "hangs")])  # what hangs is vLLM's to kill
def test_an_engine_waits_for_what_its_workers_write(tmp_path, monkeypatch, static, writes, then):
    written: list[bool] = []

    def _ensure_worker_termination(*args: list[Engine]) -> None:
        assert args[-1] == [worker]
        written.append(not writing(tmp_path / "d"))

    module, package = ModuleType("vllm.v1.executor.multiproc_executor"), ModuleType("vllm.v1.executor")
    method = staticmethod(_ensure_worker_termination) if static else _ensure_worker_termination
    module.MultiprocExecutor = type("MultiprocExecutor", (), {"_ensure_worker_termination": method})  # type: ignore[attr-defined]
    for made in (package, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(plugin, "_patched", set())
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    plugin._patch_worker_end()
    plugin._patch_worker_end()  # once
    worker = Engine(tmp_path / "d", writes, then)
    try:
        worker.terminate()
        module.MultiprocExecutor()._ensure_worker_termination([worker])
        assert written == [True]
    finally:
        worker.kill()


def test_nothing_that_can_be_asked(tmp_path: Path) -> None:
    assert not writing(tmp_path / "nowhere")
    (tmp_path / "errcheck-rank0000.json").write_text("no report")
    assert not writing(tmp_path)
