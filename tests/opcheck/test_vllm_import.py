"""vLLM's own operators, borrowed for inputs that are drawn: what its import says on stderr is nobody's concern."""

import logging
import sys

from vllm_accprobe.opcheck.run import rerun


def test_its_warnings_are_not_repeated(tmp_path, monkeypatch, capfd):
    (tmp_path / "talkative_vllm.py").write_text(
        "import logging\nlogging.getLogger('vllm.x').warning('Triton has no CPU backend')\nclass ThereInQuiet: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rerun.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(rerun, "_MODULES", {"talkative_vllm": ("ThereInQuiet",)})
    found = rerun._native_class("ThereInQuiet")
    assert found is sys.modules["talkative_vllm"].ThereInQuiet
    assert capfd.readouterr().err == ""
    assert not logging.root.manager.disable
