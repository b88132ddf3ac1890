"""Where a forward is written: found without reading files, and never with a path of this machine."""

import functools
import inspect
from pathlib import Path

import torch

from vllm_accprobe.capture.taps.hooks import source_of


class Own(torch.nn.Module):
    def forward(self, x):
        return x


class Wrapped(torch.nn.Module):
    @functools.lru_cache  # noqa: B019  anything that wraps
    def forward(self, x):
        return x


class Chooses(torch.nn.Module):
    """As vLLM's CustomOp."""

    def __init__(self):
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, x):
        return self._forward_method(x)

    def forward_native(self, x):
        return x


def line(function):
    return inspect.getsourcelines(function)[1]


def test_a_librarys_file_by_its_modules_name():
    at = line(torch.nn.Linear.forward)
    assert source_of(torch.nn.Linear(2, 2)) == f"torch/nn/modules/linear.py:{at}"


def test_a_script_by_its_name_alone_and_through_what_wraps_it(monkeypatch):
    name, inner = Path(__file__).name, Wrapped.forward.__wrapped__
    for function in (Own.forward, inner):
        monkeypatch.setattr(function, "__module__", "__main__")
    assert source_of(Own()) == f"{name}:{line(Own.forward)}"
    assert source_of(Wrapped()) == f"{name}:{line(inner)}"


def test_the_implementation_that_was_chosen():
    assert source_of(Chooses()).endswith(f":{line(Chooses.forward_native)}")
    partial = Chooses()
    partial._forward_method = functools.partial(print)
    assert source_of(partial).endswith(f":{line(Chooses.forward)}")


def test_what_is_not_written_in_python_has_none():
    module = torch.nn.Module()
    module._forward_method = len
    type_without = type("Without", (torch.nn.Module,), {"forward": len})
    assert source_of(type_without()) is None


def test_a_package_itself_and_no_path_of_this_machine(tmp_path, monkeypatch):
    package = tmp_path / "secret" / "some_package"
    package.mkdir(parents=True)
    code = "import torch", "", "", "class M(torch.nn.Module):", "    def forward(self, x):", "        return x", ""
    (package / "__init__.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(str(package.parent))
    import some_package

    assert source_of(some_package.M()) == "some_package/__init__.py:5"
    some_package.M.forward.__module__ = "another.name"
    assert source_of(some_package.M()) == "__init__.py:5"
