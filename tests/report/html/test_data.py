"""What the page holds as data: spreads of values, and the text of tokens."""

import shlex
import sys

import numpy as np
import pytest
from report_examples import comparison, pair

from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.row_table import ValueSpread
from vllm_accprobe.report.html.data import LONGEST, TokenTexts, Vocabulary, tensor_details, token_texts

# --- what the page holds of a pair's spread: small integers, errors as parts of their peak ---


def _spread() -> ValueSpread:
    counts = np.arange(5)
    return ValueSpread(0, -1.0, 2.0, counts, counts[::-1], np.array([0.0, 0.5, 2.0, np.inf]), 4, 3, 5,
                       np.array([-1.0, 0.0, 0.25]), 2, 9)  # fmt: skip


def test_spreads_go_by_the_pages_numbers_and_the_command_keeps_what_was_given():
    from dataclasses import replace

    made = replace(comparison(pairs=[pair(), pair()], golden_path="a; rm 'x'"), spreads=(_spread(),))
    assert set(tensor_details(made, {0: 3})["spreads"]) == {"3"}
    assert tensor_details(made, {1: 0})["spreads"] == {}
    said = replace(made, options=("--op-mapping-file", "m n.yaml", "--taps", "*.mlp", "--standard", "strict"))
    assert shlex.split(tensor_details(said, {})["again"]) == [
        "accprobe", "compare", "a; rm 'x'", "mine", "--op-mapping-file", "m n.yaml", "--standard", "strict"
    ]  # fmt: skip
    assert tensor_details(made, {})["again"] == "accprobe compare 'a; rm '\"'\"'x'\"'\"'' mine"


# --- ids as text ---


pytest.importorskip("tokenizers")


def saved(path, entries, decoder):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE(vocab=dict(zip(entries, range(len(entries)), strict=True)), merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return Vocabulary(path)


@pytest.fixture
def vocabulary(tmp_path):
    from tokenizers import decoders

    return saved(tmp_path, ["Ġthe", "Ċ", "â", "âĢ®", "x" * 90, "<b>"], decoders.ByteLevel())


def test_every_kind_of_token(vocabulary):
    texts = [vocabulary.text(i) for i in range(9)]
    assert texts[:4] == [" the", r"\n", "â", r"\u202e"]  # a third of a letter is its entry in the vocabulary
    assert len(texts[4]) == LONGEST
    assert texts[5:] == ["<b>", "<|im_end|>", None, None]
    assert [vocabulary.text(i) for i in (-1, 1 << 40)] == [None, None]


def test_a_space_of_sentencepiece_stays(tmp_path):
    from tokenizers import decoders

    assert saved(tmp_path, ["▁the", "▁"], decoders.Metaspace()).text(0) == " the"


def test_columns_hold_what_lies_in_them(vocabulary):
    texts = TokenTexts(vocabulary, {"a": (np.array([3, 4, 5, 6, 7, 9]), np.array([0, 1, 5, 0, 77, 5]))}, "mine")
    assert texts.columns("a", np.array([2, 3, 4, 8]), 1) == [[], [0], [1, 5, 0, 77], []]
    assert texts.columns("a", np.array([0, 5]), 5) == [[0, 1], [5, 0, 77, 5]]
    assert texts.columns("b", np.array([0]), 1) is None
    assert texts.texts == {"0": " the", "1": r"\n", "5": "<b>"}
    assert texts.missing is None


def test_no_ids_is_said_with_what_records_them(vocabulary, tmp_path):
    for place in (tmp_path / "nothing", tmp_path):
        texts = token_texts(vocabulary, place)
        assert texts.missing.startswith(f"no token ids are recorded in {place}")
        assert "VLLM_ACCPROBE=1" in texts.missing


def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "bad.json").write_text('{"version": [[')
    for path, said in (
        (tmp_path, "there is no tokenizer.json in it"),
        (tmp_path / "gone", "there is no such file"),
        (tmp_path / "bad.json", "cannot be read"),
    ):
        with pytest.raises(CompareError, match=said) as e:
            Vocabulary(path)
        assert "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CompareError, match="pip install tokenizers"):
        Vocabulary(tmp_path)
