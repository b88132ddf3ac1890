"""Formulas that a block's own code tells: each way in which decoder layers add, scale, branch and hand on."""

import functools
import importlib.util
import itertools
import math
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_accprobe.capture.taps.formulas import formulas
from vllm_accprobe.capture.taps.hooks import argument_names


class Block(nn.Module):
    def __init__(self, **own: Any):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.Identity(), nn.Identity(), nn.Identity()
        self.config = SimpleNamespace(**own)
        self.factor = 0.25


class Sequence(Block):
    def forward(self, x):
        residual = x
        x = self.attn(self.norm(x))
        x = residual + x
        return x + self.mlp(x)


class Pair(Block):
    def forward(self, x, residual=None):
        if residual is None:
            residual = x
            x = self.norm(x)
        else:
            x, residual = self.norm(x, residual)
        return self.mlp(x), residual


class Layers(Block):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(self, x):
        for layer in self.layers[:1]:
            x = layer(x)
        return self.norm(x)


class Patched(Sequence):
    forward = functools.wraps(Sequence.forward)(lambda self, x: Sequence.forward(self, x) * 0.5)


class Counted(Block):
    count = 0

    def forward(self, x):
        self.count += 1
        if self.count > 1:
            return x
        return x + self.attn(x)


class Exits(Block):
    @property
    def gain(self):
        raise SystemExit

    def forward(self, x):
        return x * self.gain


class Turns(Block):
    """Turn by turn, from the second of its layers on."""

    def __init__(self, many: int = 3):
        super().__init__()
        self.layers, self.first = nn.ModuleList(Pair() for _ in range(many)), 1

    def forward(self, x, flag=False):
        residual = None
        for k, layer in enumerate(itertools.islice(self.layers, self.first, len(self.layers))):
            if k == 7:
                x = x * 2
            x, residual = layer(x, residual)
        return x + residual


class Leaves(Turns):
    def forward(self, x, flag=False):
        for layer in self.layers[self.first :]:
            if flag.any():
                break
            x, _ = layer(x)
        return x, self.mlp(x)


class Undecided(Turns):
    """Each turn has two paths."""

    def forward(self, x, flag=False):
        for layer in self.layers:
            if flag.any():
                x = x * 2
            x, _ = layer(x)
        return self.norm(x)


class Hooked(Block):
    """A hook doubles what one part gives."""

    def __init__(self):
        super().__init__()
        self.attn.register_forward_hook(lambda module, args, output: output * 2)
        self.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    def forward(self, x):
        return self.attn(x), self.mlp(self.norm(x))


class Acts(Block):
    """An activation writes into what it receives."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.attn(x)
        z = self.norm(x)
        return y + self.mlp(y), z


class Buffers(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.ones(2))
        self.register_buffer("other", torch.ones(2))

    def forward(self, x):
        y = x * self.gain
        self.gain.data.mul_(2.0)
        return y, x * self.other


class Updates(Buffers):
    def forward(self, x):
        self.update()
        return x * self.gain, x * self.other

    def update(self):
        self.gain.add_(1.0)


class Several(nn.Module):
    def __init__(self, alone: bool):
        super().__init__()
        self.alone = alone

    def forward(self, x):
        y = torch.relu(x)
        if self.alone:
            return y
        return y, None


class Items(Block):
    """Item 0 of a tuple is its first tensor, of one tensor its first row."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Several(alone=False), Several(alone=True)

    def forward(self, x):
        return x + self.attn(x)[0], x + self.mlp(x)[0]


class Level(Block):
    """Eight paths, each of which asks what the child gives."""

    def __init__(self, below):
        super().__init__()
        self.child = Level(below - 1) if below else Several(alone=False)

    def forward(self, x, a=None, b=None, c=None):
        if a is not None:
            x = x + a
        if b is not None:
            x = x + b
        if c is not None:
            x = x + c
        y = self.child(x)
        return y[0], None


CASES: list[Any] = []


def gives(wanted: dict[str, str], **own: Any) -> Any:
    """A block with this forward has these formulas. own: its configuration."""

    def register(forward: Any) -> Any:
        made = type(forward.__name__, (Block,), {"forward": forward})(**own)
        CASES.append(pytest.param(made, wanted, id=" ".join([forward.__name__, *map(str, own.values())])))
        return forward

    return register


