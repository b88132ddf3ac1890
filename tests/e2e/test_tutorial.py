"""The tutorial's first part, typed line by line into one shell: two real servers over HTTP, down to the failing test.

Each line's exit code and last words are compared with what the page says of it. `vllm` is forked from a process that
has imported it, so times are not the page's. With ``--all``, as the other pages: three servers. The other parts of the
page: test_documents.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
PART = PAGE.split("\n## ")[1]
LINES = [line for block in re.findall(r"```bash\n(.*?)```", PART, re.DOTALL) for line in block.splitlines()]
PLANTED = "model.layers.2.self_attn.o_proj"
ENDS = {
    "source": None, "export": None, "python": (0, ""), "FAULT": None,
    "accprobe gate": (1, f"culprit: {PLANTED} (RowParallelLinear)"),
    "accprobe compare": (1, f"FAIL: {PLANTED} (RowParallelLinear) introduces the error"),
    "accprobe opcheck": (1, PLANTED), "accprobe gentest": (0, "accprobe-gentest"), "(cd": (1, "failed"),
}  # fmt: skip
"""How a line begins: its exit code, and words of what it prints; None: it sets something in the shell."""


def test_the_page_shows_what_this_run_prints_first() -> None:
    shown = re.findall(r"```text\n(.*?)```", PART, re.DOTALL)[0]
    assert PLANTED in shown
    assert json.loads(next(line for line in LINES if line.startswith("FAULT"))[7:-1])["module"] == PLANTED


@pytest.mark.engine
@pytest.mark.extra("a page typed in: test_documents.py")
def test_every_line_of_the_first_part(preloaded_vllm: Path, tmp_path: Path) -> None:
    for name in ("scripts", "lab", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "ACCPROBE"))}
    path = os.pathsep.join([str(preloaded_vllm), str(Path(sys.executable).parent), env["PATH"]])
    env |= {"PATH": path, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    setting: list[str] = []
    for line in LINES:
        want = next(want for begin, want in ENDS.items() if line.startswith(begin))
        if want is None:
            if not line.startswith("source"):  # the environment is this one, and accprobe is this checkout's
                setting.append(line.replace("PYTHONPATH=", f"PYTHONPATH={ROOT}:"))
            continue
        done = subprocess.run(["bash", "-c", "\n".join([*setting, line])], cwd=tmp_path, env=env, capture_output=True,
                              text=True, timeout=500, check=False)  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == want[0], f"{line}\n{said[-3000:]}"
        assert want[1] in said, f"{line}\n{said[-3000:]}"
    started = sorted(str(log.relative_to(tmp_path)) for log in (tmp_path / "gated").rglob("engine-*.log"))
    assert started == [f"gated/{side}/engine-0.log" for side in ("floor-0", "golden", "mine")]
    assert (tmp_path / "report" / "compare.html").is_file()
    assert json.loads((tmp_path / "gated" / "gate.json").read_text())["verdict"] == "fail"
