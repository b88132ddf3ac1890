"""Each kind of journal line is written as the journal has it, byte for byte, and read back as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_accprobe.dump import journal
from vllm_accprobe.dump.journal import KINDS, CachedPrefix, CachedRows, StateFinding, StateTotals, WeightEvent
from vllm_accprobe.dump.journal_writer import encode
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.schema import (
    Armed,
    End,
    Failure,
    Image,
    Mask,
    Masks,
    Module,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    Skip,
    Step,
    StepGraph,
    Stop,
)

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
    assert {type(value) for value, _ in LINES} == {kind.type for kind in KINDS.values()}


@pytest.mark.parametrize(("event", "why"), [
    ({"event": "request", "id": "a"}, "req is None, not a number"),
    ({"event": "request", "req": 0, "id": "a", "images": [{"n": 1 << 30}]}, "n is 1073741824, not a number"),
    *(({"event": "request", "req": 0, "id": "a", "sampling": {key: value}}, rf"{key}.* is") for key, value in (
        ("temperature", "hot"), ("top_p", 1e300), ("seed", 1.5), ("allowed", [-1]), ("bias", [[1]]),
        ("bad_words", [[1.5]]), ("prompt", [1] * 70000), ("stop", "1"), ("also", [1]))),
    ({"event": "request", "req": 0, "id": "a", "sampling": []}, r"sampling is \[\]"),
    ({"event": "rows", "step": 0, "space": "x", "segments": [{"req": 0, "pos": 0}]}, "n is None, not a number"),
    ({"event": "masks", "step": 0, "masked": [{"req": 0, "by": [1]}]}, r"by\[0\] is 1"),
    ({"event": "label", "step": 0, "tap": "a", "role": "pta", "path": "p", "file": 0, "ending": "exe"},
     "ending is 'exe'"),
    ({"event": "label", "step": 0, "tap": "a", "role": "pta"}, "path is None, not a string"),
    ({"event": "end", "skipped": {"a": 1.5}}, "skipped.a is 1.5"),
    ({"event": "step", "step": 0, "batch": 3}, "batch is 3"),
    ({"event": "skip", "tap": "a"}, "reason is None, not a string"),
])  # fmt: skip
def test_what_does_not_hold_has_a_reason(event: dict[str, Any], why: str) -> None:
    kind = KINDS[event["event"]]
    with pytest.raises(ValueError, match=why):
        kind.from_line(event, **dict.fromkeys(kind.external, 0))


def test_a_line_of_which_little_was_said_has_defaults() -> None:
    assert journal.END.from_line({}) == End("", 0, 0, 0, {})
    assert journal.MODULE.from_line({"tap": "a"}) == Module("a", "", 0, {})
    assert journal.SKIP.from_line({"reason": "odd"}) == Skip("", "odd")
    assert journal.STEP.from_line({"step": 1, "time": "late"}) == Step(1)
