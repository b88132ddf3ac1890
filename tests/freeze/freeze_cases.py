"""What a case of the freeze is, and the cases of ``compare``: every kind of pair, with its main options.

A case is a few command lines of `accprobe`, given one after the other in the directory that holds ``corpus``; {out} is
the case's own directory. ``copy A B`` copies a dump that the next line changes. This module, freeze_commands.py and
freeze_run.py import nothing of the package: they drive any commit's. Not here: ``--ray``; the replay, but for one pair
(it takes seconds); the other commands (freeze_commands.py).
"""

from dataclasses import dataclass

TEXTS = ("*.csv", "*.json", "*.md", "*.py", "*.ini")
FEW = ("*.json",)


@dataclass(frozen=True)
class Case:
    """keep: what of the written files is stored under expected/, as patterns of their names; thin: of a csv, only every
    fourth row and those that neither passed nor failed. What is not stored is compared all the same by
    scripts/freeze.sh, byte for byte."""

    lines: tuple[str, ...]
    keep: tuple[str, ...] = TEXTS
    thin: bool = False


CASES: dict[str, Case] = {}


def case(name: str, *lines: str, keep: tuple[str, ...] = TEXTS, thin: bool = False) -> None:
    assert name not in CASES, name
    CASES[name] = Case(lines, keep, thin)


def pair(name: str, golden: str, mine: str, more: str = "", **how: object) -> None:
    line = f"compare corpus/{golden} corpus/{mine} --no-replay -o {{out}}/o {more}".strip()
    case(f"compare-{name}", line, **how)  # type: ignore[arg-type]


# --- compare: ours against ours ---

pair("clean", "clean", "chunked", thin=True)
pair("alone", "clean", "alone", keep=FEW)
pair("noisy", "clean", "noisy", thin=True)
pair("faulty", "clean", "faulty", keep=(*TEXTS, "*.html"))
for kind in ("late", "two", "nan", "logits", "flipped", "weights", "masked", "tp2-same-fault"):
    pair(kind, "clean", kind, thin=True)
pair("bare", "clean", "bare", keep=FEW)
pair("float32", "float32", "float32-faulty", thin=True)
pair("float32-noise", "float32", "float16-like", keep=FEW)
pair("dtypes", "float32", "clean", thin=True)
pair("tp2", "clean", "tp2", thin=True)
pair("tp2-rank", "tp2", "tp2-faulty", thin=True)
pair("stats", "stats", "stats-faulty", thin=True)
pair("stats-one-side", "clean", "stats-faulty", thin=True)
pair("vision", "vision", "vision-faulty", thin=True)
pair("vision-other", "vision", "vision-normalised", thin=True)
pair("other-prompt", "clean", "other-prompt")
pair("plain", "plain", "plain-again", thin=True)
pair("plain-ranks", "plain", "plain-two-ranks", keep=FEW)
pair("plain-stats", "plain", "plain-stats", thin=True)
pair("same-dump", "clean", "clean")
pair("calls", "calls", "calls-attention", thin=True)
pair("calls-nan", "calls", "calls-nan", keep=FEW)
pair("ops", "ops", "ops-faulty")
pair("probed", "probed", "probed-faulty")
for gone in ("killed", "torn", "lost", "cut", "early"):
    pair(gone, "plain", gone, thin=True)

for standard in ("strict", "xray", "msprobe", "msprobe-1.0", "ait", "mindspore"):
    pair(f"by-{standard}", "clean", "faulty", f"--standard {standard} --taps *down_proj,*norm", thin=True)
    pair(f"noise-by-{standard}", "clean", "noisy", f"--standard {standard} -q", keep=FEW)
pair("floor", "clean", "faulty", "--floor corpus/noisy", keep=FEW)
pair("floors", "clean", "faulty", "--floor corpus/noisy --floor corpus/chunked --false-alarm-rate 0.25", keep=FEW)
pair("taps", "clean", "faulty", "--taps *.mlp.*,!*act_fn", thin=True)
pair("quiet", "clean", "two", "-q", keep=FEW)
pair("verbose", "clean", "two", "-v", keep=FEW)
for form in ("json", "markdown", "github"):
    pair(f"as-{form}", "clean", "two", f"--format {form}", keep=())
    pair(f"clean-as-{form}", "clean", "chunked", f"--format {form}", keep=())
for name, both in (
    ("clean", "clean corpus/chunked"),
    ("tp2", "clean corpus/tp2"),
    ("foreign", "plain corpus/plain.h5"),
):
    case(f"plan-{name}", f"compare corpus/{both} --plan")
