"""A request's prompt, printed when asked for: its ids, what is missing and why, its text; nothing is written."""

import sys
from dataclasses import replace

import pytest
from cli.cli_dumps import TAPS, make

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Request, RowSpace, Segment, hash_tokens
from vllm_accprobe.formats import open_dump
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.report.prompt import load_tokenizer, prompt_lines

PROMPT = [7, 1, 2, 300, 5]


def of(*spaces, run=None, ids=PROMPT, name="a\x1b[2J", **request):
    dump = Dump("DUMP", {"tool": "accprobe", "probe": {"task": "tensor"}} if run is None else run)
    dump.requests[0, 4] = Request(4, name, "a-0", hash_tokens(ids), len(ids), **request)
    for step, (segments, ids_of) in enumerate(spaces):
        dump.rows[0, step, "tokens"] = RowSpace(step, "tokens", len(ids_of), segments, tuple(ids_of))
    return dump


WHOLE = (Segment(9, 0, 2, 0), Segment(4, 0, 5, 2)), [11, 12, *PROMPT]
GENERATED = (Segment(4, 5, 1, 0, "decode"),), [99]


def test_ids_of_the_prompt_alone_in_order_of_positions():
    assert prompt_lines(of(WHOLE, GENERATED), [], None) == [
        "request a\\x1b[2J: a prompt of 5 tokens",
        "       0  7 1 2 300 5",
        "as text: --tokenizer DIR, the model's directory with its tokenizer.json",
    ]
    long = list(range(40))
    lines = prompt_lines(of(((Segment(4, 0, 40, 0),), long), ids=long), ["a*"], None)
    assert [line.split()[0] for line in lines[1:4]] == ["0", "16", "32"]


def test_what_is_missing_and_what_to_set_so_that_it_is_not():
    cached = ((Segment(4, 3, 2, 0),), PROMPT[3:])
    lines = prompt_lines(of(cached, GENERATED), [], None)
    assert lines[0] == "request a\\x1b[2J: a prompt of 5 tokens, of which 2 are recorded"
    assert lines[1] == "       3  300 5"
    assert lines[2].startswith("missing: positions 0-2: ")
    assert "--no-enable-prefix-caching" in lines[2]
    kept = (
        ({"tokens": [[1, 4]]}, "name 0 in it"),
        ({"tokens": [[0, 0]]}, "--no-enable-prefix-caching"),
        ({"steps": [[3, 3]]}, "VLLM_ACCPROBE_STEPS"),
        ({"tokens": "no list"}, "--no-enable-prefix-caching"),
    )
    for probe, said in kept:
        run = {"tool": "accprobe", "probe": {"task": "tensor"} | probe}
        assert said in prompt_lines(of(cached, run=run), [], None)[2]
        with pytest.raises(NothingThere, match="no id of it is recorded"):
            prompt_lines(of(GENERATED, run=run), [], None)
    with pytest.raises(NothingThere, match="only in a capture of accprobe"):
        prompt_lines(of(run={"tool": "msprobe"}), [], None)


def test_a_request_has_to_be_one():
    dump = of(WHOLE)
    dump.requests[0, 9] = replace(dump.requests[0, 4], req=9, id="b", internal_id="b-0", prompt="0" * 32, prompt_len=2)
    with pytest.raises(CommandError, match=r"2 match \(a\\x1b\[2J, b\)"):
        prompt_lines(dump, [], None)
    with pytest.raises(NothingThere, match="no request of DUMP matches c: it has "):
        prompt_lines(dump, ["c"], None)
    assert prompt_lines(dump, ["b"], None)[1] == "       0  11 12"
    dump.requests[1, 3] = replace(dump.requests[0, 4], req=3)  # the same request on another rank
    assert prompt_lines(dump, ["a*"], None)[1] == "       0  7 1 2 300 5"


def test_a_row_map_without_ids_or_of_an_image_says_nothing():
    empty = RowSpace(0, "tokens", 5, (Segment(4, 0, 5, 0),), ())
    image = RowSpace(0, "vision/1", 5, (Segment(4, 0, 5, 0, image=0),), (1, 2, 3, 4, 5))
    dump = of()
    dump.rows = {(0, 0, "tokens"): empty, (0, 0, "vision/1"): image}
    with pytest.raises(NothingThere):
        prompt_lines(dump, [], None)


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"]
    )
    made.train_from_iterator(["hello world the quick", "the the"], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return made


def test_text_where_a_tokenizer_is_given_also_of_characters_in_parts(tokenizer, tmp_path):
    said = "hello 世界 the 🙂\n\x1b[31m"
    ids = tokenizer.encode(said).ids
    texts = load_tokenizer(tmp_path)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == said
    assert load_tokenizer(tmp_path / "tokenizer.json")([0, 1 << 20, ids[0], -1]) == [
        "<s>", "<1048576>", "hello"[: len(texts[0])], "<-1>",
    ]  # fmt: skip
    cut = load_tokenizer(tmp_path)([*tokenizer.encode("世").ids[:1], 1 << 20])
    assert cut[1] == "<1048576>"
    lines = prompt_lines(of(((Segment(4, 0, len(ids), 0),), ids), ids=ids), [], tmp_path)
    assert lines[-1] == f"text, positions 0-{len(ids) - 1}: hello 世界 the 🙂\\n\\x1b[31m"


def test_tokenizers_whose_first_token_loses_its_blank(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"▁the": 0, "▁end": 1, "s": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="s"))
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path)([0, 1, 2, 0, 1]) == ["the", " end", "s", " the", " end"]


def test_the_command_prints_and_writes_nothing(tmp_path, capsys, monkeypatch):
    root = make(tmp_path / "dump")
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    assert main(["inspect", str(root), "--request", "chat-1", "--prompt"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("request chat-1: a prompt of 3 tokens; the dump's hash of the prompt is another")
    assert out[1] == "       0  100 101 102"
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before
    assert open_dump(root).requests  # as it was

    for arguments, code, said in (
        (["--prompt"], 2, "2 match (chat-1, chat-2)"),
        (["--prompt", "--request", "x"], 3, "it has chat-1, chat-2"),
        ([TAPS[0][0], "--prompt"], 2, "--prompt takes --requests and --tokenizer alone"),
        (["--tokenizer", str(tmp_path)], 2, "--prompt takes --requests and --tokenizer alone"),
        (["--prompt", "--request", "chat-1", "--tokenizer", str(tmp_path)], 2, "there is no tokenizer.json in it"),
        (["--prompt", "--request", "chat-1", "--tokenizer", __file__], 2, "cannot be read: "),
    ):
        assert main(["inspect", str(root), *arguments]) == code
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["inspect", str(root), "--prompt", "--request", "chat-1", "--tokenizer", str(tmp_path)]) == 2
    assert "pip install tokenizers" in capsys.readouterr().err
