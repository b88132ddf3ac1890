"""Labels while a Probe runs, under torch.compile, off, and wrongly used: the model computes what it did."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from capture.toy import Toy

from vllm_accprobe import Probe, gen_id, labels, set_label, set_task_id
from vllm_accprobe.capture import labels as binding
from vllm_accprobe.dump.reader import Dump, open_dump

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


@pytest.fixture(autouse=True)
def nothing_bound() -> Iterator[None]:
    yield
    labels.close()
    assert not binding.taken()


class Labelled(Toy):
    """Toy whose second layer labels what it got, under one name for all calls."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.layers[1].forward

        def forward(hidden_states: torch.Tensor, *, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
            set_label("pta", gen_id("layer.1"), hidden_states)
            set_label("acl", gen_id("layer.1"), hidden_states.half())
            return inner(hidden_states, positions=positions)

        self.layers[1].forward = forward


def of(dump: Dump, role: str) -> list[torch.Tensor]:
    found = [r for r in dump.records if r.tap == "label:layer.1" and r.role == role]
    return [torch.from_numpy(np.array(dump.read(r))) for r in found]


def test_a_label_has_the_rows_of_the_step(tmp_path: Path) -> None:
    model = Labelled()
    with Probe(model, dir=str(tmp_path / "d")):
        model(IDS, attention_mask=MASK)
    dump = open_dump(tmp_path / "d")
    (record,) = [r for r in dump.records if r.tap == "label:layer.1" and r.role == "pta"]
    assert (record.cls, record.rows, record.shape, record.step) == ("label", "tokens", (6, 8), 0)
    (value,) = of(dump, "pta")
    same = next(r for r in dump.records if r.tap == "layers.1" and r.role == "input.hidden_states")
    assert torch.equal(value, torch.from_numpy(np.array(dump.read(same))))
    assert of(dump, "acl")[0].dtype == torch.float16


def test_only_selected_steps_and_requests_are_labelled(tmp_path: Path) -> None:
    model = Labelled()
    with Probe(model, dir=str(tmp_path / "d"), steps="1", requests="call-3"):
        for _ in range(3):
            model(IDS)
    dump = open_dump(tmp_path / "d")
    records = [r for r in dump.records if r.tap == "label:layer.1"]
    assert [(r.step, r.shape) for r in records] == [(1, (4, 8)), (1, (4, 8))]


def test_of_a_part_of_a_rank_nobody_says_that_it_is_whole() -> None:
    from vllm_accprobe.capture.core.layout import Layouts

    layouts = Layouts({}, 1, 2, hidden_size=8)
    kinds = [layouts.of(f"label:{n}", "pta", (5, n)).kind for n in (8, 4)]
    assert kinds == ["replicated", "unknown"]


def test_ids() -> None:
    assert gen_id("attn.3") == "attn.3"
    made = {gen_id() for _ in range(100)}
    assert len(made) == 100
    assert all(one.startswith("data_") for one in made)


def test_wrong_use_is_said_once_counted_and_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    norm = model.norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        set_label("gpu", "a", x)
        set_label("pta", 7, x)  # type: ignore[arg-type]
        set_label("pta", "a")
        set_label("acl", "a", tensor_path=3)  # type: ignore[arg-type]
        set_label("pta", "list", [1.0, 2.0])
        return norm(x)

    model.norm.forward = forward
    expected = Toy()
    expected.load_state_dict(model.state_dict())
    with Probe(model, dir=str(tmp_path / "d")):
        for _ in range(2):
            assert torch.equal(model(IDS)["logits"], expected(IDS)["logits"])
        set_label("pta", "outside", torch.ones(2))
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    reasons = {s.reason: s.count for s in dump.skips if s.tap.startswith("label:")}
    assert reasons == {
        "data_src is 'gpu', not 'pta' or 'acl'": 2, "data_id is not what gen_id() gives: a short text": 2,
        "data_val and tensor_path are both missing": 2, "tensor_path is no path": 2,
        "a label outside of the model's forward": 1,
    }  # fmt: skip
    assert caplog.text.count("set_label: ") == 4
    assert len([r for r in dump.records if r.tap == "label:list"]) == 2


def test_a_failure_inside_ends_the_capture_and_not_the_model(tmp_path, monkeypatch, caplog):
    model = Labelled()
    expected = model(IDS)["logits"]
    with Probe(model, dir=str(tmp_path / "d")):
        monkeypatch.setattr(binding.Labels, "_part", lambda self, state: 1 / 0)
        assert torch.equal(model(IDS)["logits"], expected)
    assert "ZeroDivisionError" in caplog.text
    assert "ZeroDivisionError" in open_dump(tmp_path / "d").stops[0].reason


def test_off_a_call_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_label("pta", gen_id(), torch.ones(2))
    set_label("nonsense", 3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_task_alone_opens_nothing_and_an_engine_that_comes_later_has_the_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    set_task_id()
    assert not (tmp_path / "d").exists()
    model = Labelled()
    with Probe(model, dir=str(tmp_path / "d")):  # as an engine's own dump would take the directory
        set_task_id()
        model(IDS)
    assert len([r for r in open_dump(tmp_path / "d").records if r.tap == "label:layer.1"]) == 2
    labels.close()
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def compiled(fullgraph: bool) -> object:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        data_id = gen_id()
        set_label("pta", data_id, x)
        set_label("acl", gen_id("named"), x * 2)
        return x + 1

    return torch.compile(function, backend="eager", fullgraph=fullgraph)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_off_labels_break_no_graph(fullgraph: bool) -> None:
    function = compiled(fullgraph)
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))  # type: ignore[operator]


