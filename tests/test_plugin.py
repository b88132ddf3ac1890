"""The entry points, each in a process of its own: what they import, what they refuse, what they settle."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_accprobe import plugin
from vllm_accprobe.dump import journal_writer

HEAVY = ("numpy", "torch", "safetensors", "h5py", "numba", "pandas", "xxhash", "vllm")
REPORT = f"""
import json, os, sys
import vllm_accprobe.plugin as plugin
plugin.platform()
plugin.register()
ours = sorted(m for m in sys.modules if m.startswith("vllm_accprobe"))
heavy = [m for m in {HEAVY!r} if m in sys.modules]
print(json.dumps([ours, heavy, sorted(plugin._patched)]))
"""


def run(cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "-c", REPORT], env=clean | env, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_off_imports_nothing_and_patches_nothing(tmp_path: Path) -> None:
    for env in (
        {},
        {"VLLM_ACCPROBE": "0"},
        {"VLLM_ACCPROBE": "", "VLLM_ACCPROBE_DIR": "x", "VLLM_ACCPROBE_NONSENSE": "1"},
    ):
        done = run(tmp_path, **env)
        assert done.returncode == 0, done.stderr
        ours, heavy, patched = json.loads(done.stdout)
        assert ours == ["vllm_accprobe", "vllm_accprobe.plugin"]
        assert heavy == []
        assert patched == []
    assert list(tmp_path.iterdir()) == []


def test_a_bad_setting_stops_the_start_with_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, VLLM_ACCPROBE="1", VLLM_ACCPROBE_TOKNES="0")
    assert done.returncode == 2
    assert (
        done.stderr
        == "accprobe: VLLM_ACCPROBE_TOKNES is not a setting of accprobe; did you mean VLLM_ACCPROBE_TOKENS?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_directory_stops_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, VLLM_ACCPROBE="1", VLLM_ACCPROBE_DIR="file/dump")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Not a directory; name a directory that can be written" in done.stderr
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    done = run(tmp_path, VLLM_ACCPROBE="1", VLLM_ACCPROBE_DIR="old")
    assert done.returncode == 2
    assert "old already holds a dump" in done.stderr


def test_what_it_says_of_an_eager_engine_is_what_a_dig_looks_for() -> None:
    from vllm_accprobe import plugin
    from vllm_accprobe.gate.localize import EAGER

    assert EAGER in Path(plugin.__file__).read_bytes()


def test_the_entry_points_are_registered() -> None:
    from importlib.metadata import entry_points

    for group, value in (("vllm.general_plugins", "register"), ("vllm.platform_plugins", "platform")):
        found = [e for e in entry_points(group=group) if e.name == "accprobe"]
        assert [e.value for e in found] == [f"vllm_accprobe.plugin:{value}"]


def test_forcing_alone_leaves_the_engine_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument, no shutdown, no directory of a dump; with a directory of its own, that one, for its owner."""
    for name in [name for name in os.environ if name.startswith("VLLM_ACCPROBE")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    patched: list[str] = []
    for name in ("_patch_engine_args", "_tell_replicas", "_patch_workers", "_patch_shutdown", "_patch_worker_end"):
        monkeypatch.setattr(plugin, name, lambda name=name: patched.append(name))
    monkeypatch.setenv("VLLM_ACCPROBE_FORCE", "1")
    plugin.register()
    assert (patched, list(tmp_path.iterdir())) == (["_tell_replicas", "_patch_workers"], [])
    assert not any(name in os.environ for name in ("VLLM_ACCPROBE_DIR", "VLLM_ACCPROBE_RUN_ID"))
    monkeypatch.setenv("VLLM_ACCPROBE_FORCE", "steps")
    plugin.register()
    assert os.environ["VLLM_ACCPROBE_FORCE"] == str(tmp_path / "steps")
    assert (tmp_path / "steps").stat().st_mode & 0o777 == 0o700
    assert [p.name for p in tmp_path.iterdir()] == ["steps"]


class Odd:
    def is_alive(self) -> bool:
        raise AssertionError("can only test a child process")


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("args", "kwargs", "line"), [
    (([],), {}, ""),
    ((), {"worker_procs": []}, ""),
    (([Odd()],), {}, "did not wait for the workers' dumps (AssertionError: can only test a child process)"),
    ((), {"procs": []}, ""),
], ids=("position", "name", "error", "another name"))  # fmt: skip
def test_workers_are_ended_whatever_happens_before(monkeypatch, static, args, kwargs, line):
    called: list[Any] = []
    lines: list[str] = []

    def _ensure_worker_termination(*args: Any, **kwargs: Any) -> None:
        called.append((args[not static :], kwargs))

    module, package = ModuleType("vllm.v1.executor.multiproc_executor"), ModuleType("vllm.v1.executor")
    method = staticmethod(_ensure_worker_termination) if static else _ensure_worker_termination
    executor = type("MultiprocExecutor", (), {"_ensure_worker_termination": method})
    module.MultiprocExecutor = executor  # type: ignore[attr-defined]
    for made in (package, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(plugin, "_patched", set())
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", "somewhere")
    monkeypatch.setattr(plugin, "_say", lines.append)
    monkeypatch.setattr(journal_writer, "writing", lambda root: True)
    plugin._patch_worker_end()
    executor()._ensure_worker_termination(*args, **kwargs)  # type: ignore[attr-defined]
    assert called == [(args, kwargs)]
    assert len(lines) == bool(line)
    assert line in "".join(lines)


def test_a_directory_for_steps_that_cannot_be_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, VLLM_ACCPROBE_FORCE="file/steps")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Not a directory; name another directory, or 1" in done.stderr
