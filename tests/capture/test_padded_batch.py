"""The rectangle of a plain model's call: which rows are real, and whose."""

from types import SimpleNamespace as Plain

import torch

from vllm_accprobe.capture.core.rows import Requests
from vllm_accprobe.capture.core.session import VISION
from vllm_accprobe.capture.padded_batch import Rectangle
from vllm_accprobe.config import ProbeConfig


def test_a_rectangle_drops_padding_and_knows_its_requests_again() -> None:
    config = ProbeConfig()
    requests = Requests(config)
    rectangle = Rectangle(config, requests, torch.nn.Linear(1, 1))
    ids = torch.tensor([[0, 11, 12], [21, 22, 23]])
    assert rectangle.begin({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])})
    assert rectangle.prompts
    assert [(p.start, p.n) for p in rectangle.batch] == [(0, 2), (0, 3)]
    flat = rectangle.flatten(torch.arange(6).reshape(2, 3, 1))
    assert flat.flatten().tolist() == [1, 2, 3, 4, 5]
    assert rectangle.flatten(torch.arange(6)).tolist() == [1, 2, 3, 4, 5]  # flattened by the model, as experts do
    assert rectangle.flatten(torch.arange(12).reshape(6, 2)).tolist() == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    cache = Plain(get_seq_length=lambda: 3)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert rectangle.begin({"input_ids": ids[:, :1], "past_key_values": cache, "attention_mask": mask})
    assert not rectangle.prompts
    assert [(p.internal, p.start, p.n) for p in rectangle.batch] == [("call-0", 2, 1), ("call-1", 3, 1)]
    for shape in ((2, 4, 2), (2, 1, 4, 2)):  # keys of the cache, without padding
        keys = torch.arange(8)[:, None].expand(8, 2).reshape(shape)
        assert rectangle.flatten(keys)[..., 0].flatten().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert rectangle.flatten(torch.arange(6).reshape(2, 1, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rectangle.space(VISION, 2) is None
    assert not rectangle.begin({"inputs_embeds": torch.zeros(2, 3, 1)})
    assert rectangle.flatten(torch.zeros(2, 3)).shape == (2, 3)
