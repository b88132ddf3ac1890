"""Two machines of a Ray cluster, here on one, measure what the command compares; one worker is killed midway."""

import os
import signal
import threading
import time
from importlib.util import find_spec

import pytest

from vllm_accprobe.comparison import distributed
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.report.table import write_csv

if find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'vllm-accprobe[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.ray, pytest.mark.extra]


@pytest.fixture(scope="module")
def machines():
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    two = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    two.add_node(num_cpus=1)
    yield two
    ray.shutdown()
    two.shutdown()


def kill_one_soon(done, over):
    """Kills the process of one of our workers as soon as there is one; on a busy machine that takes its time."""
    while not over.is_set():
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/cmdline", "rb") as f:
                        mine = b"ray::Station" in f.read()
                except OSError:
                    continue
                if mine:
                    os.kill(int(entry), signal.SIGKILL)
                    done.append(int(entry))
                    return
        time.sleep(0.01)


def test_two_machines_and_a_killed_worker_give_the_same_csv(machines, dumps, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed.measure_on, "__defaults__", (1,))
    killed, over = [], threading.Event()
    killer = threading.Thread(target=kill_one_soon, args=(killed, over))
    killer.start()
    try:
        far = compare(*dumps, ray=machines.address)
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1
    write_csv(far, tmp_path / "far.csv")
    write_csv(compare(*dumps), tmp_path / "near.csv")
    assert (tmp_path / "far.csv").read_bytes() == (tmp_path / "near.csv").read_bytes()
    assert far.origins[0]["module"] == "model.layers.1.mlp.down_proj"


def test_files_that_no_machine_has_are_named(machines, dumps, monkeypatch):
    monkeypatch.setattr(distributed, "_readable", lambda paths: [f for f in paths if f[0] == 0])
    with pytest.raises(CompareError, match=r"no machine of the Ray cluster can read all files of .*seg-00000"):
        compare(*dumps, ray=machines.address)


def test_no_cluster_is_one_clear_line(dumps):
    with pytest.raises(CompareError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        compare(*dumps, ray="127.0.0.1:1")


def test_no_worker_takes_python_from_the_directory_of_the_command(machines, dumps, tmp_path, monkeypatch):
    """It may be a stranger's dump. Ray tells its workers to look for modules there."""
    mark = tmp_path / "mark"
    for name in ("numpy", "llvmlite", "vllm_accprobe"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write(__name__ + ' ')\n")
    monkeypatch.chdir(tmp_path)
    try:
        result = compare(*dumps, ray=machines.address)
    finally:
        assert not mark.exists(), mark.read_text()
    assert result.pairs
    assert os.getcwd() == os.path.realpath(tmp_path)