case(
    "rejudge", "compare corpus/clean corpus/faulty --no-replay -q -o {out}/a", "compare --rejudge {out}/a -o {out}/b",
    "compare --rejudge {out}/a --standard strict -o {out}/c",
    "compare --rejudge {out}/a --standard ait -o {out}/d --format markdown",
    "compare --rejudge {out}/a --false-alarm-rate 1e-6 -o {out}/e -q", keep=("[bcd]/*.json",),
)  # fmt: skip
case(
    "mapping",
    "compare corpus/clean corpus/faulty --no-replay --op-mapping-file corpus/bad-text.txt -o {out}/a",
    "compare corpus/e_atb_vs_torch/golden corpus/e_atb_vs_torch/mine --no-replay -o {out}/b"
    " --op-mapping-file corpus/e_atb_vs_torch/op_mapping",
    keep=FEW,
)
case("replay", "compare corpus/norms corpus/norms-faulty -o {out}/a", "compare --rejudge {out}/a -q -o {out}/b")
case(
    "usage", "--version", "compare corpus/clean", "compare corpus/nowhere corpus/clean",
    "compare corpus/clean corpus/faulty --nonsense", "compare corpus/clean corpus/faulty --standard lax",
    "compare corpus/clean corpus/faulty --false-alarm-rate 2", "compare --rejudge corpus/nowhere",
    "compare corpus/clean corpus/faulty --taps nothing* --no-replay -o {out}/x", "sumary x", "summary",
    "opdiff corpus/nowhere corpus/clean",
)  # fmt: skip

# --- compare: other tools' dumps ---

for archive in (
    "a_msprobe_stat",
    "a_msprobe_tensor",
    "b_sglang_tp",
    "c_msit_torch",
    "d_xray_h5",
    "d_xray_h5_renamed",
    "e_atb",
    "e_atb_vs_torch",
    "g_single",
):
    pair(archive, f"{archive}/golden", f"{archive}/mine", keep=FEW)
pair("f_torchair", "f_torchair/fx_golden", "f_torchair/ge_mine", keep=FEW)
pair("f_torchair-ge", "f_torchair/ge_nofusion_golden", "f_torchair/ge_mine", keep=FEW)
pair("fx-same", "f_torchair/fx_golden", "fx-copy", keep=FEW)
pair("mindspore", "mindspore/tensor", "mindspore/statistics", keep=FEW)
pair("msprobe", "msprobe-golden", "msprobe-mine")
pair("msit", "msit", "c_msit_torch/mine")
pair("flat", "flat-torch", "flat-atb", thin=True)
pair("flat-faulty", "flat-faulty-torch", "flat-faulty-atb", thin=True)
pair("sglang", "sglang-one", "sglang-four")
pair("ge", "ge", "ge-faulty")
pair("npy", "npy", "npy-faulty")
for ending in (".h5", ".npz", ".safetensors"):
    pair(f"own-to{ending}", "plain", f"plain{ending}", thin=True)
    pair(f"from{ending}", f"plain{ending}", "plain", keep=FEW)
    pair(f"faulty{ending}", "clean", f"faulty{ending}", keep=FEW)
pair("h5-npz", "plain.h5", "plain.npz", keep=FEW)
for standard in ("strict", "xray", "msprobe", "msprobe-1.0", "ait", "mindspore"):
    pair(f"sglang-by-{standard}", "b_sglang_tp/golden", "b_sglang_tp/mine", f"--standard {standard}", thin=True)
    pair(
        f"msprobe-by-{standard}", "a_msprobe_tensor/golden", "a_msprobe_tensor/mine", f"--standard {standard} -q",
        keep=FEW,
    )  # fmt: skip

# --- compare: what is no dump, or means harm ---

BAD = ("bad-truncated", "bad-empty", "bad-garbage", "bad-nothing", "bad-text.txt", "bad-run")
HOSTILE = (
    "ge_length", "ge_shape", "ge_deep", "atb_long_header", "atb_shape", "sglang_pickle", "msit_pickle", "link_out",
    "loop", "fifo", "deep", "fx_object",
)  # fmt: skip
PACKED = (
    "pickle_exec_pt/x.pt", "pickle_exec_legacy/x.pth", "npy_object/x.npy", "npy_1e18/x.npy", "npz_bomb",
    "st_header_2p60/x.safetensors", "st_overlap/x.safetensors", "truncated/x.npy", "truncated/x.bin", "truncated/x.pt",
    "truncated/x.npz", "truncated/x.h5", "zero_byte/x.pt", "msprobe_traversal", "json_deep_list", "h5_external_link",
    "h5_petabyte", "atb_no_end", "atb_dims_negative", "atb_dims_text", "hostile_names",
)  # fmt: skip
case("bad", *(f"compare corpus/plain corpus/{b} --no-replay -o {{out}}/{b}" for b in BAD), keep=FEW)
case("bad-summary", *(f"summary corpus/{b}" for b in BAD))
case("bad-others", *(f"{c} corpus/{b}" for c in ("formats", "opcheck -j 0", "labels") for b in BAD[1:4]))
case(
    "hostile",
    *(f"compare corpus/h_hostile/_ok_msprobe corpus/hostile/{h} --no-replay -o {{out}}/{h}" for h in HOSTILE),
    keep=(),
)
case(
    "packed",
    *(f"compare corpus/h_hostile/_ok_msprobe corpus/h_hostile/{p} --no-replay -o {{out}}/x" for p in PACKED),
    keep=(),
)
case("packed-formats", *(f"formats corpus/h_hostile/{p}" for p in PACKED))
