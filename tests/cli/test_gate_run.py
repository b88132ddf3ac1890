"""``accprobe gate --dig`` as typed: by hand where a side is a folder, and what goes wrong; engines: e2e."""

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from made_folders import folder
from odd_server import started_here

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import replies


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder(Path("golden"), 1)
    folder(Path("equal"), 2)
    folder(Path("wrong"), 3, fault=lambda length, k, i: 1.0 if length == 60 and k > 3 else 0.3)
    return tmp_path


def gate(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["gate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_of_folders_the_commands_are_printed(here: Path, capsys: Any) -> None:
    code, plain, _ = gate(capsys, "golden", "wrong")
    assert code == 1
    code, out, err = gate(capsys, "golden", "wrong", "--localize", "--localize-gb", "3")
    assert (code, err) == (1, "")
    assert out.startswith(plain)
    lines = out[len(plain) :].splitlines()
    assert lines[0].startswith("dig: token ")
    assert " of p2 (" in lines[0]
    settings = next(line for line in lines if "VLLM_ACCPROBE_DIR=mine-dump" in line)
    assert "VLLM_ACCPROBE_MAX_GB=3" in settings
    assert "p2" in settings.partition("VLLM_ACCPROBE_REQUESTS=")[2]
    assert sum("accprobe send --teacher-force golden " in line for line in lines) == 2
    assert lines[-1] == "  accprobe compare golden-dump mine-dump --out compare"
    code, out, err = gate(capsys, "golden", "wrong", "--localize", "--json")
    assert code == 1
    assert json.loads(out)["verdict"] == "fail"
    assert err.startswith("dig: token ")


def test_a_pass_is_not_dug(here: Path, capsys: Any) -> None:
    code, out, _ = gate(capsys, "golden", "equal", "--localize")
    assert (code, out) == gate(capsys, "golden", "equal")[:2]
    assert code == 0


# --- of commands and URLs, with a server that starts at once ---


SECRET = "1234567"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", fake_vllm.installed(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    lines = [{"id": f"p{i}", "token_ids": [int(SECRET)] * (10 + 7 * i), "max_tokens": 6} for i in range(10)]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def here_served(served: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without a process for each server, where nothing depends on one."""
    monkeypatch.setattr("vllm_accprobe.gate.localize.served", started_here(fake_vllm.answers))
    return served


def gate_out(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["gate", *words, "--prompts", "prompts.jsonl", "--out", "out"])
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    return code, said.out, said.err


def starts(side: str) -> int:
    return len(list(Path("out", side).glob("engine-*.log")))


def test_from_two_commands_to_a_verdict(served: Path, capsys: Any) -> None:
    """float32 against bfloat16 passes by golden's own float32, which is started for it; the same fails without it."""
    words = ("vllm serve M --dtype=bfloat16", "vllm serve M --dtype=float32")
    code, out, err = gate_out(capsys, *words)
    assert (code, err) == (0, "")
    assert out.startswith("PASS: no further away than servers known to be right are from one another, though further")
    assert "floor 0 (golden's command with --dtype=float32)" in out
    assert [starts(side) for side in ("golden", "mine", "floor-0")] == [1, 1, 1]
    golden, mine, floor = (replies.read(Path("out", side)) for side in ("golden", "mine", "floor-0"))
    for other in (mine, floor):
        for p in (0, 1):
            assert {n: r.token_ids for n, r in other.passes[p].items()} == {
                n: r.token_ids for n, r in golden.passes[0].items()
            }
    said = json.loads(Path("out/gate.json").read_text())
    assert (said["verdict"], said["floors"][0]["name"]) == ("pass", "golden's command with --dtype=float32")
    assert Path("out/gate.json").stat().st_mode & 0o777 == 0o600
    assert gate_out(capsys, *words)[:2] == (0, out)
    assert [starts(side) for side in ("golden", "mine", "floor-0")] == [1, 1, 1]  # nothing is started again
    code, out, _ = gate_out(capsys, *words, "--no-floor")
    assert code == 1
    assert "the limit is golden's own batching alone" in out


def test_a_fault_fails_and_its_condition_is_said(here_served: Path, capsys: Any) -> None:
    code, out, _ = gate_out(capsys, "vllm serve M", "vllm serve M --fault=0.1")
    assert code == 1
    assert out.startswith("FAIL: further away than servers known to be right are from one another, only decode (10 ")
    said = json.loads(Path("out/gate.json").read_text())
    assert said["condition"]["axis"] == "phase"
    assert all(w["ordinal"] > 0 for w in said["worst"])


def test_a_floor_that_is_wrong_excuses_nothing(here_served: Path, monkeypatch: Any, capsys: Any) -> None:
    """float16 is broken: float32 is the floor; where both are, nothing is judged."""
    words = ("vllm serve M", "vllm serve M --fault=0.1")
    monkeypatch.setitem(fake_vllm.ROUNDING, "float16", 5.0)
    code, out, _ = gate_out(capsys, *words)
    assert code == 1
    assert "floor 0 (golden's command with --dtype=float32)" in out
    monkeypatch.setitem(fake_vllm.ROUNDING, "float32", 5.0)
    shutil.rmtree("out")
    code, out, _ = gate_out(capsys, *words)
    assert code == 3
    assert out.startswith("no verdict: golden and golden's command with --dtype=float16 differ by ")
    said = json.loads(Path("out/gate.json").read_text())
    assert (said["verdict"], len(said["floors"])) == (None, 2)


def test_servers_that_could_be_captured_leave_nothing_where_they_agree(here_served: Path, capsys: Any) -> None:
    """Both are eager, on devices of their own: they run on until the verdict, mine after all floors."""
    golden, mine, floor = (
        f"CUDA_VISIBLE_DEVICES={i} vllm serve M --enforce-eager --dtype={dtype}"
        for i, dtype in enumerate(("bfloat16", "float32", "float32"))
    )
    code, out, _ = gate_out(capsys, golden, mine, "--localize", "--floor", floor)
    assert code == 0, out
    logs = [Path("out", side, "engine-0.log") for side in ("golden", "floor-0", "mine")]
    assert sorted(logs, key=lambda log: log.stat().st_ctime_ns) == logs
    assert [starts(side) for side in ("golden", "mine", "floor-0")] == [1, 1, 1]
    assert not Path("out/dig").exists()


def test_a_killed_server_is_one_line_and_the_same_command_goes_on(served: Path, capsys: Any) -> None:
    # two at a time: at the fourteenth request at least two of pass 1 are answered and written
    words = ("vllm serve M", "vllm serve M --dies-after=13", "--concurrency", "2")
    code, out, err = gate_out(capsys, *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("accprobe: mine: pass 1, request ")
    assert "are kept in out/mine, and the same command goes on from there; the server ended with exit code 137" in err
    kept = {p: replies.answered(Path("out/mine", replies.pass_name(p))) for p in (0, 1)}
    assert len(kept[0]) == 10
    assert gate_out(capsys, *words)[0] == 0
    assert [starts(side) for side in ("golden", "mine")] == [1, 2]
    notes = json.loads(Path("out/gate.json").read_text())["notes"]
    assert any("mine's passes were gone on with 1 times" in note for note in notes)


def test_a_full_disk_names_the_file_and_the_same_command_goes_on(here_served: Path, capsys: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        code, out, err = gate_out(capsys, "vllm serve M", "vllm serve M --fault=0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "accprobe: out/golden/pass-0.jsonl: the file would be larger than files may be (" in err
    assert 0 < len(replies.answered(Path("out/golden/pass-0.jsonl"))) < 10
    assert gate_out(capsys, "vllm serve M", "vllm serve M --fault=0.1")[0] == 1


def test_a_floor_in_a_dtype_that_the_server_refuses(here_served: Path, capsys: Any) -> None:
    """A floor may be any side; a dtype that is none is refused before anything starts."""
    assert gate_out(capsys, "vllm serve M", "vllm serve M -x", "--floor-dtype", "float8")[0] == 2
    assert not Path("out").exists()
    words = ("vllm serve M", "vllm serve M -x", "--floor", "vllm serve M --dtype=float16")
    assert gate_out(capsys, *words)[0] == 0
    assert starts("floor-0") == 1
    code, _, err = gate_out(capsys, "vllm serve M", "vllm serve M -x", "--floor", "vllm serve M --dtype=float8 -y")
    assert code == 2
    assert "floor 0: out/floor-0 is of another command" in err
    assert main(["gate", "out/golden", "out/mine", "--floor", "out/floor-0"]) == 0


def test_a_server_that_does_not_start_is_one_line(served: Path, capsys: Any) -> None:
    got, out, err = gate_out(capsys, "vllm serve M", "vllm serve M --dtype=float8")
    assert (got, out, len(err.splitlines())) == (2, "", 1), err
    assert "mine: the command ended with exit code 1 before it" in err


SAME = "PASS: the same numbers in every compared token (10 prompts)"


def chats(n: int, content: str = SECRET) -> None:
    lines = [{"id": f"q{i}", "messages": [{"role": "user", "content": content * (i + 1)}], "max_tokens": 6}
             for i in range(n)]  # fmt: skip
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("options", "code", "first", "then"),
    [
        ("-x", 0, SAME, ""),
        ("--template=old", 1, "FAIL: prompt q0: golden renders 8 tokens, mine 9: they differ first at position 7: "
         "golden 271 ('\\n\\n'), mine 198 ('\\n'): tokenizer, the text is the same",
         "with golden's token ids for both: " + SAME),
        ("--template=none", 1, "FAIL: prompt q0: golden renders 8 tokens, mine 0: mine refuses its messages (HTTP 400: "
         "no chat template)", "with golden's token ids for both: " + SAME),
        ("--template=old --fault=0.1", 1, "FAIL: prompt q0: golden renders 8 tokens, mine 9: they differ first",
         "with golden's token ids for both: FAIL: further away"),
        ("--template=gone", 0, SAME, ""),
    ],
)  # fmt: skip
def test_both_servers_render_chats(options, code, first, then, here_served, capsys):
    """Other token ids are the first finding; the numbers are compared along golden's, and come after it."""
    chats(10)
    words = ("vllm serve M", f"vllm serve M {options}", "--localize")
    got, out, err = gate_out(capsys, *words) if "fault" not in options else gate_out(capsys, *words[:2])
    lines = out.splitlines()
    assert (got, lines[0][: len(first)]) == (code, first), out + err
    said = json.loads(Path("out/gate.json").read_text())
    rendering = said["rendering"]
    assert (said["verdict"], said["numbers"]) == ("fail" if code else "pass", "fail" if "fault" in options else "pass")
    gone = "gone" in options
    assert (rendering["prompts"], rendering["compared"]) == (10, 0 if gone else 10)
    assert ("mine: http://127.0.0.1" in err, any("10 of 10 chats were not" in n for n in said["notes"])) == (gone, gone)
    assert len(rendering["different"]) == 10 * code
    if code:
        assert lines[1] == "10 of 10 chats differ: also q1, q2, q3, q4, q5, more"
        assert lines[2].startswith(then)
        assert ("dig: no number is further away" in out) == ("fault" not in options)
        assert rendering["different"][0]["golden"] == {
            "tokens": 8, "id": None if "none" in options else 271, "text": None if "none" in options else "\n\n"
        }  # fmt: skip
    golden, mine = (replies.read(Path("out", side)) for side in ("golden", "mine"))
    assert all(r.prompt_token_ids == golden.passes[0][n].prompt_token_ids for n, r in mine.passes[0].items())


def test_too_few_prompts_are_a_note_before_a_server_starts(served: Path, capsys: Any) -> None:
    chats(2)
    code, out, err = gate_out(capsys, "vllm serve M --dtype=float8", "vllm serve M")
    assert (code, out) == (2, "")
    assert err.startswith("note: there will be no verdict: it needs 6 prompts, there are 2\naccprobe: golden: ")


def test_a_server_without_a_place_gets_one(here_served: Path, capsys: Any) -> None:
    assert main(["gate", "vllm serve M", "vllm serve M -x", "--prompts", "nowhere.jsonl"]) == 2
    assert not Path("accprobe-gate").exists()
    capsys.readouterr()
    words = ["gate", "vllm serve M --dtype=bfloat16", "vllm serve M --dtype=float32", "--prompts", "prompts.jsonl"]
    assert main(words) == 0
    (place,) = Path("accprobe-gate").iterdir()
    assert (place / "gate.json").is_file()
    assert f"the answers are in {place}" in capsys.readouterr().err
