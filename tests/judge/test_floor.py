"""Units of rounding, and what must be equal."""

from vllm_accprobe.judge.floor import flow_unit, is_exact, is_mask, unit


def test_units_are_half_a_step_of_the_dtype():
    assert (unit("bfloat16"), unit("float16"), unit("int64")) == (2.0**-8, 2.0**-11, 0.0)
    assert flow_unit(["float32", "bfloat16", "float8_e4m3fn", "int64"]) == 2.0**-8
    assert is_exact("int64", "int64")
    assert not is_exact("float32", "bfloat16")


def test_masks_hold_the_lowest_number_of_their_dtype():
    roles = ("input.attention_mask", "input.causal_mask", "input.hidden_states", "param.mask_token")
    assert [is_mask(r) for r in roles] == [True, True, False, False]
