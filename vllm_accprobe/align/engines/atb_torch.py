"""Which operator of an ATB graph is which module of a torch model.

The problem: the two share no name, and torch's tree is in the order of declaration, not of execution. The idea: an
operator's part in its layer follows from its type and place: linear layers before the attention core are q, k and v,
the first behind it is o, of those behind the second norm the last is down; a module's part follows from its name. Equal
parts of equal layers pair. Where only the module has a bias, the addition behind the operator is compared. The user's
op mapping (ATB's types → torch's classes) pairs the rest by order, and overrules. Not here: the graph (formats/atb.py),
applying what is found (without_row_maps.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from vllm_accprobe.formats.atb import Node

_ADD, _MUL = 8, 9
"""elewiseType of ATB's ElewiseOperation."""
Shapes = Mapping[tuple[str, str], tuple[int, ...]]
"""(tap, role) → shape."""
_Places = dict[tuple[str, str], tuple[tuple[tuple[str, str], ...], str]]
"""(tap, role) of an operator → ((tap, role) of modules, why)."""


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the ATB side and the torch tensors that it is built from, as (tap, role): one, or several joined."""

    atb: tuple[str, str]
    torch: tuple[tuple[str, str], ...]
    why: str


_CORE = re.compile(r"(self|paged|flash|core|multi\w*|latent|mla|gqa)_?attention|attention(operation|score)|mla", re.I)
_ATTENTION = re.compile(r"attention|attn", re.I)
_MLP = re.compile(r"mlp|ffn|feed_?forward", re.I)
_LINEAR = re.compile(r"linear|matmul|lmhead|dense", re.I)
_NORM = re.compile(r"norm", re.I)
_ACTIVATION = re.compile(r"activation|swiglu|gelu|silu|swish|relu", re.I)
_EMBEDDING = re.compile(r"embed", re.I)
_HEAD = re.compile(r"lm_?head|output_layer|embed_out", re.I)
_PARTS = {
    part: re.compile(pattern, re.I)
    for part, pattern in {
        "qkv": r"qkv_proj|query_key_value|c_attn|w_pack|wqkv|qkv|in_proj",
        "q": r"q_proj|wq|query",
        "k": r"k_proj|wk|key",
        "v": r"v_proj|wv|value",
        "o": r"o_proj|wo|out_proj|dense|c_proj|proj",
        "q_norm": r"q_norm|q_layernorm|query_layernorm",
        "k_norm": r"k_norm|k_layernorm|key_layernorm",
        "gate_up": r"gate_up_proj|w12|up_gate_proj",
        "gate": r"gate_proj|w1",
        "up": r"up_proj|w3|fc1|c_fc|dense_h_to_4h",
        "down": r"down_proj|w2|fc2|c_proj|dense_4h_to_h",
        "act": r"act_fn|act|activation(_func)?|silu|gelu",
        "norm1": r"input_layernorm|ln_?1|norm_?1|attention_norm|ln_attn|self_attn_layer_norm",
        "norm2": r"post_attention_layernorm|ln_?2|norm_?2|ffn_norm|ln_mlp|final_layer_norm",
    }.items()
}
_HOME = {**dict.fromkeys(("qkv", "q", "k", "v", "o", "q_norm", "k_norm"), _ATTENTION),
         **dict.fromkeys(("gate_up", "gate", "up", "down", "act"), _MLP)}  # fmt: skip
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def atb_to_torch(
    forest: Sequence[Node], modules: Sequence[tuple[str, str]], shapes: Shapes, types: Mapping[str, Sequence[str]]
) -> tuple[list[Match], list[str]]:
    """What the torch ``modules``, (tap, class) in order of execution, have of what the ATB graph computes, and lines
    to say. shapes: of the ATB side's tensors. types: the user's, ATB's operator types → torch's classes."""
    found = _Finder(forest, modules, shapes)
    for name, wanted in types.items():
        found.by_type(name, wanted)
    return [Match(place, sources, why) for place, (sources, why) in found.places.items()], found.lines


class _Finder:
    def __init__(self, forest: Sequence[Node], modules: Sequence[tuple[str, str]], shapes: Shapes):
        self.modules, self.shapes = modules, shapes
        self.nodes = [n for top in forest for n in _all(top)]
        self.places: _Places = {}
        self.lines: list[str] = []
        layers, blocks = atb_layers(forest), torch_layers([t for t, _ in modules])
        self.scopes: list[tuple[str, str]] = []
        if len(layers) == len(blocks):
            self.scopes = [(a.tap, t) for a, t in zip(layers, blocks, strict=True)]
        else:
            self.lines.append(f"mapping: {len(layers)} layers in the ATB graph, {len(blocks)} in the torch model: "
                              "only what stands outside of layers is mapped")  # fmt: skip
        by_tap = {n.tap: n for n in layers}
        for a, t in self.scopes:
            self.layer(by_tap[a], t)
        if layers:
            self.ends(forest, layers, [m for m in modules if not _scope(m[0], blocks)])

    def put(self, tap: str, role: str, sources: Sequence[tuple[str, str]], why: str) -> None:
        self.places.setdefault((tap, role), (tuple(sources), why))

    def layer(self, atb: Node, torch: str) -> None:
        inside = [tap for tap, _ in self.modules if tap.startswith(torch + ".")]
        have: dict[str, str] = {}
        for tap in inside:
            have.setdefault(part_of(tap[len(torch) + 1 :]), tap)
        self.put(atb.tap, "output.0", [(torch, "output.0")], "layer")
        for n in atb.children:
            block = "attention" if _ATTENTION.search(n.kind) else "mlp" if _MLP.search(n.kind) else ""
            if n.children and block in have:
                self.put(n.tap, "output.0", [(have[block], "output.0")], block)
        for node, part in _operators(atb.leaves(), have):
            self.operator(node, part, have)
        self.elementwise(atb.leaves(), have)

    def operator(self, node: Node, part: str, have: Mapping[str, str]) -> None:
        if part == "core":
            if "o" in have:
                self.put(node.tap, "output.0", [(have["o"], "input.0")], "what attention gives is what o takes")
            return
        names = (part,) if part in have else _FUSED.get(part, (part,))
        if not all(n in have for n in names):
            return
        taps = [have[n] for n in names]
        self.put(node.tap, "output.0", [(t, "output.0") for t in taps], part)
        self.put(node.tap, "input.0", [(taps[0], "input.0")], f"input of {part}")
        if len(taps) == 1:
            self.put(node.tap, "param.weight", [(taps[0], "param.weight")], f"weight of {part}")

    def elementwise(self, leaves: Sequence[Node], have: Mapping[str, str]) -> None:
        residual = False
        for before, n in pairwise(leaves):
            kind = n.param.get("elewiseType")
            made = self.places.get((before.tap, "output.0"))
            if kind == _ADD and made is not None and is_linear(before) and self.adds_bias(n):
                del self.places[(before.tap, "output.0")]
                self.put(n.tap, "output.0", made[0], f"{made[1]} with its bias")
            elif kind == _ADD and not residual and "norm2" in have:
                residual = True
                self.put(n.tap, "output.0", [(have["norm2"], "input.0")], "the residual stream is what norm2 takes")
            elif kind == _MUL and "down" in have:
                self.put(n.tap, "output.0", [(have["down"], "input.0")], "gate times up is what down takes")
            elif made is not None and len(made[0]) > 1 and re.search("split", n.kind, re.I):
                for k, source in enumerate(made[0]):
                    self.put(n.tap, f"output.{k}", [source], "split")

    def adds_bias(self, n: Node) -> bool:
        """Whether one of its inputs is a vector as long as a row of what comes out."""
        out = self.shapes.get((n.tap, "output.0"), ())
        inputs = [self.shapes[(n.tap, f"input.{k}")] for k in (0, 1) if (n.tap, f"input.{k}") in self.shapes]
        if out and prod(out) > out[-1] and any(prod(s) == s[-1] == out[-1] for s in inputs if s):
            return True
        return any("bias" in name.lower() for name in n.names)

    def ends(self, forest: Sequence[Node], layers: Sequence[Node], modules: Sequence[tuple[str, str]]) -> None:
        level = next(level for level in _levels(forest) if layers[0] in level)
        front = [x for n in level[: level.index(layers[0])] for x in n.leaves()]
        back = [x for n in level[level.index(layers[-1]) + 1 :] for x in n.leaves()]
        words = [n for n in front if _EMBEDDING.search(n.kind) and not re.search("position|rot", n.kind, re.I)]
        tables = [t for t, c in modules if _EMBEDDING.search(c or t) and not re.search("rot|pos", c + t, re.I)]
        if words and len(tables) == 1:
            self.put(words[0].tap, "output.0", [(tables[0], "output.0")], "embedding")
        for nodes, taps, why in (
            ([n for n in back if _NORM.search(n.kind)], [t for t, c in modules if _NORM.search(c or t)], "last norm"),
            ([n for n in back if is_linear(n)], [t for t, _ in modules if _HEAD.search(t.rpartition(".")[2])], "head"),
        ):
            if nodes and taps:
                for role in ("output.0", "input.0", "param.weight"):
                    self.put(nodes[-1].tap, role, [(taps[-1], role)], why)

    def by_type(self, name: str, wanted: Sequence[str]) -> None:
        """What of this type is not paired yet, or paired with a class that the user does not name, pairs by order
        where there are as many of either in a layer, and outside of layers."""
        kind, role = type_and_role(name)
        sides = dict(type_and_role(w) for w in wanted)
        classes = dict(self.modules)
        ops = [n for n in self.nodes if n.kind == kind]
        for n in ops:
            found = self.places.get((n.tap, role))
            if found is not None and not any(classes.get(tap) in sides for tap, _ in found[0]):
                del self.places[(n.tap, role)]
        taken = {tap for sources, _ in self.places.values() for tap, r in sources if r.startswith("output")}
        for scope in [*self.scopes, ("", "")]:
            left = [n for n in ops if (n.tap, role) not in self.places
                    and _scope(n.tap, [a for a, _ in self.scopes]) == scope[0]]  # fmt: skip
            free = [(t, c) for t, c in self.modules if c in sides and t not in taken
                    and _scope(t, [b for _, b in self.scopes]) == scope[1]]  # fmt: skip
            if left and len(left) == len(free):
                for n, (tap, cls) in zip(left, free, strict=True):
                    self.put(n.tap, role, [(tap, sides[cls])], f"op mapping {name}")
            elif left:
                where = f"of {scope[0]}" if scope[0] else "outside of layers"
                self.lines.append(f"mapping: {len(left)} {kind} {where}, {len(free)} {' or '.join(sides)} that no "
                                  "other operator has: not paired")  # fmt: skip


def atb_layers(forest: Sequence[Node]) -> list[Node]:
    """The nodes of the commonest type that hold something; of one alone, the one that is called a layer."""
    for level in _levels(forest):
        kinds: dict[str, list[Node]] = defaultdict(list)
        for n in level:
            if n.children:
                kinds[n.kind].append(n)
        most = max(kinds.values(), key=len, default=[])
        if len(most) > 1:
            return most
        called = [n for n in level if n.children and re.search("layer|block", n.kind, re.I)]
        if len(called) == 1 and len(level) > 1:
            return called
    return []


def _levels(forest: Sequence[Node]) -> list[Sequence[Node]]:
    """The outermost level, and what lies inside of it as long as that is one node."""
    levels = [forest]
    while len(levels[-1]) == 1 and levels[-1][0].children:
        levels.append(levels[-1][0].children)
    return levels


def torch_layers(taps: Iterable[str]) -> list[str]:
    lists: dict[str, set[int]] = defaultdict(set)
    for tap in taps:
        names = tap.split(".")
        at = next((i for i, n in enumerate(names) if n.isdecimal()), None)
        if at is not None:
            lists[".".join(names[:at])].add(int(names[at]))
    if not lists:
        return []
    head = max(lists, key=lambda h: len(lists[h]))
    return [f"{head}.{i}" if head else str(i) for i in sorted(lists[head])]


def part_of(tap: str) -> str:
    """What a module is, by its path inside its layer; "" for what is not known."""
    inside, _, own = tap.rpartition(".")
    for part, pattern in _PARTS.items():
        if pattern.fullmatch(own) and (_HOME[part].search(inside) if part in _HOME else not inside):
            return part
    if inside:
        return ""
    return "attention" if _ATTENTION.search(own) and not _NORM.search(own) else "mlp" if _MLP.fullmatch(own) else ""


def _operators(leaves: Sequence[Node], have: Mapping[str, str]) -> list[tuple[Node, str]]:
    core = next((i for i, n in enumerate(leaves) if _CORE.search(n.kind)), None)
    if core is None:
        return []
    front = [n for n in leaves[:core] if is_linear(n)]
    behind = [n for n in leaves[core + 1 :] if is_linear(n)]
    norms = [n for n in leaves[:core] if _NORM.search(n.kind)]
    norms2 = [n for n in leaves[core + 1 :] if _NORM.search(n.kind)]
    acts = [n for n in leaves[core + 1 :] if _ACTIVATION.search(n.kind)]
    out = [(leaves[core], "core")]
    out += zip(front, {1: ("qkv",), 3: ("q", "k", "v")}.get(len(front), ()), strict=False)
    wide = "up" if "up" in have and "gate" not in have else "gate_up"
    rest = {1: ("o",), 3: ("o", wide, "down"), 4: ("o", "gate", "up", "down")}.get(len(behind), ())
    out += zip(behind, rest, strict=False)
    out += zip(norms, {1: ("norm1",), 3: ("norm1", "q_norm", "k_norm")}.get(len(norms), ()), strict=False)
    out += [(norms2[0], "norm2")] if len(norms2) == 1 else []
    # Where gate and up are one, the activation takes both and gives what down takes.
    return out + ([(acts[0], "act")] if len(acts) == 1 and len(behind) == 4 else [])


def type_and_role(text: str) -> tuple[str, str]:
    """``LinearOperation_outtensor0`` and ``Linear_output_0`` name a role too; else the first output is meant."""
    m = re.fullmatch(r"(.+?)_(out|in)(?:tensor|put)_?(\d+)", text, re.ASCII)
    return (text, "output.0") if m is None else (m[1], f"{m[2]}put.{int(m[3])}")


def is_linear(n: Node) -> bool:
    return _LINEAR.search(n.kind) is not None and not _NORM.search(n.kind)


def _scope(tap: str, scopes: Iterable[str]) -> str:
    return next((s for s in scopes if tap == s or tap.startswith(s + ".")), "")


def _all(node: Node) -> list[Node]:
    return [node, *(x for c in node.children for x in _all(c))]
