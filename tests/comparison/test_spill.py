"""Row tables beyond the bound lie on disk, and nothing about the result tells."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import capture, scaled

from vllm_accprobe import spill_buffer
from vllm_accprobe.comparison import engine, store
from vllm_accprobe.report.html import page
from vllm_accprobe.spill_buffer import SpillBuffer


def test_arrays_beyond_the_bound_go_to_disk_and_stay_what_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(spill_buffer, "CHUNK", 1 << 16)
    shelf = SpillBuffer(tmp_path, bound=1000)
    made = [np.random.default_rng(i).standard_normal((i * 37 % 50, 11)) for i in range(60)]
    kept = [shelf.keep(a) for a in made]
    shelf.rest()
    for a, b in zip(made, kept, strict=True):
        np.testing.assert_array_equal(a, b)
    assert shelf.in_memory <= 1000
    assert shelf.in_memory + shelf.on_disk == sum(a.nbytes for a in made)
    assert list(tmp_path.iterdir()) == []  # the files have no names: nothing stays behind a crash


def test_a_table_larger_than_a_chunk_and_a_directory_that_cannot_be_written(tmp_path):
    large = np.arange(float(spill_buffer.CHUNK // 8 + 5))
    np.testing.assert_array_equal(SpillBuffer(tmp_path, bound=0).keep(large), large)
    nowhere = SpillBuffer(tmp_path / "none", bound=0)
    assert nowhere.keep(large[:10]) is not None
    assert (nowhere.on_disk, nowhere.in_memory) == (0, 80)


@pytest.mark.skipif(not os.path.exists("/proc/self/mounts") or os.geteuid() != 0, reason="needs root and Linux")
def test_on_a_full_disk_arrays_stay_in_memory(tmp_path):
    """A tmpfs of 1 MB, in a process of its own: what maps a hole there is killed as soon as it writes."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    code = (
        "import sys, numpy as np\nfrom pathlib import Path\n"
        "from vllm_accprobe.spill_buffer import SpillBuffer\n"
        "shelf, made = SpillBuffer(Path(sys.argv[1]), bound=0), np.arange(1 << 19)\n"
        "assert (shelf.keep(made) == made).all()\nprint(shelf.in_memory, shelf.on_disk)"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert (done.returncode, done.stdout) == (0, "4194304 0\n"), done.stderr


def test_room_to_be_filled_lies_where_its_size_says(tmp_path):
    shelf = SpillBuffer(tmp_path, bound=100).another(bound=16)
    small, large = shelf.empty(4, np.float32), shelf.empty(5, np.int64)
    small[:], large[:] = 1.5, range(5)
    shelf.rest()
    assert (small.tolist(), large.tolist()) == ([1.5] * 4, [0, 1, 2, 3, 4])
    assert (shelf.in_memory, shelf.on_disk) == (16, 40)


@pytest.mark.parametrize("bound", [0, 5000])
def test_the_result_is_the_same(tmp_path, monkeypatch, bound):
    golden, mine = capture(), capture(faults={"model.layers.1.mlp.down_proj": scaled(1.1)})
    plain = engine.compare(golden, mine)
    monkeypatch.setattr(engine, "SpillBuffer", lambda *_: SpillBuffer(tmp_path, bound))
    judged = []
    another = lambda self, _: judged.append(SpillBuffer(tmp_path, bound)) or judged[-1]  # noqa: E731
    monkeypatch.setattr(SpillBuffer, "another", another)
    spilled = engine.compare(golden, mine)
    assert spilled.measured.shelf.on_disk > 0
    assert all(shelf.on_disk > 0 for shelf in judged)
    assert spilled.rows.shelf.on_disk > 0
    assert json.dumps(spilled.to_json()) == json.dumps(plain.to_json())
    assert page(spilled) == page(plain)
    assert spilled.pairs == plain.pairs
    for name in ("pair", "request", "position", "error", "ratio"):
        np.testing.assert_array_equal(getattr(spilled.rows, name), getattr(plain.rows, name))
    a, b = tmp_path / "a", tmp_path / "b"
    for directory, result in ((a, plain), (b, spilled)):
        directory.mkdir()
        store.save(result.measured, directory)
    again = [replace(engine.rejudge(store.load(d)), measured=None) for d in (a, b)]
    assert again[0].pairs == again[1].pairs == plain.pairs
