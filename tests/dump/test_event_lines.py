"""Each kind of journal line is written as the journal has it, byte for byte, and read back as it was."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dumps import put, writer

from vllm_accprobe.dump import journal
from vllm_accprobe.dump.journal import (
    FINDING,
    KINDS,
    OP,
    CachedPrefix,
    CachedRows,
    StateFinding,
    StateTotals,
    WeightEvent,
    WeightPrint,
    inputs,
    pack_rows,
    row_count,
    sentence,
    tensors,
    unpack_rows,
)
from vllm_accprobe.dump.journal_writer import encode
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import (
    Armed,
    End,
    Failure,
    Image,
    Mask,
    Masks,
    Module,
    OpCall,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    Skip,
    Step,
    StepGraph,
    Stop,
)

ROWS = np.array([1, 2**32 - 1, 7], np.uint32)
PRINT = WeightPrint(
    0, 2, "l.0.qkv", "QKV", "weight", "loaded", "bfloat16", (3, 8), "0" * 15 + "a", "f" * 16, 4, 1, "transposed", 0,
    (("q", 0, 2), ("k", 2, 3)), True, ((0, 2, 1),), pack_rows(ROWS),
)  # fmt: skip
STALE = StateFinding(
    5, "stale", "kv", 0, "l.0.attn", 4, 2, "a", "its row is written to slot 75", 76, 44, 44, "b", 4, 43, 43,
    ("copy in step 4",),
)  # fmt: skip
LINES = [
    (Request(3, "chat-1", "0-a", "ff", 7, 1, (Image("ab", 2, 4),)),
     '{"event":"request","req":3,"id":"chat-1","internal_id":"0-a","prompt":"ff","prompt_len":7,"ordinal":1,'
     '"images":[{"hash":"ab","pos":2,"n":4}]}'),
    (Request(0, "a", "", "", 0),
     '{"event":"request","req":0,"id":"a","internal_id":"","prompt":"","prompt_len":0,"ordinal":0}'),
    (Request(0, "a", "", "", 0, sampling=SamplingParameters(
        0.5, top_k=4, seed=-3, bias=((7, -1.5),), allowed=(), bad_words=((1, 2),), prompt=(1, 5), also=("a grammar",))),
     '{"event":"request","req":0,"id":"a","internal_id":"","prompt":"","prompt_len":0,"ordinal":0,"sampling":{'
     '"temperature":0.5,"top_k":4,"seed":-3,"bias":[[7,-1.5]],"allowed":[],"bad_words":[[1,2]],"prompt":[1,5],'
     '"also":["a grammar"]}}'),
    (RowSpace(1, "tokens", 8, (Segment(0, 5, 2, 0), Segment(1, 0, 1, 2, "decode")), (7, 8, -1)),
     '{"event":"rows","step":1,"space":"tokens","src_rows":8,"ids":[7,8,-1],"segments":['
     '{"req":0,"pos":5,"n":2,"row":0,"phase":"prefill"},{"req":1,"pos":0,"n":1,"row":2,"phase":"decode"}]}'),
    (RowSpace(1, "vision/4", 4, (Segment(0, 0, 4, 0, image=1),)),
     '{"event":"rows","step":1,"space":"vision/4","src_rows":4,"segments":['
     '{"req":0,"pos":0,"n":4,"row":0,"phase":"prefill","image":1}]}'),
    (RowSpace(1, "tokens/padding", 8, (), (), 3),
     '{"event":"rows","step":1,"space":"tokens/padding","src_rows":8,"padding":3}'),
    (Step(2, {"requests": 1, "tokens": 3}, 1.5),
     '{"event":"step","step":2,"batch":{"requests":1,"tokens":3},"time":1.5}'),
    (Step(0), '{"event":"step","step":0,"batch":{},"time":0.0}'),
    (Step(3, {"tokens": 3}, 2.5, StepGraph("PIECEWISE", 4)),
     '{"event":"step","step":3,"batch":{"tokens":3},"time":2.5,"graph":{"mode":"PIECEWISE","size":4}}'),
    (Module("a.b", "Linear", 4, {"eps": 1e-6}),
     '{"event":"module","tap":"a.b","class":"Linear","index":4,"attrs":{"eps":1e-06}}'),
    (Masks(2, {0: Mask(("a grammar",), "ab"), 5: Mask(("bad words",))}),
     '{"event":"masks","step":2,"masked":[{"req":0,"by":["a grammar"],"grammar":"ab"},{"req":5,"by":["bad words"]}]}'),
    (Skip("a", "odd", None, "input.x", 3), '{"event":"skip","tap":"a","reason":"odd","count":3,"role":"input.x"}'),
    (Skip("", "odd", 2), '{"event":"skip","tap":"","reason":"odd","step":2,"count":1}'),
    (Armed(7, 1, {"on": True, "tokens": "0-4"}),
     '{"event":"armed","step":7,"on":1,"selection":{"on":true,"tokens":"0-4"}}'),
    (Stop("budget spent", 4), '{"event":"stop","reason":"budget spent","step":4}'),
    (Stop("disk full"), '{"event":"stop","reason":"disk full","step":null}'),
    (End("done", 2, 30, 400, {"odd": 3}),
     '{"event":"end","reason":"done","steps":2,"tensors":30,"bytes":400,"skipped":{"odd":3}}'),
    (Label(7, 1, "label:x", "pta", 0, "/a/b.bin", 12, "", 0, 0, "bin"),
     '{"event":"label","step":1,"tap":"label:x","role":"pta","call":0,"path":"/a/b.bin","pid":12,"execution":0,'
     '"file":0,"ending":"bin"}'),
    (StateFinding(3, "stale", "kv", 0, "layers.0.attn", 2, 7, "r1", "it is old", 229, 4, 7, "r0", 2, 0, 3, ("reuse",)),
     '{"event":"state","step":3,"kind":"stale","cache":"kv","group":0,"layer":"layers.0.attn","layers":2,"block":7,'
     '"request":"r1","how":"it is old","slot":229,"low":4,"high":7,"writer":"r0","written":2,"wrote_low":0,'
     '"wrote_high":3,"between":["reuse"]}'),
    (StateFinding(0, "changed", "state", 1, "x", 1, 3, "", "nobody's"),
     '{"event":"state","step":0,"kind":"changed","cache":"state","group":1,"layer":"x","layers":1,"block":3,'
     '"how":"nobody\'s"}'),
    (StateFinding(1, "unwritten", "state", 0, "layers.0.mixer", 3, 1, "a", "not written", part="conv state", first="l"),
     '{"event":"state","step":1,"kind":"unwritten","cache":"state","group":0,"layer":"layers.0.mixer","layers":3,'
     '"block":1,"request":"a","how":"not written","part":"conv state","first":"l"}'),
    (StateTotals("sample", 2, 5, 10, 20, 30, 1, {"reuse": 1}, {"a layer without a cache": 2}),
     '{"event":"states","mode":"sample","layers":2,"steps":5,"hashed":10,"checked":20,"held":30,"findings":1,'
     '"events":{"reuse":1},"skipped":{"a layer without a cache":2}}'),
    (CachedPrefix(2, 1, (CachedRows(0, 4, -1), CachedRows(4, 2, 0)), "other tokens"),
     '{"event":"cached","step":2,"req":1,"runs":[{"low":0,"n":4,"owner":-1},{"low":4,"n":2,"owner":0}],'
     '"why":"other tokens"}'),
    (WeightEvent(7, 3, "lora", 5, "a1", 2, 0.125, 1024, "x"),
     '{"event":"life","number":3,"kind":"lora","step":5,"name":"a1","slot":2,"detail":"x","seconds":0.125,'
     '"nbytes":1024}'),
    (WeightEvent(0, 0, "load", 0),
     '{"event":"life","number":0,"kind":"load","step":0,"seconds":0.0,"nbytes":0}'),
    (PRINT,
     '{"event":"weight","life":2,"tap":"l.0.qkv","class":"QKV","name":"weight","form":"loaded","dtype":"bfloat16",'
     '"shape":[3,8],"order":"000000000000000a","bag":"ffffffffffffffff","zeros":4,"nan":1,"undone":"transposed",'
     '"parts":[["q",0,2],["k",2,3]],"raw":true,"written":[[0,2,1]],"rows":"AQAAAP////8HAAAA"}'),
    (WeightPrint(0, 0, "a", "", "b", "slot", "int8", (), "0" * 16, "1" * 16, written=()),
     '{"event":"weight","life":0,"tap":"a","class":"","name":"b","form":"slot","dtype":"int8","shape":[],'
     '"order":"0000000000000000","bag":"1111111111111111","written":[]}'),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), LINES)
def test_there_and_back(value: Any, text: str) -> None:
    kind = next(k for k in KINDS.values() if k.type is type(value))
    assert encode(kind.to_line(value)).decode() == text + "\n"
    given = {name: getattr(value, name) for name in kind.external}
    assert kind.from_line(json.loads(text), **given) == value


def test_an_error_and_what_the_writer_does_not_know_of_it() -> None:
    failure = journal.ERROR.to_line(Failure("norm", "ValueError: odd"))
    assert encode(failure) == b'{"event":"error","where":"norm","message":"ValueError: odd","step":null}\n'
    assert journal.ERROR.to_line(Failure("norm", "odd"), "step") == {
        "event": "error",
        "where": "norm",
        "message": "odd",
    }


def test_every_kind_is_here() -> None:
    assert {type(value) for value, _ in LINES} == {kind.type for kind in KINDS.values()} - {OP.type}


def tensor(role: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"tensor": {"role": role, "dtype": "float32", "shape": list(shape), "stride": [1] * len(shape),
                       "device": "cpu", **more}}  # fmt: skip


def a_tensor(**more: Any) -> list[Any]:
    return [{"tensor": tensor("input.0", 2)["tensor"] | more}]


def nested(times: int) -> Any:
    return [{"list": nested(times - 1)}] if times else [1]


OP_LINE = {"event": "op", "step": 0, "tap": "m::aten.mm.default", "op": "aten.mm.default", "args": a_tensor()}
REFUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    Request: [
        ({"req": None}, "it has no req"),
        ({"images": [{"n": 1 << 30}]}, r"images\[0\].n is 1073741824, not a number"),
        *(({"sampling": {key: value}}, rf"sampling\.{key}.* is") for key, value in (
            ("top_p", 1e300), ("allowed", [-1]), ("bias", [[1]]), ("prompt", [1] * 70000))),
    ],
    RowSpace: [
        ({"padding": -1}, "padding is -1"), ({"segments": [{"req": 0, "pos": 0}]}, r"segments\[0\] has no n"),
        ({"segments": [{"req": 0, "pos": 0, "n": 999999999}]}, r"segments\[0\].n is 999999999, not a number"),
        ({"segments": [{"req": 0, "pos": 0, "n": 1 << 26}] * 2, "ids": []}, "134217728 rows in one step"),
        ({"segments": [{"req": 0, "pos": 0, "n": 1, "phase": "x"}]}, r"segments\[0\].phase is 'x'"),
        ({"ids": [1]}, "1 token ids for 3 rows"), ({"ids": [1, 2, "3"]}, "not a list of token ids"),
    ],
    Step: [({"graph": {"mode": "FULL"}}, "graph has no size")], Module: [({"tap": None}, "it has no tap")],
    Masks: [({"masked": [{}]}, "req is None")], Skip: [({"reason": None}, "it has no reason")],
    End: [({"skipped": {"a": 1.5}}, "skipped.a is 1.5")],
    Label: [({"ending": "exe"}, "ending is 'exe'"), ({"path": None}, "it has no path")],
    StateFinding: [({"kind": "bad"}, "kind is 'bad', not one of freed"), ({"block": -1}, "block is -1")],
    CachedPrefix: [
        ({"runs": [{"low": 0, "n": 32, "owner": owner}]}, rf"runs\[0\].owner is {owner!r}|runs\[0\] has no owner")
        for owner in (-2, None, 1 << 70)
    ],
    WeightPrint: [
        ({"order": "x" * 16}, "not 16 hex digits"), ({"bag": "0"}, "bag"), ({"shape": [-1]}, r"shape\[0\] is -1"),
        ({"shape": [1 << 52, 1 << 52, 2]}, "shape of a tensor"), ({"life": -1}, "life"),
        ({"parts": [["q", 0]]}, r"parts\[0\]"),
    ],
    OpCall: [
        *(({"args": args}, "an argument is") for args in (
            [[1, 2]], [{"dtype": "float32", "device": "cpu"}], [{"pickle": "gASV"}], [{"float": "1e400"}],
            [{"complex": [1.0]}], [{"complex": ["1", "2"]}], [{"list": 3}], nested(50))),
        *(({"args": args}, why) for args, why in (
            (a_tensor(shape=[-1]), "shape of input.0"), (a_tensor(shape=[1] * 33), "shape of input.0"),
            (a_tensor(role=3), "role is 3"), (a_tensor(min="low"), "min of input.0"),
            (a_tensor(after={"max": "high"}), "max of input.0"), ([{"skipped": 3}], "skipped is 3"),
            ([{"skipped": "large", "role": "input.0", "dtype": "float32", "shape": ["9"]}], "shape of input.0"))),
        ({"mutates": "x"}, "mutates is 'x', not a list"), ({"kwargs": []}, r"kwargs is \[\], not an object"),
    ],
}  # fmt: skip
"""What goes beyond the types of fields, which test_decode.py checks."""


@pytest.mark.parametrize(
    ("type_of", "change", "why"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_what_does_not_hold_has_a_reason(type_of: Any, change: dict[str, Any], why: str) -> None:
    texts = (text for value, text in LINES if type(value) is type_of and (change.keys() != {"ids"} or value.ids))
    line = OP_LINE if type_of is OpCall else json.loads(next(texts))
    kind = KINDS[line["event"]]
    given = dict.fromkeys(kind.external, 0)
    kind.from_line(line, **given)
    with pytest.raises(ValueError, match=why):
        kind.from_line(line | change, **given)


def test_a_line_of_which_little_was_said_has_defaults() -> None:
    assert journal.END.from_line({}) == End("", 0, 0, 0, {})
    assert journal.MODULE.from_line({"tap": "a"}) == Module("a", "", 0, {})
    assert journal.SKIP.from_line({"reason": "odd"}) == Skip("", "odd")
    assert journal.STEP.from_line({"step": 1, "time": "late", "unknown": []}) == Step(1)
    call = journal.OP.from_line({"tap": "a", "op": "b", "module": None}, rank=2)
    assert call == OpCall(2, None, "a", "b", 0, 0, None, (), {}, ())
    rows = {"step": 1, "space": "x", "segments": [{"req": 0, "pos": 2, "n": 3}]}
    assert journal.ROWS.from_line(rows) == RowSpace(1, "x", 3, (Segment(0, 2, 3, 0),))


def test_texts_of_strangers_are_cut() -> None:
    read = FINDING.from_line({"step": 0, "kind": "stale", "block": 0, "between": ["x" * 5000] * 50})
    assert len(read.between) == 8
    assert len(read.between[0]) == 200


def test_rows_of_weights() -> None:
    found = PRINT.sums()
    assert found is not None
    assert found.tolist() == ROWS.tolist()
    assert unpack_rows(pack_rows(ROWS), 4) is None
    assert unpack_rows("!" * 16, 3) is None
    assert [row_count(s) for s in ((), (5,), (2, 3), (2, 3, 4))] == [1, 5, 2, 6]


def test_sentences_of_findings() -> None:
    assert sentence(STALE) == (
        "a stale slot: step 5, layer l.0.attn and 3 more, block 2, slot 76, read by request 'a' (position 44): its "
        "row is written to slot 75; written last by request 'b' in step 4 (position 43); since then: copy in step 4"
    )
    how = "request 'b' (adapter a2) reads blocks 0-1 (positions 0 to 63), which request 'a' (adapter a1) wrote"
    found = StateFinding(8, "foreign", "kv", 0, "", 4, 1, "b", how, None, 0, 63, "a", first="layers.0.attn")
    assert sentence(found) == f"a prefix hit of another context: step 8, all 4 layers of cache group 0: {how}"
    half = StateFinding(1, "unwritten", "state", 0, "layers.0.mixer", 3, 1, "a", "not written", part="conv state")
    assert "layer layers.0.mixer (conv state) and 2 more, block 1" in sentence(half)


# --- calls of operators ---


def event(**more: Any) -> dict[str, Any]:
    return {"event": "op", "step": 0, "tap": "m::aten.mm.default", "op": "aten.mm.default", "call": 0, "seq": 3,
            "module": "m", "args": [tensor("input.0", 2, 3), tensor("input.1", 3, 2)],
            "outputs": [tensor("output.0", 2, 2)], **more}  # fmt: skip


def test_a_call_comes_back_with_its_tensors(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with_list = {"list": [1, tensor("input.2.1", 4), {"float": "-inf"}, {"complex": [1.0, {"float": "nan"}]}]}
    w = writer(tmp_path / "d")
    put(w, "m::aten.mm.default", values, "float32", role="input.0")
    w.line(event(kwargs={"dtype": {"dtype": "bfloat16"}}, mutates=["input.0"], module_call=2))
    w.line(event(call=1, args=[with_list, None, True, "x", {"skipped": "the KV cache", "shape": [9]}]))
    w.close("test", {})
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    first, second = dump.ops
    assert (first.rank, first.step, first.tap, first.call, first.seq) == (0, 0, "m::aten.mm.default", 0, 3)
    assert (first.op, first.module, first.module_call) == ("aten.mm.default", "m", 2)
    assert first.mutates == ("input.0",)
    assert first.kwargs == {"dtype": {"dtype": "bfloat16"}}
    assert [t["role"] for t in inputs(first)] == ["input.0", "input.1"]
    assert [t["role"] for t in tensors(first.outputs)] == ["output.0"]
    assert second.args == (with_list, None, True, "x", {"skipped": "the KV cache", "shape": [9]})
    assert [t["role"] for t in inputs(second)] == ["input.2.1"]
    (record,) = dump.records
    assert np.array_equal(dump.read(record), values)


def test_a_later_call_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    w = writer(tmp_path / "d")
    for call in range(3):
        put(w, "m::aten.mm.default", values + call, "float32", role="input.0", call=call)
        w.line(event(call=call, slot=[0, 1, 0][call]))
    w.close("test", {})
    dump = open_dump(tmp_path / "d")
    assert [r.call for r in dump.records] == [1, 2]
    assert [c.call for c in dump.ops] == [0, 1, 2]
