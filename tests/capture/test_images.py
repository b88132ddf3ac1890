"""Pictures of a plain model: which rows are whose, also where ``generate`` runs the tower before the model."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_accprobe import Probe  # noqa: E402
from vllm_accprobe.align.tokens import pair_requests  # noqa: E402
from vllm_accprobe.capture.padded_batch import images_of, language_path, towers  # noqa: E402
from vllm_accprobe.dump.reader import open_dump  # noqa: E402
from vllm_accprobe.dump.schema import Image, Request  # noqa: E402

PICTURE = 9


class Body(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)

    def forward(self, input_ids, features):
        x = self.embed(input_ids)
        where = input_ids == PICTURE
        return torch.where(where[..., None], x.masked_scatter(where[..., None], features), x)


class Model(torch.nn.Module):
    """Two patches for each placeholder. ``generate`` encodes first, as transformers 5 does; ``forward`` may, too."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(image_token_id=PICTURE)
        self.visual = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(0), torch.nn.Unflatten(0, (-1, 8)))
        self.language_model = Body()
        self.lm_head = torch.nn.Linear(8, 16)

    def forward(self, input_ids, pixels=None, features=None):
        if pixels is not None:
            features = self.visual(pixels)
        return self.lm_head(self.language_model(input_ids, features))

    @torch.no_grad()
    def generate(self, input_ids, pixels):
        features = self.visual(pixels)
        return self(input_ids, features=features).argmax(-1)


PROMPT = [1, PICTURE, PICTURE, 2, PICTURE, 3]
"""Two pictures: of two placeholders and of one."""


def test_a_run_of_placeholders_is_one_picture():
    assert images_of(PROMPT, PICTURE) == (Image("", 1, 2), Image("", 4, 1))
    assert images_of([1, 2], PICTURE) == ()
    assert images_of(PROMPT, None) == ()


def test_the_tower_is_what_stands_beside_the_language_model():
    model = Model()
    assert language_path(model) == "language_model"
    assert towers(model, "language_model") == [model.visual]
    model.config = SimpleNamespace()
    assert language_path(model) == ""
    assert towers(model, "") == []


@pytest.mark.parametrize("early", [False, True])
def test_rows_of_patches_belong_to_their_picture(tmp_path, early):
    torch.manual_seed(0)
    model, pixels = Model(), torch.randn(6, 4)
    before = (model.generate, model.visual.forward)
    ids = torch.tensor([PROMPT])
    with Probe(model, dir=str(tmp_path / "d")), torch.no_grad():
        model.generate(ids, pixels) if early else model(ids, pixels=pixels)
    assert (model.generate, model.visual.forward) == before
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    assert [i.n for i in dump.requests[(0, 0)].images] == [2, 1]
    patches = dump.rows[(0, 0, "vision/2")]
    assert [(s.image, s.pos, s.n, s.row) for s in patches.segments] == [(0, 0, 4, 0), (1, 0, 2, 4)]
    merged = dump.rows[(0, 0, "vision/1")]
    assert [(s.image, s.pos, s.n, s.row) for s in merged.segments] == [(0, 0, 2, 0), (1, 0, 1, 2)]
    record = next(r for r in dump.records if (r.tap, r.role, r.rows) == ("visual", "input.input", "vision/2"))
    np.testing.assert_array_equal(dump.read(record), pixels.numpy())
    assert {r.step for r in dump.records if r.step is not None} == {0}  # tower and model are one step
    head = next(r for r in dump.records if (r.tap, r.role) == ("lm_head", "output.0"))
    assert head.shape == (6, 16)


def test_a_picture_whose_content_is_unknown_is_not_another_picture():
    def request(*images):
        return Request(0, "x", "x", "p", 3, 0, tuple(Image(h, 1, 1) for h in images))

    assert pair_requests([request("")], [request("abc")]).images_differ == []
    assert pair_requests([request("abc")], [request("abd")]).images_differ != []
    assert pair_requests([request("")], [request()]).images_differ != []
