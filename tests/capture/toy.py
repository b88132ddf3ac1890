"""A small language model with everything that makes taps hard: a shared instance, an in-place operator, a class whose
call goes past the hooks, strided views, keyword arguments, and a forward that may fail."""

import torch


class Bypassing(torch.nn.Module):
    """Like a class under vLLM's support_torch_compile: ``__call__`` goes straight to ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.do_not_compile = True
        self.inner = torch.nn.Linear(8, 8)

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self.forward(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Rotary(torch.nn.Module):
    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query.mul_(2.0)
        key.add_(positions[..., None].to(key.dtype))
        return query, key


class Block(torch.nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 16)
        self.rotary = rotary
        self.extra = Bypassing()

    def forward(self, hidden_states: torch.Tensor, *, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        query, key = self.qkv(hidden_states).split(8, dim=-1)
        query, key = self.rotary(positions, query, key)
        return self.extra(query + key) + hidden_states, None


class Toy(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, 8)
        rotary = Rotary()
        self.layers = torch.nn.ModuleList(Block(rotary) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 32, bias=False)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        for layer in self.layers:
            hidden, _ = layer(hidden, positions=positions)
        return {"logits": self.lm_head(self.norm(hidden))}
