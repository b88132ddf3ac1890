"""A model with what falls between modules: a joined projection that is split, a gate's product, residual sums."""

import torch
from torch import nn

WIDTH = 32


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(WIDTH, 3 * WIDTH), Core(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(WIDTH, -1)
        return self.out(self.core(q, k, v))


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.norm2, self.gated = nn.LayerNorm(WIDTH), Mixer(), nn.LayerNorm(WIDTH), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.gated(self.norm2(x))


class Layered(nn.Module):
    """Ids of [1, n] to logits of the last position."""

    def __init__(self, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, -1])