def test_on_a_label_in_a_compiled_function_is_an_eager_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = compiled(fullgraph=False)
    function(torch.ones(2))  # type: ignore[operator]  # compiled while off: turned on later, labels appear all the same
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    set_task_id()
    for k in range(2):
        assert torch.equal(function(torch.full((2,), float(k))), torch.full((2,), k + 1.0))  # type: ignore[operator]
    labels.close()
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))  # type: ignore[operator]
    dump = open_dump(tmp_path / "d")
    assert [(r.tap, r.role, r.call) for r in dump.records] == [
        ("label:data_compiled", "pta", 0), ("label:named", "acl", 0),
        ("label:data_compiled", "pta", 1), ("label:named", "acl", 1),
    ]  # fmt: skip


def test_where_whole_graphs_are_compiled_a_label_is_counted_as_skipped(tmp_path: Path) -> None:
    """As in vLLM, whose compiler allows no break."""
    from vllm_accprobe.capture.labels import Labels

    model = Toy()
    with Probe(model, dir=str(tmp_path / "d")) as probe:
        assert probe.session is not None
        whole = Labels(probe.session, tmp_path / "d", 0, whole_graphs=True)
        whole.open()
        function = compiled(fullgraph=True)
        for _ in range(3):
            assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))  # type: ignore[operator]
        whole.close()
    skips = {s.tap: s.reason for s in open_dump(tmp_path / "d").skips}
    assert skips["label:named"] == skips["label:data_compiled"] == "a label inside a compiled graph"


def test_the_librarys_directory_below_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are looked through; the file is one."""
    from vllm_accprobe.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATB_OUTPUT_DIR", "atb")
    model = Toy()
    norm = model.norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        set_label("pta", "x", torch.full((3,), 2.0))
        set_label("acl", "x", tensor_path="0_M/after/a.npy")
        set_label("pta", "late", torch.full((3,), 5.0))
        set_label("acl", "late", tensor_path="0_M/after/late.npy")
        place = Path("atb/tensors/thread_4/0_M/after")
        place.mkdir(parents=True)
        np.save(place / "a.npy", np.full(3, 2, np.float32))
        return norm(x)

    model.norm.forward = forward
    with Probe(model, dir="d", modules="norm"):
        model(IDS)
    np.save("atb/tensors/thread_4/0_M/after/late.npy", np.full(3, 5, np.float32))
    (label,) = [x for x in open_dump(tmp_path / "d").labels.values() if x.path.endswith("a.npy")]
    assert (label.file is not None, label.reason) == (True, "")
    assert main(["labels", "d", "--acl", ".", "--acl", str(tmp_path / "atb"), "--out", "out"]) == 0


def test_many_files_are_collected_while_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of earlier steps only, by their executions, without searching for each."""
    import os

    from vllm_accprobe.capture import labels as room

    monkeypatch.setattr(room, "_MANY", 4)
    monkeypatch.setenv("ATB_OUTPUT_DIR", str(tmp_path / "atb"))
    searches = []
    locate = room.locate
    monkeypatch.setattr(room, "locate", lambda label, roots: searches.append(roots) or locate(label, roots))
    model, steps = Toy(), 40
    norm = model.norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        step = len(list((tmp_path / "atb").rglob("a.npy")))
        set_label("acl", "x", tensor_path="0_M/after/a.npy")
        place = tmp_path / "atb" / "tensors" / f"0_{os.getpid()}" / str(step) / "0_M" / "after"
        place.mkdir(parents=True)
        np.save(place / "a.npy", np.full(3, step))
        return norm(x)

    model.norm.forward = forward
    with Probe(model, dir=str(tmp_path / "d"), modules="norm"):
        ((taker, _),) = binding._takers
        for step in range(steps):
            model(IDS)
            if step == 20:
                assert taker.__self__._files > 10
    dump = open_dump(tmp_path / "d")
    assert len(dump.labels) == steps
    for (_, step, *_), label in dump.labels.items():
        copy = np.load(tmp_path / "d" / "rank0000" / f"label-{label.file:05d}.npy")
        assert copy.tolist() == [step] * 3
    assert sum(tmp_path / "atb" in roots for roots in searches) == 1
