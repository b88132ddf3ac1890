"""The commands that would decide, typed in one after the other: each finds what the one before it left."""

import shlex
from dataclasses import replace

from synthetic_model import capture, scaled, write

from vllm_accprobe import compare
from vllm_accprobe.cli import main

RUN = {"tool": "accprobe", "model": {"path": "MODEL", "dtype": "bfloat16"}, "engine": {"runner": "vllm.R"}}


def test_each_line_finds_what_the_line_before_it_left(tmp_path, monkeypatch, capsys):
    """Whatever serves the model is played by a capture of the same synthetic model into the same folder; a replay of
    that needs more than it has, and is left to tests/opcheck/proof/test_replay_process.py."""
    monkeypatch.chdir(tmp_path)
    one = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    sides = {
        "golden": capture(**one),
        "mine": capture(faults={"model.layers.1.mlp.down_proj": scaled(1.2)}, **one),
    }
    for name, dump in sides.items():
        write(dump, tmp_path / f"my {name}")
    found = replace(compare("my golden", "my mine"), origins=[], replayed="whole", coverage={"rows_compared": 4})
    found = replace(found, pairs=[replace(p, identical=False) for p in found.pairs])  # as on two machines
    probe = {"task": "tensor", "graphs": True, "modules": ["mlp"]}
    asking = replace(found, golden_run=RUN | {"probe": probe}, mine_run=RUN | {"probe": probe})
    ran = []
    for step in asking.would_decide:
        for line in step["command"].splitlines():
            words = shlex.split(line)
            if words[0] == "accprobe":
                assert main(words[1:]) in (0, 1), (line, capsys.readouterr().err)
                ran.append(words[1])
            else:
                settings = dict(word.split("=", 1) for word in words[: words.index("vllm")])
                where = settings["VLLM_ACCPROBE_DIR"]
                write(sides["golden" if "golden" in where else "mine"], tmp_path / where)
    assert ran == ["compare", "compare", "compare", "compare", "compare", "compare"]
