"""The cases of the freeze for all commands but ``compare``; `CASES` has that one's, too.

Not here: ``run``, ``doctor`` and errcheck's watching, which tell of the machine and of an engine (their help is here);
opcheck of statistics, ``--rerun`` and ``--against device``, which ask whether vLLM or an accelerator is there.
"""

from freeze_cases import BAD, CASES, FEW, TEXTS, case

__all__ = ["CASES"]

case("help-all", "--help")
for command in (
    "compare", "opcheck", "gentest", "opdiff", "calibrate", "summary", "show", "convert", "repair", "doctor", "labels",
    "run", "errcheck", "formats", "patches",
):  # fmt: skip
    case(f"help-{command}", f"{command} --help")

for dump in (
    "clean",
    "plain",
    "plain-two-ranks",
    "plain-stats",
    "tp2",
    "vision",
    "probed",
    "ops",
    "labels",
    "killed",
    "lost",
    "plain.h5",
    "mindspore/tensor",
    "msit",
    "sglang-four",
):
    case(f"summary-{dump.replace('/', '-')}", f"summary corpus/{dump} --limit 12")
case(
    "summary-options", "summary corpus/plain *down* --step 1-2 --role output.*",
    "summary corpus/plain --request chat-2 --limit 3",
    "summary corpus/plain-two-ranks --rank 1 --step 0 --csv {out}/x.csv --limit 1", "summary corpus/probed --ops",
    "summary corpus/ops *::*", "summary corpus/plain no.such",
)  # fmt: skip
case("summary-msprobe", "summary corpus/a_msprobe_tensor/golden --limit 5 --csv {out}/x.csv", thin=True)
case("summary-torchair", "summary corpus/f_torchair/ge_mine --limit 5 --csv {out}/x.csv", thin=True)
case(
    "show", "show corpus/plain model.layers.0.mlp.down_proj --role output.0 --step 2",
    "show corpus/plain model.layers.0.mlp.down_proj/output.0 --step 0 --rows 0,2-3",
    "show corpus/plain model.embed_tokens --request chat-1 --position 0-1 --step 0 --role output.0",
    "show corpus/plain model.layers.0.mlp.down_proj --role output.0 --step 0 --save {out}/x.npy",
    "show corpus/plain model.layers.0.mlp.down_proj --role output.0 --step 0 --save {out}/x.safetensors",
    "show corpus/plain-stats model.embed_tokens --role output.0 --step 0",
    "show corpus/clean model.norm --role output.0 --step 0", "show corpus/plain model.embed_tokens",
    "show corpus/plain nothing", "show corpus/plain.h5 model.embed_tokens --role output.0 --step 0",
)  # fmt: skip
case(
    "convert",
    *(f"convert corpus/{d} {{out}}/{d}{e}" for d in ("plain", "faulty") for e in (".h5", ".npz", ".safetensors")),
    "convert corpus/plain-two-ranks {out}/ranks --to npz",
    "convert corpus/plain {out}/again.npz *norm* --step 1 --role output.*",
    "convert corpus/plain {out}/plain.pt",
    "convert corpus/plain {out}/plain.npz",
)
case(
    "convert-foreign", "convert corpus/sglang-four {out}/x.npz", "convert corpus/plain.h5 {out}/back.safetensors",
    keep=(),
)  # fmt: skip
case(
    "repair",
    *(
        line
        for d in ("plain", "killed", "torn", "lost", "cut", "early", *BAD[:3])
        for line in (
            f"copy corpus/{d} {{out}}/{d}",
            f"repair {{out}}/{d}",
            f"repair {{out}}/{d}",
            f"summary {{out}}/{d} --limit 3",
        )
    ),
    "repair corpus/plain.h5",
    "repair corpus/found",
    keep=(),
)
for dump in (
    "calls",
    "calls-attention",
    "calls-norm",
    "calls-projection",
    "calls-nan",
    "calls-headless",
    "ops-faulty",
    "norms-worse",
    "killed",
):
    case(f"opcheck-{dump}", f"opcheck corpus/{dump} -j 0 -o {{out}}/o")
case(
    "opcheck-probed", "opcheck corpus/probed -j 0 -o {out}/o", keep=("*.csv",)
)  # its journal's size is not twice the same
case("opcheck-machine", "opcheck corpus/machine-odd -j 0 -o {out}/o", thin=True)
for standard in ("strict", "msprobe", "msprobe-1.0", "ait", "xray"):
    case(
        f"opcheck-by-{standard}", f"opcheck corpus/calls-projection -j 0 -o {{out}}/o --standard {standard}", thin=True
    )
