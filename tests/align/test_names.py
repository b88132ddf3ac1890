"""Which taps and roles pair, and by which rule."""

from vllm_accprobe.align.names import Place, pair_names, pair_roles


def place(tap, cls="Linear", roles=("input.0", "output.0")):
    return Place(tap, cls, tuple(roles))


def rules(plan):
    return [(p.golden.tap, p.mine.tap, p.rule) for p in plan.pairs]


def test_exact_names_first_whatever_the_class():
    plan = pair_names([place("a"), place("b", "SiluAndMul")], [place("b", "KunlunSilu"), place("a")])
    assert rules(plan) == [("b", "b", "exact, other class"), ("a", "a", "exact")]
    assert "names: class SiluAndMul is KunlunSilu in mine, 1 taps" in plan.lines()


def test_a_wrapper_adds_a_prefix():
    golden = [place("model.norm", "RMSNorm"), place("model.layers.0.mlp"), place("model.layers.1.mlp")]
    mine = [place(f"language_model.{p.tap}", p.cls) for p in golden] + [place("visual.norm")]
    plan = pair_names(golden, mine)
    assert [r[2] for r in rules(plan)] == ["prefix"] * 3
    assert plan.only_mine == ["visual.norm"]
    assert rules(pair_names(mine, golden))[0] == ("language_model.model.norm", "model.norm", "prefix")


def test_order_only_where_the_counts_agree():
    golden, mine = [place("x.0"), place("x.1")], [place("y.0"), place("y.1")]
    assert rules(pair_names(golden, mine)) == [("x.0", "y.0", "order"), ("x.1", "y.1", "order")]
    left = pair_names(golden, mine[:1])
    assert (left.pairs, left.only_golden, left.only_mine) == ([], ["x.0", "x.1"], ["y.0"])


def test_roles_pair_by_order_except_parameters():
    golden = ("input.hidden_states", "input.residual", "output.0", "param.weight")
    mine = ("input.x", "input.residual", "output.0", "param.scale")
    assert pair_roles(golden, mine) == (
        ("input.hidden_states", "input.x", "order"),
        ("input.residual", "input.residual", "exact"),
        ("output.0", "output.0", "exact"),
    )
