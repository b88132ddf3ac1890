"""How the suite is spread over three processes on two cores.

The problem: most of the time goes into vLLM engines, which tests share by session-scoped fixtures, and each process
makes its own. They wait a third of their time, for signals, sockets and one another. The idea: a piece of work is a
file, since few captures serve several; the files in TOGETHER share what is dear, and what computes with lesser kernels
shares nothing with the rest of its file. Three processes keep two cores busy: they begin with engines, and whoever is
ready takes the next piece.

Tests marked ``extra`` run with ``--all`` only (scripts/test.sh --all): the same once more with lesser kernels, a Ray
cluster, every page typed in, further cases of a kind that has one in the default suite. The mark's words: why, and
which default test has the kind."""

import gc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from preloaded_vllm import preloaded
from support import kernels
from support.engine import V2_ENV
from support.forked_children import forked
from vllm_server import ENV

from vllm_accprobe.whole_file import write_text

# Before any test imports torch. Processes of the suite share two cores: threads of each would wait in loops for one
# another (libgomp, OpenBLAS), which took thirteen times the processor time where tensors are small.
_THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))

LESSER = "engine-avx2"
TOGETHER = {
    "engine-compiled": ("test_compiled.py", "test_graph_taps.py"),
    "engine-captured": ("test_captured_engine.py", "test_captured_taps.py"),
    "engine-ranks": (
        "test_clean_pairs.py", "test_digging.py", "test_dump_size.py", "test_errcheck_engine.py", "test_labels_tp2.py",
        "test_modes_engine.py", "test_shared_and_dealt.py",
    ),
    "gate-server": ("test_real_gate.py", "test_asked_paths.py", "test_real_server.py"),
}  # fmt: skip
"""Files with one compiled engine, which takes half a minute, one process that imports vLLM on a platform of its own,
one that has prepared an engine of two ranks, or one server."""


KINDS: dict[str, dict[str, str]] = {"v1": {}, "v2": V2_ENV}
"""Kind of a process that has imported vLLM → its environment: ``v2``, in which the V2 runner is on."""
IMPORTED_S = 600
SPARED = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
"""Inductor need not compile programs to find out which of the processor's instructions the compiler has: half a minute
in each cache that vLLM makes."""


def _preload(folder: Path, kind: str, until: ExitStack) -> Path:
    """Where the commands of a process are that has imported vLLM (scripts/preloaded_vllm.py)."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "ACCPROBE_FAULT"))}
    if kind == "v2":
        environ["PYTHONPATH"] = os.pathsep.join([str(kernels.FORCED), *filter(None, [environ.get("PYTHONPATH")])])
    return until.enter_context(preloaded(folder, environ | ENV | SPARED | KINDS[kind]))


class Preloading:
    """The process that hands out the tests imports vLLM once for all that run them, when the first of these needs it:
    ``KIND.needed`` in ``folder`` is the question, ``KIND.ready`` the answer, which has an error's text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._running, self._end = folder, ExitStack(), threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        missing = set(KINDS)
        while missing and not self._end.wait(0.2):
            for kind in [k for k in missing if (self.folder / f"{k}.needed").exists()]:
                missing.remove(kind)
                error = ""
                try:
                    _preload(self.folder / kind, kind, self._running)
                except Exception as e:
                    error = f"{type(e).__name__}: {e}"
                write_text(self.folder / f"{kind}.ready", error)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._running.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        # a cleanup: pytest_sessionfinish is not called where another plugin's start fails, and the thread would go on
        config.add_cleanup(Preloading(config._tmp_path_factory.getbasetemp()).close)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def preloads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Folders with the commands of a process that has imported vLLM, by its kind. Each process is started when it is
    first needed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    made: dict[str, Path] = {}
    with ExitStack() as running:

        def shared(kind: str) -> Path:
            folder = tmp_path_factory.getbasetemp().parent
            (folder / f"{kind}.needed").touch()
            end = time.monotonic() + IMPORTED_S
            while not (ready := folder / f"{kind}.ready").exists():
                assert time.monotonic() < end, f"vLLM was not imported in {IMPORTED_S} s"
                time.sleep(0.1)
            assert not (error := ready.read_text()), error
            return folder / kind / "bin"

        def of(kind: str) -> Path:
            if kind not in made:
                several = hasattr(request.config, "workerinput")
                own = tmp_path_factory.getbasetemp() / f"vllm-{kind}"
                made[kind] = shared(kind) if several else _preload(own, kind, running)
            return made[kind]

        yield of


@pytest.fixture(scope="session")
def preloaded_vllm(preloads: Callable[[str], Path]) -> Path:
    """A folder with a command `vllm` that forks from one process with vLLM imported: a server's start is a third. At
    least one test each of a server, a signal and a terminal meets the command that users have."""
    return preloads("v1")


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    with forked():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked extra, too")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else xdist begins with the piece that has most tests, which takes seconds


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups, whichever of the two was loaded first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("extra")]
        items[:] = [item for item in items if not item.get_closest_marker("extra")]
        config.hook.pytest_deselected(items=left_out)
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=_turn)


def pytest_collectstart(collector: pytest.Collector) -> None:
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without groups every process starts every engine, which takes twice the time and memory, and nothing says so.
    What all tests have imported is not searched for garbage, neither meanwhile, a third of the time, nor later."""
    gc.freeze()
    gc.enable()
    grouped = getattr(session.config.option, "loadgroup", False) and hasattr(session.config, "workerinput")
    if grouped and session.items and not any("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist did not group the tests: another pytest than pyproject.toml asks for?")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """`opcheck --repeat` computes with all threads, and sets that for the whole process: not for the next file."""
    torch = sys.modules.get("torch")
    if torch is not None and (nextitem is None or nextitem.path != item.path) and torch.get_num_threads() > _THREADS:
        torch.set_num_threads(_THREADS)


def _group(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    if callspec and callspec.params.get("each_engines") == "avx2":
        return LESSER
    return next((name for name, files in TOGETHER.items() if item.path.name in files), str(item.path))


def _turn(item: pytest.Item) -> bool:
    """When its group begins; xdist deals the groups out in the order of the tests."""
    return not _engine(item)


def _engine(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    marked = any(item.get_closest_marker(name) for name in ("engine", "ray"))
    return marked or any(name.endswith("engines") for name in fixtures)