case(
    "opcheck-options",
    "opcheck corpus/calls-norm -j 0 -o {out}/a --ops RMSNorm --kl -v",
    "opcheck corpus/calls-attention -j 0 -o {out}/b --against corpus/calls",
    "opcheck corpus/calls-norm -j 0 -o {out}/c --backward --ops RMSNorm --ops RowParallelLinear",
    "opcheck corpus/calls -j 0 -o {out}/d --ids 0.0.1",
    "opcheck corpus/calls-norm -j 0 -o {out}/f --save-failed {out}/failed --ops RMSNorm",
    "opcheck corpus/calls -j 0 -o {out}/g --ops Nothing",
)
case("opcheck-process", "opcheck corpus/calls -o {out}/h -j 1 --ops RMSNorm")
case(
    "gentest", "gentest corpus/calls-attention --failed -o {out}/t",
    "gentest corpus/calls --ops RMSNorm -n 2 -o {out}/u", "gentest corpus/ops --ops * -o {out}/v",
    "gentest corpus/calls -o {out}/w", "gentest corpus/calls --ops Nothing -o {out}/w",
    keep=("[tv]/*.py", "[tv]/*.md", "[tv]/*.ini", "t/*.json"),
)  # fmt: skip
for standard in ("msprobe", "msprobe-1.0", "operator", "ait", "xray"):
    case(f"opdiff-{standard}", f"opdiff corpus/opdiff-gpu corpus/opdiff-npu --standard {standard} -o {{out}}/o")
case(
    "opdiff-options",
    "opdiff corpus/accuracy_checking_details_gpu.csv corpus/accuracy_checking_details_npu.csv -o {out}/a",
    "opdiff corpus/opdiff-gpu corpus/opdiff-npu --by operator -v -o {out}/b",
    "opdiff corpus/opdiff-gpu corpus/opdiff-npu --by tap --algorithm aten.mul.*=ulp -o {out}/c",
    "opdiff corpus/opdiff-gpu corpus/opdiff-npu --algorithm x -o {out}/d",
    "opdiff corpus/opdiff-gpu corpus/bad-text.txt -o {out}/d",
)
case(
    "opdiff-of-opcheck", "opcheck corpus/calls -j 0 -o {out}/gpu", "opcheck corpus/calls-norm -j 0 -o {out}/npu",
    "opdiff {out}/gpu {out}/npu -o {out}/o", keep=("o/*",),
)  # fmt: skip
case("labels", "labels corpus/labels -o {out}/a", keep=(*TEXTS, "*.html"))
case(
    "labels-options", "labels corpus/labels -o {out}/b --limit 1 -v", "labels corpus/plain -o {out}/c",
    "labels corpus/labels --acl corpus/nowhere", keep=FEW,
)  # fmt: skip
case(
    "calibrate", "calibrate corpus/clean corpus/noisy corpus/chunked -o {out}/a",
    "compare corpus/clean corpus/faulty --no-replay --floor {out}/a -o {out}/b",
    "calibrate corpus/clean corpus/clean -o {out}/c", "calibrate corpus/clean corpus/other-prompt -o {out}/d", keep=FEW,
)  # fmt: skip
case(
    "profile", "calibrate corpus/machine --profile -o {out}/a",
    "compare corpus/machine corpus/machine-odd --no-replay --floor {out}/a -o {out}/b -q", keep=("*.json",),
)  # fmt: skip
case(
    "formats",
    "formats",
    *(
        f"formats corpus/{d}"
        for d in (
            "plain",
            "plain.h5",
            "plain.npz",
            "plain.safetensors",
            "a_msprobe_stat/golden",
            "b_sglang_tp/mine",
            "c_msit_torch/golden",
            "d_xray_h5/golden",
            "e_atb/golden",
            "f_torchair/fx_golden",
            "f_torchair/ge_mine",
            "g_single/golden",
            "mindspore/tensor",
            "flat-atb",
            "npy",
            "nowhere",
            "bad-text.txt",
        )
    ),
)
case(
    "patches", "patches list", "patches list -v", "patches check --source corpus/plain", "patches list nothing",
    "patches fit",
)  # fmt: skip
case(
    "errcheck",
    *(
        f"errcheck --read corpus/{d}"
        for d in ("found", "found-later", "found-nothing", "found-damaged", "plain", "nowhere")
    ),
)
