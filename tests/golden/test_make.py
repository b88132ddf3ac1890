"""What is captured for a pack, its verification by a second pass, and a check: with a server by hand; engines: e2e."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from forcible_server import Machine
from synthetic_model import MemoryDump, capture, write

from vllm_accprobe.cli import main
from vllm_accprobe.cli.golden import _line
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.gate.localize import MEASURED, RowSizes
from vllm_accprobe.gate.sending.client import NotServed, Reply
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.golden import make as golden
from vllm_accprobe.golden.make import Noise, _differing, fresh, keep_requests, noise, rows_to_capture
from vllm_accprobe.golden.pack import RequestShape

SHAPES = {"long": RequestShape(100, 3), "short": RequestShape(10, 3), "middle": RequestShape(30, 3, (15,))}


@pytest.mark.parametrize(("left", "how", "cut"), [
    (1e9, {}, []),
    (1490.0 + 12, {}, []),  # all 149 rows, and the sampled ones
    (1501.0, {}, ["long"]),
    (1502.0, {"times": 2}, ["long"]),
    (700.0, {}, ["long"]),
    (400.0, {}, ["long", "middle"]),
    (0.0, {}, ["long", "middle", "short"]),
    (1e9, {"most": 500.0}, ["long"]),
    (1e9, {"most": 0.0}, ["long", "middle", "short"]),
])  # fmt: skip
def test_whole_requests_while_they_fit_and_rows_of_the_others(left: float, how: Any, cut: list[str]) -> None:
    rows = rows_to_capture(SHAPES, RowSizes(10.0, 1.0, left), 0, **how)
    assert sorted(rows) == cut
    for name, found in rows.items():
        positions = [p for p, _ in found]
        shape = SHAPES[name]
        assert positions == sorted(set(positions))
        assert {0, shape.prompt_len - 1, shape.prompt_len + shape.generated - 1, *shape.chunk_ends} <= set(positions)


def test_no_cache_has_a_fresh_line() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "x"}
    lines = [PromptLine("a", token_ids=(1,)), PromptLine("b", messages=({"role": "user", "content": [image, text]},)),
             PromptLine("c", messages=({"role": "user", "content": "x"},))]  # fmt: skip
    one, same, other = fresh(lines, "one"), fresh(lines, "one"), fresh(lines, "other")
    assert one == same
    for a, b in zip(one, other, strict=True):
        assert a.parameters["cache_salt"] != b.parameters["cache_salt"]
    parts = [found[1].messages[0]["content"] for found in (one, other)]  # type: ignore[index]
    assert parts[0][0]["uuid"] != parts[1][0]["uuid"]
    assert parts[0][1] == text
    assert one[2].messages == lines[2].messages


# --- a second pass ---


PROMPTS = {"p0": [3, 4, 5, 6, 7], "p1": [8, 9, 10], "p0.again": [3, 4, 5, 6, 7], "p1.again": [8, 9, 10],
           MEASURED: [3, 4, 5, 6]}  # fmt: skip
EMPTY = Sent(Path(), {}, [{}])


def twice(change: str = "") -> MemoryDump:
    """A capture of two requests, both again, and the one with which a row was measured. change: of the second p1."""
    dump = capture(prompts=PROMPTS, together=False)
    if change == "absent":
        steps = steps_of(dump, "p1.again")
        dump.records = [r for r in dump.records if r.step not in steps or r.tap != "model.norm"]
    elif change:
        steps = steps_of(dump, "p1.again")
        at = next(i for i, r in enumerate(dump.records) if r.step in steps and r.tap.endswith("mlp.down_proj"))
        r = dump.records[at]
        assert r.payload is not None
        bits = dump.data[r.payload.off].copy()
        bits.view(np.uint16).reshape(-1)[0] = 0x7FC0 if change == "nan" else 0x4300  # 128
        place = max(dump.data) + 1
        dump.data[place] = bits
        dump.records[at] = replace(r, payload=replace(r.payload, off=place), hash=xxhash.xxh3_128_hexdigest(bits))
    return dump


def steps_of(dump: MemoryDump, name: str) -> set[int]:
    number = next(req for (_, req), r in dump.requests.items() if r.id == name)
    return {step for (_, step, _), space in dump.rows.items() if any(s.req == number for s in space.segments)}


@pytest.mark.parametrize(("change", "says"), [
    ("", "reproduced to the bit: "),
    ("value", "NOT reproduced to the bit: 1 of "),
    ("nan", "at most by inf (relative L2, model.layers.0.mlp.down_proj)"),
    ("absent", " are in one of the two only"),
])  # fmt: skip
def test_equal_hashes_are_equal_bits(change: str, says: str, tmp_path: Path) -> None:
    dump = open_dump(write(twice(change), tmp_path))
    found = noise(dump, EMPTY, EMPTY)
    assert says in found.sentence
    assert found.reproduced == (change == "")
    assert found.tensors > 100
    if change == "value":
        size, tap = found.worst["RowParallelLinear"]
        assert (tap, size > 1) == ("model.layers.0.mlp.down_proj", True)
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("second", "differ"), [([-1.0, -2.0], 0), ([-1.0, -3.0], 1), ([-1.0], 1), (None, 2), ("no reply", 2)]
)
def test_a_log_probability_that_is_missing_is_another(second: Any, differ: int) -> None:
    one = Reply("a", 0.0, 0.0, [1], [2, 3], [-1.0, -2.0])
    assert _differing(one, None if second == "no reply" else replace(one, logprobs=second)) == differ


def test_nothing_captured_twice_is_not_reproduced() -> None:
    assert not Noise(0, 0, 0).reproduced
    assert Noise(0, 0, 0).sentence == "NOT verified: no tensor was captured twice"
    assert "4 tokens have another log-probability" in Noise(9, 9, 0, {}, 4).sentence


def test_only_the_first_pass_is_packed(tmp_path: Path) -> None:
    dump = open_dump(write(twice(), tmp_path / "twice"))
    alone = capture(prompts={name: PROMPTS[name] for name in ("p0", "p1")}, together=False)
    keep_requests(dump, {"p0", "p1"})
    assert {r.id for r in dump.requests.values()} == {"p0", "p1"}
    assert len(dump.records) == len(open_dump(write(alone, tmp_path / "alone")).records)
    assert {step for _, step in dump.steps} == {r.step for r in dump.records if r.step is not None}


@pytest.mark.parametrize(("records", "stop", "says"), [
    (True, "", ""),
    (True, "the budget of 0.1 GB is spent", "the capture is not whole: the budget of 0.1 GB is spent; raise --max-gb"),
    (False, "", "the capture is not whole: no tensor was captured"),
])  # fmt: skip
def test_half_a_capture_is_no_pack(records: bool, stop: str, says: str, tmp_path: Path) -> None:
    dump = twice()
    dump.records = dump.records if records else []
    write(dump, tmp_path / "dump")
    if stop:
        with (tmp_path / "dump" / "rank0000" / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps({"event": "stop", "reason": stop}) + "\n")
    if not says:
        golden.opened(tmp_path).close()
        return
    with pytest.raises(golden.GoldenError, match=says):
        golden.opened(tmp_path)


# --- from a command to a file, and back ---


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(partial(write, twice()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(golden, "served", found.served)
    lines = [{"id": n, "token_ids": PROMPTS[n]} for n in ("p0", "p1")] + [{"id": "text", "prompt": "four"}]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def test_make_sends_three_times_and_packs_what_was_verified(machine: Machine, capsys: Any) -> None:
    words = ["golden", "make", "M", "--out", "x.golden", "--prompts", "prompts.jsonl", "--keep", "work", "--", "--a=1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("reproduced to the bit: ")
    assert "wrote x.golden (" in out
    ((command, environ),) = machine.starts
    assert (command, environ["VLLM_ACCPROBE_ARMED"]) == ("vllm serve M --a=1", "0")
    by_request = dict(machine.asked)
    on = {name for name, armed in by_request.items() if armed is not None and armed["on"]}
    assert on == {"p0", "p1", "text", "p0.again", "p1.again", "text.again", MEASURED}
    assert by_request["p0"]["requests"] == ["p0", "p1", "text"]
    assert by_request["p0.again"]["requests"] == ["p0.again", "p1.again", "text.again"]
    free = next(armed for name, armed in machine.asked if name == "p0")
    assert free is None  # golden's own answers come before anything is captured
    assert main(["golden", "verify", "x.golden"]) == 0
    assert main(["golden", "make", "M", "--out", "y.golden", "--prompts", "prompts.jsonl", "--keep", "work"]) == 2
    assert "--keep work exists and is not empty" in capsys.readouterr().err


def test_a_prompt_that_no_pack_can_carry_is_refused_first(machine: Machine, capsys: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}
    line = {"id": "far", "messages": [{"role": "user", "content": [image]}]}
    Path("prompts.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["golden", "make", "M", "--out", "x.golden", "--prompts", "prompts.jsonl"]) == 2
    assert "prompts.jsonl, far: a prompt has an image that is not in the pack itself" in capsys.readouterr().err
    assert machine.starts == []


def test_the_log_that_an_error_names_is_there_to_be_read(machine: Machine, monkeypatch: Any, capsys: Any) -> None:
    @contextlib.contextmanager
    def dies(name: str, command: str, environ: Any, out: Path, *_: object) -> Iterator[Any]:
        (out / "large").write_bytes(bytes(10))
        (out / "engine-0.log").write_text("ValueError: no memory")
        raise NotServed(f"the server ended; read {out / 'engine-0.log'}")
        yield

    monkeypatch.setattr(golden, "served", dies)
    assert main(["golden", "make", "M", "--out", "x.golden", "--prompts", "prompts.jsonl"]) == 2
    log = Path(capsys.readouterr().err.split("read ")[1].strip())
    assert log.read_text() == "ValueError: no memory"
    assert [p.name for p in Path().glob("accprobe-golden-*/**/*") if p.is_file()] == ["engine-0.log"]


def test_check_compares_ids_first_then_answers_then_rows(machine: Machine, capsys: Any) -> None:
    assert main(["golden", "make", "M", "--out", "x.golden", "--prompts", "prompts.jsonl"]) == 0
    capsys.readouterr()
    machine.asked.clear()
    code = main(["golden", "check", "x.golden", "--keep", "mine", "--", "vllm", "serve", "M"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.startswith("answers: ")
    assert "PASS: " in out
    assert (Path("mine") / "report" / "compare.json").is_file()
    captured = [name for name, armed in machine.asked if armed is not None and armed["on"]]
    assert captured == ["p0", "p1", "text"]
    scored = [name for name, _ in machine.asked if name.endswith(".pass1")]
    assert scored == ["p0.pass1", "p1.pass1", "text.pass1"]
    assert main(["golden", "check", "x.golden", "--", "vllm", "serve", "M"]) == 0
    assert "with --keep DIR they stay" in "".join(capsys.readouterr())
    machine.vocabulary = 2
    assert main(["golden", "check", "x.golden", "--", "vllm", "serve", "M"]) == 3
    assert "makes other token ids of 1 of 1 prompts" in capsys.readouterr().err
    assert not [p for p in Path().iterdir() if p.name.startswith("accprobe-golden-")]


@pytest.mark.parametrize(("words", "line"), [
    (["M"], "vllm serve M"),
    (["M", "--dtype=float32"], "vllm serve M --dtype=float32"),
    (["vllm", "serve", "M", "-x"], "vllm serve M -x"),
    (["A=1", "/bin/vllm", "serve", "M"], "A=1 /bin/vllm serve M"),
    (["python", "-m", "vllm.entrypoints.openai.api_server", "--model=M"],
     "python -m vllm.entrypoints.openai.api_server --model=M"),
    (["vllm serve M -x"], "vllm serve M -x"),
    (["/models/vllm-model", "--x"], "vllm serve /models/vllm-model --x"),
])  # fmt: skip
def test_a_model_or_a_command(words: list[str], line: str) -> None:
    assert _line(words) == line
