"""Which taps and roles pair, and by which rule."""

from vllm_accprobe.align.names import TapRoles, pair_names, pair_roles


def place(tap, cls="Linear", roles=("input.0", "output.0")):
    return TapRoles(tap, cls, tuple(roles))


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


def test_the_same_weights_are_the_same_module_whatever_its_name():
    def with_weights(tap, *hashes):
        return TapRoles(tap, "Linear", ("param.weight", "output.0"), tuple(("param.weight", h) for h in hashes))

    golden = [with_weights("enc.a", "h1"), with_weights("enc.b", "h2"), with_weights("enc.c", "same")]
    mine = [with_weights("net.y", "h2"), with_weights("net.x", "h1"), with_weights("net.z", "same")]
    golden.append(with_weights("enc.d", "same"))  # tells nothing
    plan = pair_names(golden, mine, by_order=False)
    assert rules(plan) == [("enc.b", "net.y", "structure"), ("enc.a", "net.x", "structure")]
    assert (plan.only_golden, plan.only_mine) == (["enc.c", "enc.d"], ["net.z"])


def test_the_same_place_of_the_tree():
    golden = [place("m.l"), place("m.l.attn"), place("m.l.attn.q"), place("m.l.attn.drop", roles=("input.0",))]
    mine = [place("m.l"), place("m.l.mixer"), place("m.l.mixer.q"), place("m.l.mixer.drop", roles=("input.0",))]
    assert rules(pair_names(golden, mine, by_order=False)) == [
        ("m.l", "m.l", "exact"),
        ("m.l.attn", "m.l.mixer", "structure"),
        ("m.l.attn.q", "m.l.mixer.q", "structure"),
        ("m.l.attn.drop", "m.l.mixer.drop", "structure"),
    ]


def test_tensors_without_a_partner_are_counted():
    golden = [place("a", roles=("input.x", "input.mask", "output.0"))]
    mine = [place("a", roles=("input.x", "input.positions", "input.y", "output.0"))]
    plan = pair_names(golden, mine)
    assert plan.skips() == {"tensor of a paired tap only in golden": 1, "tensor of a paired tap only in mine": 2}
    assert "names: 2 tensors of paired taps only in mine: input.positions (1), input.y (1)" in plan.lines()
    assert pair_names(mine, mine).skips() == {}
