"""Real servers that are forced: all tokens are golden's, and their log-probabilities are those of scoring them.

Golden's answers are drawn at random, so that no model would choose them; five at once, prompts longer than the 64
tokens of a step, prefixes that the second pass finds cached. The V1 server is the room's own, which captures besides;
the V2 server has nothing but VLLM_ACCPROBE_FORCE and vLLM's Trace Replay. Asynchronous scheduling, which vLLM has not
on a CPU, and preemption are forced upon engines without a server.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from golden_by_hand import golden
from preloaded_vllm import FORKED
from support.engine import V2_ENV, Ask, EngineHost
from support.kernels import amx
from support.prompts import prompt
from vllm_server import Server

from vllm_accprobe.capture.vllm.sampling import KEY
from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import client, replies
from vllm_accprobe.gate.sending.client import NotForced, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine

pytestmark = pytest.mark.engine
SIZES = [(5, 12), (150, 30), (230, 20), (64, 25), (65, 9)]
FEW = [(5, 4), (150, 10), (230, 6), (64, 8), (65, 3)]
"""For the V2 runner, whose steps take four times as long on a CPU."""
FREE = {"logprobs": 5, "ignore_eos": True}
ROUNDING = 0.2 if amx() else 2e-6
"""Nats. Between decode and a prompt AMX computes otherwise (0.08 measured); another token is several nats away."""
"""Chosen: of a log-probability near 10 in float32, twice."""


@pytest.fixture(scope="module")
def v2_server(served_model: Path, preloads: Callable[[str], Path]) -> Iterator[Server]:
    root = served_model.parent / "v2"
    env = V2_ENV | {"OMP_NUM_THREADS": "1", "VLLM_ACCPROBE_FORCE": str(root / "steps-0")}
    args = ["--max-num-batched-tokens=64", "--enforce-eager", "--enable-trace-replay", "--enable-scale-out"]
    vllm = preloads("v2") / "vllm"
    with Server(served_model, log=root / "server.log", env=env, args=args, vllm=vllm) as running:
        yield running


def all_are_goldens(folder: Path, out: Path, way: str, sizes: list[tuple[int, int]] = SIZES) -> replies.Sent:
    """Every token of both passes, and their log-probabilities against the scored pass."""
    was, sent = replies.read(folder), replies.read(out)
    assert [p.get("forced") for p in sent.about["passes"]] == [way, way, "scored"]
    flips = tokens = 0
    for replied in sent.passes[:2]:
        for name, reply in replied.items():
            want, scored = was.passes[0][name], sent.passes[2][name]
            assert (reply.prompt_token_ids, reply.token_ids) == (want.prompt_token_ids, want.token_ids)
            assert reply.token_ids
            assert reply.logprobs
            assert reply.top
            assert scored.logprobs
            assert [*(scored.prompt_token_ids or ()), *(scored.token_ids or ())] == [
                *(reply.prompt_token_ids or ()), *reply.token_ids,
            ]  # fmt: skip
            assert reply.logprobs == pytest.approx(scored.logprobs[-len(reply.logprobs) :], abs=ROUNDING)
            for token, logprob, (ids, values) in zip(reply.token_ids, reply.logprobs, reply.top, strict=True):
                assert ids
                assert values == sorted(values, reverse=True)
                assert values[ids.index(token)] == logprob
                flips += ids[0] != token
                tokens += 1
    assert tokens == 2 * sum(n for _, n in sizes)
    assert flips > 0.9 * tokens  # nobody would have chosen these
    return sent


def test_v1_in_chunks_alone_and_with_others(server: Server, tmp_path: Path) -> None:
    folder, out = golden(tmp_path / "golden", SIZES), tmp_path / "out"
    assert main(["send", "--teacher-force", str(folder), "--url", server.url, "--out", str(out)]) == 0
    sent = all_are_goldens(folder, out, client.PLUGIN)
    written = replies.read_steps(server.model.parent)
    assert [(before, n) for _, before, n, _ in written.rows(0, "p2")][:5] == [
        (0, 64),
        (64, 64),
        (128, 64),
        (192, 38),
        (230, 1),
    ]
    assert {together for _, _, _, together in written.rows(0, "p2")} == {1}
    for index, replied in enumerate(sent.passes[:2]):
        for name, reply in replied.items():
            rows = written.rows(index, name)
            assert rows[0][1] == reply.cached
            assert sum(n for _, _, n, _ in rows) == sum(SIZES[int(name[1:])]) - (reply.cached or 0) - 1


@pytest.mark.parametrize("way", [client.PLUGIN, client.TRACE])
def test_v2_by_the_plugin_and_by_vllm_itself(way, v2_server, tmp_path, monkeypatch):
    folder, out = golden(tmp_path / "golden", FEW), tmp_path / "out"
    monkeypatch.setattr(client, "WAYS", (way, client.SCORED))
    assert main(["send", "--teacher-force", str(folder), "--url", v2_server.url, "--out", str(out)]) == 0
    all_are_goldens(folder, out, way, FEW)
    assert "Using V2 Model Runner" in v2_server.log.read_text(errors="replace")
    rows = replies.read_steps(v2_server.log.parent).rows(0, "p2")
    assert rows[-1][1] + rows[-1][2] == sum(FEW[2]) - 1


def test_a_token_that_no_model_has_is_not_given_to_it(server: Server) -> None:
    sender, _ = Sender(server.url, way=client.PLUGIN).introduced()
    with pytest.raises(NotForced, match=r"token . of 2 is not the one that was named"):
        sender.ask(PromptLine("beyond", token_ids=(5, 6), along=(7, 999_999_999)), "beyond", {}, 0.0)
    assert sender.can(client.PLUGIN)  # it goes on


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, preloads: Callable[[str], Path]) -> Iterator[dict[str, EngineHost]]:
    """Processes for engines that schedule ahead, of either runner; nothing of ours is on but what a test asks for."""
    root, ahead = tmp_path_factory.mktemp("ahead"), {"ACCPROBE_TEST_AHEAD": "1"}
    made = {
        "V1": EngineHost(root / "v1", ahead, probe=False, python=preloads("v1") / FORKED),
        "V2": EngineHost(root / "v2", ahead | V2_ENV, probe=False, python=preloads("v2") / FORKED),
    }
    yield made
    for host in made.values():
        host.close()


def along(ids: list[int] | None) -> dict[str, str]:
    return {KEY: " ".join(map(str, ids or ()))}


def asks_of(named: Iterable[replies.Reply]) -> list[Ask]:
    """Each forced along its own tokens."""
    return [Ask(r.prompt_token_ids or (), len(r.token_ids or ()), r.name,
                sampling=FREE | {"extra_args": along(r.token_ids)}) for r in named]  # fmt: skip


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_ahead_of_its_tokens_and_after_preemption(runner, hosts, served_model, tmp_path):
    named = replies.read(golden(tmp_path / "golden", SIZES)).passes[0].values()
    run = hosts[runner].capture(
        served_model, asks_of(named), out=tmp_path / "none", env={"VLLM_ACCPROBE_FORCE": str(tmp_path / "steps-0")},
        how="staggered", max_num_batched_tokens=64, num_gpu_blocks_override=11, block_size=32, max_model_len=256,
    )  # fmt: skip
    assert run.tokens == [r.token_ids for r in named]
    assert run.metrics["ahead"] == 2
    assert run.metrics["preemptions"] > 0
    written = replies.read_steps(tmp_path)
    computed = [sum(n for _, _, n, _ in written.rows(0, r.name)) for r in named]
    assert sum(computed) > sum(sum(size) - 1 for size in SIZES)  # what was preempted, once more


def test_five_that_are_forced_in_one_step(hosts: dict[str, EngineHost], served_model: Path, tmp_path: Path) -> None:
    """All are there before the first step. How many meet in a server depends on the load: its engine begins with the
    first request that it reads, and may be done before the next one arrives."""
    named = replies.read(golden(tmp_path / "golden", SIZES)).passes[0].values()
    env = {"VLLM_ACCPROBE_FORCE": str(tmp_path / "steps-0")}
    run = hosts["V1"].capture(served_model, asks_of(named), out=tmp_path / "none", env=env, max_num_batched_tokens=64)
    assert run.tokens == [r.token_ids for r in named]
    written = replies.read_steps(tmp_path)
    assert max(together for r in named for _, _, _, together in written.rows(0, r.name)) >= 3


def test_with_forcing_alone_every_bit_is_as_without_the_plugin(hosts, served_model, tmp_path):
    """Two engines of one process, the second one with VLLM_ACCPROBE_FORCE, where one of four requests is forced."""
    asks = [Ask(prompt(n, n), 9, sampling=FREE) for n in (21, 90, 140)]
    last, named = (Ask(prompt(30, 1), 3, sampling=FREE | more) for more in ({}, {"extra_args": along([7, 8, 9])}))
    none, how = tmp_path / "none", {"max_num_batched_tokens": 64}
    plain = hosts["V1"].capture(served_model, [*asks, last], out=none, **how)
    env = {"VLLM_ACCPROBE_FORCE": str(tmp_path / "steps-0")}
    ours = hosts["V1"].capture(served_model, [*asks, named], out=none, env=env, **how)
    assert ours.tokens[3] == [7, 8, 9] != plain.tokens[3]
    assert (ours.tokens[:3], ours.logprobs[:3]) == (plain.tokens[:3], plain.logprobs[:3])
    assert (plain.dump, ours.dump, none.exists()) == (None, None, False)
    assert replies.read_steps(tmp_path).rows(0, "ask-3")
