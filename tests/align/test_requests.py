"""Which request is which."""

from vllm_accprobe.align.tokens import pair_requests
from vllm_accprobe.dump.schema import OWN_REQUEST, Image, Request


def request(name, prompt="p", length=3, ordinal=0, images=(), req=0, adapter=None):
    return Request(req, name, name, prompt, length, ordinal, images, adapter)


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


def test_one_prompt_to_two_adapters_is_two_requests():
    golden = [request("1", adapter=""), request("2", adapter="sql"), request("3", adapter="chat")]
    mine = [request("7", adapter="chat"), request("8", adapter="sql"), request("9", adapter="other")]
    plan = pair_requests(golden, mine)
    assert [(g.id, m.id) for g, m, _ in plan.pairs] == [("2", "8"), ("3", "7")]
    assert [r.id for r in (*plan.only_golden, *plan.only_mine)] == ["1", "9"]


def test_one_id_with_two_adapters_is_said():
    plan = pair_requests([request("a", adapter="")], [request("a", adapter="sql")])
    assert not plan.pairs
    assert "requests: 'a' has different adapters (golden none, mine 'sql'), not compared" in plan.lines()


def test_a_capture_that_knows_no_adapters_pairs_first_with_what_has_none():
    golden = [request("1"), request("2", ordinal=1)]
    mine = [request("8", adapter="sql"), request("9", adapter="")]
    for one, two, want in ((golden[:1], mine, [("1", "9")]), (golden, mine, [("1", "9"), ("2", "8")])):
        assert [(g.id, m.id) for g, m, _ in pair_requests(one, two).pairs] == want
    assert [(g.id, m.id) for g, m, _ in pair_requests(mine, golden[:1]).pairs] == [("9", "1")]


def test_the_gates_own_request_is_nobodys():
    plan = pair_requests([request(OWN_REQUEST), request("1")], [request("1"), request(OWN_REQUEST)])
    assert [g.id for g, _, _ in plan.pairs] == ["1"]
    assert not plan.only_golden + plan.only_mine