class Forwards:
    """Each the forward of a block of its own."""

    @gives({"output.0": "(x + (attn[0] * 0.25))"})
    def factored(self, x):
        return x + self.attn(x) * self.factor

    # The residual is x itself, which the addition changes, too.
    @gives({"output.0": "(mlp[0] + (x + attn[0]))"})
    def in_place(self, x):
        residual = x
        residual += self.attn(x)
        return self.mlp(x) + x

    @gives({"output.0": "((attn[0] + attn[1]) if attn[1] else attn[0])"}, parallel=True)
    @gives({"output.0": "x"}, parallel=False)
    def switched(self, x):
        attention, bias = self.attn(x)
        if self.config.parallel and bias is not None:
            attention += bias
        return (attention, self.config.parallel) if self.config.parallel else x

    @gives({"output": "mlp", "own_code": "mlp"})
    def whole(self, x):
        for layer in (self.attn, self.norm):
            x = layer(x)
        return self.mlp(x)

    @gives({"output.0": "((mlp[0] / 2.0) if mlp[1] else (mlp[0] / 4.0))", "output.1": "mlp[1]"})
    def either(self, x):
        y = self.mlp(x)
        if isinstance(y, tuple) and len(y) == 2:
            y, more = y
            return y / math.sqrt(4.0), more
        return y / 4.0

    @gives({"output.hidden": "mlp[0]", "output.0": "mlp[0]"})
    def named(self, x):
        if x.dim() > 2:
            raise ValueError
        return SimpleNamespace(hidden=self.mlp(self.norm(x)), other=x.relu())

    @gives({})
    def again(self, x):
        return x + self.mlp(self.mlp(x))

    @gives({})
    def partly(self, x):
        y = self.mlp(x)
        y[:2] = 0.0
        return y

    @gives({})
    def alias(self, x):
        y = z = self.mlp(x)
        y += x
        return z + y

    @gives({})
    def function(self, x):
        return torch.relu(self.mlp(x))

    @gives({})
    def divided(self, x):
        return self.mlp(x) / (1.0 / (self.factor - 0.25))

    @gives({})
    def wrong(self, x):
        try:
            return self.mlp(x)
        finally:
            pass

    @gives({})
    def method(self, x):
        y = x + self.attn(x)
        y.mul_(0.5)
        return y

    @gives({"output.0": "((x + attn[0]) + x)"})
    def copied(self, x):
        residual = x.clone()
        x += self.attn(x)
        return x + residual

    @gives({})
    def view(self, x):
        y = x + self.attn(x)
        part = y[:, :1]
        part *= 2
        return y

    @gives({})
    def item(self, x):
        outputs = self.attn(x)
        y = outputs[0]
        y += x
        return outputs[0]

    @gives({})
    def stored(self, x):
        y = x + self.attn(x)
        for k in range(2):
            y[k] = 0
        return y

    @gives({})
    def listed(self, x):
        y = x + self.attn(x)
        _ = [y.mul_(2) for _ in range(1)]
        return y

    @gives({})
    def starred(self, x):
        more = ()
        for _ in range(2):
            more += (x,)
        return x, *more, self.attn(x)

    @gives({})
    def assigned(self, x):
        self.factor = 0.125
        return x * self.factor + self.attn(x)

    # The norm adds into its second argument.
    @gives({})
    def fused(self, x, residual):
        before = residual
        x, residual = self.norm(x, residual)
        return x + before

    @gives({"output.0": "(x + attn[0])"})
    @torch.no_grad()
    def undisturbed(self, x):
        return x.contiguous() + self.attn(x)

    # A turn for each of 16 million numbers.
    @gives({"output": "mlp", "own_code": "mlp"})
    def nested(self, x):
        for i in range(256):
            for j in range(256):
                for k in range(256):
                    x = x + i + j + k
        return self.mlp(x)

    # More branches than Python may nest calls.
    @gives({"output": "mlp", "own_code": "mlp"})
    def long(self, x):
        for k in range(500):
            if k > 1:
                x = x.relu()
            if k > 2:
                x = x.relu()
        return self.mlp(x)

    @gives({})
    def retyped(self, x):
        return self.attn(x).view(torch.int16), self.mlp(x).view(x.dtype)

    @gives({"output.1": "mlp[0]", "own_code": "mlp"})
    def gathered(self, x):
        states = [x]
        states.append(self.attn(states[-1]))
        return states[-1], self.mlp(x)

    # What an identity gave is its input itself.
    @gives({"output.1": "mlp[0]"})
    def passes(self, x):
        y = self.attn(x)
        y += 1
        return x, self.mlp(y)

    # What has a name elsewhere may be changed there.
    @gives({"output.1": "mlp[0]", "own_code": "mlp"})
    def kept(self, x):
        y = self.attn(x)
        self.last = y
        self.last += 1
        return y, self.mlp(self.last)

    # In memory of its own where it was not contiguous.
    @gives({})
    def maybe_copied(self, x):
        y = self.attn(x)
        z = y.reshape(-1)
        z += 1
        return y

    @gives({"output.0": "(view(x) + view(attn[0]))"})
    def viewed(self, x):
        y = self.attn.forward(x.view(-1, 2))
        return (x + y.reshape(4, 1)).squeeze(-1)


