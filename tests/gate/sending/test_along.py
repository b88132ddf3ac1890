"""`send --along` against servers that can be forced in one way or none: what goes where, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forcible_server import forcible
from odd_server import odd

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import client, passes as along, replies
from vllm_accprobe.gate.sending.client import Reply, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine, to_text

ANSWERS = {"p0": [40, 41, 42], "p1": [50], "p2": [60, 61]}


def golden(path: Path, *, texts: bool = False, refused: bool = False) -> Path:
    """Three prompts, the last one refused perhaps, in two passes."""
    lines = [
        PromptLine(n, text="x" * (5 + i)) if texts else PromptLine(n, token_ids=(5 + i,)) for i, n in enumerate(ANSWERS)
    ]
    passes = [{"arrive": word, "answered": 3, "refused": 0, "resumed": 0} for word in ("one", "all")]
    about = {"schema": 1, "prompts": {"count": 3}, "passes": passes, "complete": True,
             "settings": {"top": 2, "max_tokens": 9, "arrive": ["one", "all", "score"], "concurrency": 3}}  # fmt: skip
    replies.begin(path, to_text(lines), about)
    for index in range(2):
        writer = replies.ReplyWriter(path / replies.pass_name(index))
        for i, (name, ids) in enumerate(ANSWERS.items()):
            why = "HTTP 400" if refused and i == 2 else None
            writer.add(Reply(name, 0.0, 0.0, [5 + i], ids, [-0.1] * len(ids), None, None, "length", refused=why))
        writer.close()
    return path


def send(golden: Path, url: str, out: Path, *more: str) -> int:
    return main(["send", "--teacher-force", str(golden), "--url", url, "--out", str(out), *more])


@pytest.mark.parametrize("way", client.WAYS)
def test_all_tokens_are_goldens_in_each_way(way: str, tmp_path: Path, capsys: Any) -> None:
    folder = golden(tmp_path / "golden")
    with odd(forcible({way}), forced=True) as (url, seen):
        assert send(folder, url, tmp_path / "out", "--no-score") == 0
        asked = [name for _, name in seen if name != client.PROBE.name]
        assert sorted(asked) == ["p0", "p0.pass1", "p1", "p1.pass1", "p2", "p2.pass1"]
        del seen[:]
        assert send(folder, url, tmp_path / "out", "--no-score") == 0
        assert [path for path, _ in seen if path != "/tokenize"] == []
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "6 of 6 answered in 2 passes"
    assert said[1] == f"forced along {folder}: " + (client.NOT_EXERCISED if way == client.SCORED else f"by {way}")
    sent = replies.read(tmp_path / "out")
    assert sent.about["along"] == {"sha256": along.digest(replies.read(folder)), "how": way}
    assert [(p["arrive"], p["forced"]) for p in sent.about["passes"]] == [("one", way), ("all", way)]
    assert (sent.about["settings"]["top"], sent.about["settings"]["concurrency"]) == (2, 3)
    for replied in sent.passes:
        for i, (name, ids) in enumerate(ANSWERS.items()):
            reply = replied[name]
            assert (reply.prompt_token_ids, reply.token_ids, reply.forced) == ([5 + i], ids, way)
            assert reply.logprobs == [-i / 100 for i in ids]
            assert reply.top == [([1, i], [-0.01, -i / 100]) for i in ids]
            assert reply.margins == [pytest.approx(i / 100 - 0.01) for i in ids]


def test_the_best_way_is_taken() -> None:
    for can in (client.WAYS, client.WAYS[1:], client.WAYS[2:], ()):
        with odd(forcible(can), forced=True) as (url, _):
            sender, _ = Sender(url).introduced()
            assert sender.how_forced() == (can[0] if can else None)


def test_a_scored_pass_has_every_token_of_prompt_and_answer(tmp_path: Path) -> None:
    with odd(forcible(client.WAYS), forced=True) as (url, _):
        assert send(golden(tmp_path / "golden"), url, tmp_path / "out", "--score-tokens", "3") == 0
    sent = replies.read(tmp_path / "out")
    assert [(p["arrive"], p["forced"], p["answered"], p["refused"]) for p in sent.about["passes"]] == [
        ("one", "accprobe", 3, 0), ("all", "accprobe", 3, 0), ("score", "scored", 2, 1),
    ]  # fmt: skip
    scored = sent.passes[2]["p2"]
    assert (scored.prompt_token_ids, scored.token_ids, scored.logprobs, scored.forced) == (
        [7], [60, 61], [-0.6, -0.61], "scored",
    )  # fmt: skip
    assert sent.passes[2]["p0"].refused == "longer than 3 tokens with its answer (--score-tokens)"


def test_a_free_send_goes_along_its_own_first_pass(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("abc\nabcdef\n")
    for can, how in (({"accprobe"}, "accprobe"), ({"scored"}, None), (set(), None)):
        out = tmp_path / f"out-{how}-{len(can)}"
        with odd(forcible(can), forced=True) as (url, _):
            words = ["send", str(tmp_path / "p.txt"), "--url", url, "--out", str(out), "--max-tokens", "2"]
            assert main(words) == 0
        sent = replies.read(out)
        assert "along" not in sent.about
        assert [p.get("forced") for p in sent.about["passes"]] == [None, how, *(["scored"] if "scored" in can else [])]
        assert [r.forced for r in sent.passes[0].values()] == [None, None]
        assert [r.forced for r in sent.passes[1].values()] == [how, how]
        assert all(r.token_ids == [2, 2] and r.prompt_token_ids in ([3], [6]) for r in sent.passes[1].values())


def test_a_server_that_gives_other_tokens_is_one_line(tmp_path: Path, capsys: Any) -> None:
    folder, broken = golden(tmp_path / "golden"), tmp_path / "broken"
    asked = 0

    def later(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal asked
        asked += path == "/v1/completions"
        return forcible({"accprobe"}, swaps=asked > 3)(path, body)

    with odd(later, forced=True) as (url, _):
        assert send(folder, url, broken, "--no-score") == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "pass 0, request p2: token 2 of 2 is not the one that was named" in err[0]
    assert "2 of 6 answers are kept" in err[0]
    assert len(replies.read(broken).passes[0]) == 2
    with odd(forcible({"accprobe"}), forced=True) as (url, _):
        assert send(folder, url, broken, "--no-score") == 0
    assert replies.read(broken).about["passes"][0]["resumed"] == 1


def test_another_vocabulary_is_exit_code_3(tmp_path: Path, capsys: Any) -> None:
    folder = golden(tmp_path / "golden", texts=True)
    with odd(forcible(client.WAYS, vocabulary=2), forced=True) as (url, _):
        assert send(folder, url, tmp_path / "out") == 3
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1
        assert "other token ids of 3 of 3 prompts" in err[0]
        assert not (tmp_path / "out/send.json").exists()
    with odd(forcible(client.WAYS), forced=True) as (url, _):
        assert send(folder, url, tmp_path / "out") == 0


def test_a_server_that_reads_other_ids_is_exit_code_3(tmp_path: Path, capsys: Any) -> None:
    def changes(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        status, raw = forcible({"accprobe"})(path, body)
        if path == "/v1/completions" and body["prompt"] == [6]:
            raw = raw.replace(b'"prompt_token_ids": [6]', b'"prompt_token_ids": [1, 6]')
        return status, raw

    with odd(changes, forced=True) as (url, _):
        assert send(golden(tmp_path / "golden"), url, tmp_path / "out") == 3
    assert "the server read other token ids than were sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "can", "says"),
    [
        (["p.txt"], client.WAYS, "leave PROMPTS away"),
        ([], (), "cannot be forced along golden's tokens: start it with VLLM_ACCPROBE_FORCE=1"),
        (["--score"], ("accprobe",), "leave --score away"),
    ],
)
def test_what_cannot_be_is_one_line(more, can, says, tmp_path, capsys):
    with odd(forcible(can), forced=True) as (url, _):
        assert send(golden(tmp_path / "golden"), url, tmp_path / "out", *more) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert says in err[0]


def test_a_folder_that_is_no_golden(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert send(tmp_path / "empty", "http://127.0.0.1:1", tmp_path / "out") == 2
    about = json.loads((golden(tmp_path / "golden") / "send.json").read_text())
    (tmp_path / "golden/pass-0.jsonl").unlink()
    assert send(tmp_path / "golden", "http://127.0.0.1:1", tmp_path / "out") == 2
    assert about["schema"] == 1
    err = capsys.readouterr().err.splitlines()
    assert [("no folder of" in err[0]), ("has no answers to go along" in err[1]), len(err)] == [True, True, 2]


def test_a_folder_is_gone_on_with_in_the_same_way_only(tmp_path: Path, capsys: Any) -> None:
    folder, out = golden(tmp_path / "golden"), tmp_path / "out"
    with odd(forcible(client.WAYS), forced=True) as (url, _):
        assert send(folder, url, out) == 0
    about = replies.read_about(out) | {"complete": False}
    replies.write_about(out, about)
    (out / "pass-1.jsonl").unlink()
    with odd(forcible(client.WAYS[1:]), forced=True) as (url, _):
        assert send(folder, url, out) == 2
        assert "was begun with a server that was forced (accprobe)" in capsys.readouterr().err
        (tmp_path / "p.txt").write_text("x\n")
        assert main(["send", str(tmp_path / "p.txt"), "--url", url, "--out", str(out)]) == 2
        assert "was begun along other tokens" in capsys.readouterr().err
        assert send(folder, url, out, "--no-score") == 2
        assert "was begun with --score: name another --out" in capsys.readouterr().err
    with odd(forcible(client.WAYS), forced=True) as (url, _):
        assert send(folder, url, out) == 0
    assert len(replies.read(out).passes[1]) == 3


def test_goldens_lines(tmp_path: Path) -> None:
    sent = replies.read(golden(tmp_path / "golden", refused=True))
    assert along.forced_lines(sent) == [
        PromptLine("p0", token_ids=(5,), along=(40, 41, 42)), PromptLine("p1", token_ids=(6,), along=(50,)),
    ]  # fmt: skip
    images = PromptLine(
        "i", messages=({"role": "user", "content": [{"type": "image_url"}]},), max_tokens=3, stop=("x",)
    )
    reply = sent.passes[0]["p0"]
    assert along.along(images, reply) == replace(images, max_tokens=None, stop=None, along=(40, 41, 42))
    with odd(forcible({"scored"}), forced=True) as (url, _):
        asked = replace(along.along(images, reply) or images)
        got = Sender(url, way=client.SCORED).ask(asked, "i", {}, 0.0)
        assert got.refused == "images are not sent along by scored"
