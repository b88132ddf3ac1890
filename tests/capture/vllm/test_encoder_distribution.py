"""Images that are dealt out to ranks: whole ones by size, tiles in equal stretches. Real engines: tests/e2e."""

import sys
from types import FunctionType, ModuleType, SimpleNamespace as Plain
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_accprobe.capture.core.rows import EncoderDataParallel, EncoderItem, ItemRun, Requests, share_space
from vllm_accprobe.capture.core.session import VISION
from vllm_accprobe.capture.vllm import batch as capture_batch
from vllm_accprobe.capture.vllm.batch import (
    ChosenRows,
    EncoderDistribution,
    EngineBatch,
    by_size,
    by_tile,
    distributes_encoder,
)
from vllm_accprobe.config import ProbeConfig

A, B, C = (EncoderItem(name, 0, "image", n) for name, n in (("a", 16), ("b", 15), ("c", 9)))
TILES = [EncoderItem("a", 0, "image", 8), EncoderItem("b", 0, "image", 12)]
"""Two and three tiles of four placeholders."""


def world(rank: int) -> dict[str, Any]:
    """What the dealing function of vLLM sees: rank 0 gets the first and the last image, rank 1 the second."""
    return {
        "get_tensor_model_parallel_rank": lambda: rank,
        "get_tensor_model_parallel_world_size": lambda: 2,
        "get_load_balance_assignment": lambda sizes, ranks: ([0, 2, 1], [2, 1], [100, 60]),
    }


def known(*names: str) -> Requests:
    requests = Requests(ProbeConfig())
    for i, name in enumerate(names):
        requests.add(name, [i], 1)
    return requests


def test_whole_images_go_where_vllms_own_arithmetic_puts_them() -> None:
    sizes = [64, 60, 36]
    assert by_size([A, B, C], sizes, world(0)) == (3, (ItemRun(A, 0, 16), ItemRun(C, 0, 9)))
    assert by_size([A, B, C], sizes, world(1)) == (3, (ItemRun(B, 0, 15),))


def test_images_of_other_sizes_than_their_placeholders_are_not_guessed() -> None:
    assert by_size([A, B, C], [64, 60, 40], world(0)) is None
    assert by_size([A, B], [64, 60, 36], world(0)) is None


@pytest.mark.parametrize(
    ("rank", "runs"),
    [
        (0, (ItemRun(TILES[0], 0, 8), ItemRun(TILES[1], 0, 4))),
        (1, (ItemRun(TILES[1], 4, 8), ItemRun(None, 0, 4))),
    ],
)
def test_tiles_are_cut_at_any_place_and_padded(rank: int, runs: tuple[ItemRun, ...]) -> None:
    assert by_tile(TILES, 5, rank, 2) == (2, runs)


def test_more_ranks_than_tiles_leave_padding_alone() -> None:
    one = [EncoderItem("a", 0, "image", 4)]
    assert by_tile(one, 1, 0, 4) == (1, (ItemRun(one[0], 0, 4),))
    assert by_tile(one, 1, 3, 4) == (1, (ItemRun(None, 0, 4),))


def test_tiles_that_do_not_fit_the_placeholders_are_not_guessed() -> None:
    assert by_tile(TILES, 3, 0, 2) is None


def test_rows_of_a_deal_are_counted_from_where_each_image_begins() -> None:
    requests, config = known("a", "b"), ProbeConfig()
    share = EncoderDataParallel(2, (ItemRun(TILES[1], 4, 8), ItemRun(None, 0, 4)))
    patches = share_space(config, requests, share, 24)
    assert patches is not None
    assert (patches.name, patches.src, patches.n, patches.ranges) == ("vision/2#2", 24, 16, [(0, 16)])
    assert [(s.req, s.pos, s.n, s.row, s.image) for s in patches.segments] == [(1, 8, 16, 0, 0)]
    tiles = share_space(config, requests, share, 3)
    assert tiles is not None
    assert (tiles.name, [(s.req, s.pos, s.n, s.row) for s in tiles.segments]) == ("vision/1:4#2", [(1, 1, 2, 0)])
    assert share_space(config, requests, EncoderDataParallel(1, None), 24) is None