@pytest.mark.parametrize(("block", "wanted"), [
    *CASES,
    (Items(), {"output.0": "(x + attn[0])"}), (Level(12), {"output.0": "child[0]"}),
    (Turns(), {"output.0": "(layers.2[0] + layers.2[1])"}), (Leaves(), {"output.1": "mlp[0]"}),
    (Undecided(6), {"output": "norm"}), (Hooked(), {"output.1": "mlp[0]"}), (Acts(), {"output.1": "norm[0]"}),
    (Buffers(), {"output.1": "(x * own.other)"}), (Updates(), {}),
    (Sequence(), {"output.0": "((x + attn[0]) + mlp[0])"}),
    (Pair(), {"output.0": "mlp[0]", "output.1": "(norm[1] if residual else x)"}), (Layers(), {"output": "norm"}),
    (Patched(), {}), (Counted(), {}), (Exits(), {}), (nn.Linear(2, 2), {}), (nn.Sequential(nn.Identity()), {}),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_the_formula_of_a_block(block: nn.Module, wanted: dict[str, str]) -> None:
    assert formulas(block) == wanted


class Parallel(Block):
    def forward(self, x):
        return x + self.attn(self.norm(x)) + self.mlp(x)


class Sometimes(Block):
    def forward(self, x, residual=None):
        if residual is None:
            y = self.norm(self.attn(x))
        else:
            y = self.norm(self.attn(x, residual) + residual)
        return self.mlp(*(y,)) + y


@pytest.mark.parametrize(("block", "wanted"), [
    (Sequence(), {"norm/input": "x", "attn/input": "norm[0]", "mlp/input": "(x + attn[0])"}),
    (Parallel(), {"norm/input": "x", "attn/input": "norm[0]", "mlp/input": "x"}),
    (Turns(), {"layers.1/x": "x", "layers.2/x": "layers.1[0]", "layers.2/residual": "layers.1[1]"}),
    (Pair(), {"norm/input": "x", "mlp/input": "norm[0]"}), (Sometimes(), {"attn/input": "x"}),
    (type("Again", (Block,), {"forward": Forwards.again})(), {}),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_the_parts_of_a_block_receive(block: nn.Module, wanted: dict[str, str]) -> None:
    """What differs from path to path, or from call to call, is not known."""
    found = formulas(block, argument_names)
    assert {role: text for role, text in found.items() if role.startswith("inside.")} == {
        f"inside.{place}": text for place, text in wanted.items()
    }


@pytest.mark.parametrize("statement", [
    "y = y + y", "t = t + t", "n = n * n", "y = y + 1 if residual is None else y + 2"
])  # fmt: skip
def test_what_each_statement_doubles_needs_no_memory(statement: str, tmp_path: Path) -> None:
    """Twenty-two times, which made megabytes; the other output has its formula."""
    lines = ["from torch import nn", "class Doubled(nn.Module):", "    def forward(self, x, residual=None):",
             "        y, t, n = self.mlp(x), (x, x), 7", *[f"        {statement}"] * 22,
             "        return y * n + t[0].sum(), self.norm(x)"]  # fmt: skip
    (tmp_path / "doubled.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("doubled", tmp_path / "doubled.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    block = module.Doubled()
    block.norm, block.mlp = nn.Identity(), nn.Identity()
    formulas(block)  # what is imported meanwhile
    tracemalloc.start()
    try:
        assert formulas(block) == {"output.1": "norm[0]"}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_forward_in_place_of_its_class() -> None:
    block = Sequence()
    block.forward = lambda x: x
    assert formulas(block) == {}  # what a lambda of somebody else does is not its class's
