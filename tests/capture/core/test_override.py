"""What lay in an object before comes back, and nothing is left where nothing lay."""

from vllm_accprobe.capture.core.attribute_override import override


class Owner:
    name = "of the class"


def test_one_over_the_other_and_back() -> None:
    owner = Owner()
    first = override(owner, "name", "first")
    second = override(owner, "name", "second")
    assert owner.name == "second"
    second()
    assert owner.name == "first"
    first()
    assert owner.name == "of the class"
    assert owner.__dict__ == {}
