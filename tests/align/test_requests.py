"""Which request is which."""

from vllm_accprobe.align.requests import pair_requests
from vllm_accprobe.dump.schema import Image, Request


def request(name, prompt="p", length=3, ordinal=0, images=(), req=0):
    return Request(req, name, name, prompt, length, ordinal, images)


def test_requests_pair_by_the_strictest_rule_that_fits():
    cat, dog = (Image("cat", 0, 1),), (Image("dog", 0, 1),)
    golden = [request("1", images=cat), request("2", images=dog, ordinal=1), request("3", "q"), request("4", "only")]
    mine = [request("9", images=dog), request("8", images=cat, ordinal=1), request("3", "q"), request("4", "else")]
    plan = pair_requests(golden, mine)
    assert [(g.id, m.id, rule) for g, m, rule in plan.pairs] == [
        ("1", "9", "prompt and ordinal"), ("2", "8", "prompt and ordinal"), ("3", "3", "id and prompt"),
    ]  # fmt: skip
    assert [(g.id, m.prompt) for g, m in plan.different] == [("4", "else")]
    assert len(plan.images_differ) == 2
    exact = pair_requests(golden[:1], [request("7", images=cat), request("6", images=dog)])
    assert [m.id for _, m, _ in exact.pairs] == ["7"]
    assert exact.pairs[0][2] == "prompt, images and ordinal"