def look(image_input: Any, vision_model: Any) -> None:
    """Stands in for a function that deals; its names are those that a test gives it."""
    seen.append(batch.share)  # type: ignore[name-defined] # noqa: F821


def test_a_call_that_deals_is_watched_for_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a model's module holds the function under its own name."""
    home, model = ModuleType("vllm.fake.vision"), ModuleType("vllm.fake.model")
    seen: list[EncoderDataParallel | None] = []
    batch = EngineBatch(None)
    space: dict[str, Any] = world(1) | {"seen": seen, "batch": batch}

    for name in [n for n, m in sys.modules.items() if n.startswith("vllm") and hasattr(m, "__dict__")]:
        if any(held.startswith("run_dp_sharded_") for held in vars(sys.modules[name])):
            monkeypatch.delitem(sys.modules, name)  # a real one that an earlier test imported would be found too
    original = FunctionType(look.__code__, space)
    for module in (home, model):
        module.run_dp_sharded_vision_model = original  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    batch.begin(Plain(scheduled_encoder_inputs={}))
    monkeypatch.setattr(batch, "items", lambda: TILES)
    distribution = EncoderDistribution(batch)
    assert distribution.seen == {"run_dp_sharded_vision_model"}
    model.run_dp_sharded_vision_model(Plain(shape=(5, 3, 2, 2)), None)
    assert seen == [EncoderDataParallel(1, (ItemRun(TILES[1], 4, 8), ItemRun(None, 0, 4)))]
    assert batch.share is None
    model.run_dp_sharded_vision_model(Plain(shape=(5, 3, 2, 2)), None)  # all items are taken: whose are these?
    assert seen[1] == EncoderDataParallel(2, None)
    distribution.close()
    assert model.run_dp_sharded_vision_model is home.run_dp_sharded_vision_model is original


def test_where_nobody_says_when_images_are_dealt_no_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = EngineBatch(Plain(input_batch=Plain(req_ids=[]), requests={}))
    batch.no_known_shares()
    cached = Plain(req_ids=[], num_computed_tokens=[])
    batch.begin(Plain(total_num_scheduled_tokens=0, scheduled_new_reqs=[], scheduled_cached_reqs=cached))
    monkeypatch.setattr(batch, "items", lambda: [A])
    assert ChosenRows(batch, ProbeConfig(), known("a")).space(VISION, 64) is None


def test_only_an_engine_that_deals_is_one() -> None:
    def engine(mode: str | None, ranks: int) -> Plain:
        config = Plain(mm_encoder_tp_mode=mode) if mode else None
        return Plain(model_config=Plain(multimodal_config=config), parallel_config=Plain(tensor_parallel_size=ranks))

    assert distributes_encoder(engine("data", 2))
    assert not distributes_encoder(engine("data", 1))
    assert not distributes_encoder(engine("weights", 2))
    assert not distributes_encoder(engine(None, 2))


def test_a_way_to_deal_that_breaks_reaches_nobody_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of the images runs inside the model: whatever it stumbles over, the model goes on."""
    batch = EngineBatch(None)
    batch.begin(Plain(scheduled_encoder_inputs={}))

    def broken() -> list[EncoderItem]:
        raise AttributeError("no such field in this release")

    monkeypatch.setattr(batch, "items", broken)
    said: list[str] = []
    monkeypatch.setattr(capture_batch, "say", said.append, raising=False)
    for _ in range(2):
        batch.begin_share(lambda items: (len(items), ()))
    assert batch.share == EncoderDataParallel(2, None)
    assert said == [
        "images are dealt out to ranks in a way that is not known (AttributeError: no such field in this release): "
        "rows of the encoder are not distinguished"
    ]
