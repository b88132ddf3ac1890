"""The planted faults are what they say: a probe can only be judged by faults that do what their name promises."""

import importlib.metadata
from pathlib import Path

import pytest
from accprobe_faults import Fault, parse, plant

torch = pytest.importorskip("torch")


class Tiny(torch.nn.Module):
    """Two linear layers under a root whose forward takes positions, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        for layer in (self.first, self.second):
            torch.nn.init.eye_(layer.weight)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_wrapped_forward_keeps_its_signature() -> None:
    import inspect

    model = Tiny()
    plant(model, Fault("nan", "", rows="all"))
    assert list(inspect.signature(model.forward).parameters) == ["x", "positions"]
    assert model(torch.ones(1, 4), torch.tensor([0])).isnan().all()


@pytest.mark.parametrize(
    "text",
    ["not json", "[]", '{"kind": "unknown"}', '{"kind": "scale", "colour": 1}', "null"],
)
def test_bad_specs_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="ACCPROBE_FAULT") as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_unknown_module_names_the_similar_ones() -> None:
    with pytest.raises(ValueError, match=r"no module 'decoder.first'; similar: \['first'\]"):
        plant(Tiny(), Fault("scale", "decoder.first"))


def test_two_faults_at_once() -> None:
    first, second = parse('[{"kind": "scale", "module": "first", "factor": 2}, {"kind": "add", "module": "second"}]')
    model = Tiny()
    plant(model, first, second)
    assert torch.allclose(model(torch.ones(1, 4), torch.tensor([0])), torch.full((1, 4), 3.05))


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows 'sometimes'"):
        plant(Tiny(), Fault("scale", "first", rows="sometimes"))


def test_it_is_a_distribution_of_its_own() -> None:
    here = Path(__file__).parents[2] / "lab" / "planted"
    (distribution,) = importlib.metadata.distributions(path=[str(here)])
    (entry,) = distribution.entry_points.select(group="vllm.general_plugins")
    assert entry.value == "accprobe_faults:register"
