"""Every line of code that the documents have, by its number there: a command, an export, a call of Python.

``tests/e2e/test_seeds.py`` holds these against ``LINES``: none is left out. Lines of json and yaml are in what
``prepare`` writes; ``...`` and what is a model's own code (``model = torch.compile(...)``) are no lines of a tool.
"""

COMMANDS: dict[str, dict[int, str]] = {
    "000": {
        20: "pip install", 24: "pip install", 28: "pip install", 38: "from torch_xray import PrecisionDebugger",
        49: "PrecisionDebugger(dump_path=", 50: "debugger.start()", 60: "summary xxx.h5 sum.txt",
        98: "compare xpu.h5 gpu.h5 result.csv", 146: "X_DEBUG=0x102", 147: "X_DEDUP=True", 148: "X_DUMP_NUM",
        152: "from torch_xray import begin_dump, end_dump", 174: "X_DEBUG=0x102", 176: "n parameters",
        177: "begin_dump(X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=5)", 184: "end_dump(clear_context=True)",
        196: "jprof --cpu_init --blacklist --factory=load dump.json",
        207: "pytest --detail_compare_path=./xxx.csv proc_xxx/pytests/ --seed 42",
        212: "summary_diff_check  ./xpu.csv ./gpu.csv ./result.csv",
    },
    "001": {
        335: "run_ut -api_info ./dump.json", 345: "--api_info_file", 353: "--jit_compile", 355: "--device",
        361: "--config_path", 375: "-save_error_data", 403: "vim", 471: "multi_run_ut -api_info ./dump.json -n 32",
        489: "-n", 509: "-csv_path", 697: "api_precision_compare -npu", 707: "--npu_csv_path", 709: "--gpu_csv_path",
        850: "run_ut -config ./config.json", 948: "openssl genrsa -out server.key 2048",
        954: "openssl req -new -key server.key -out server.csr", 960: "openssl x509 -req -days 365",
        1140: "run_ut -config ./config.json", 1166: "from msprobe.pytorch import PrecisionDebugger",
        1170: 'PrecisionDebugger("config.json")', 1176: "debugger.start()", 1184: "debugger.stop()",
        1186: "debugger.step()", 1202: "bash train.sh", 1257: "msprobe -f mindspore run_ut -api_info ./dump.json",
    },
    "002": {
        50: "msprobe acc_check -api_info <dump_json_path>", 57: "--api_info_file", 64: "--config_path",
        68: "msprobe acc_check -api_info", 76: "-save_error_data", 88: "vim",
        126: "msprobe multi_acc_check -api_info <dump_json_path>", 143: "-n 32 -d 0 1 2 3", 163: "-csv_path",
        251: "msprobe api_precision_compare -npu <npu_csv_path>", 264: "msprobe api_precision_compare -npu /home",
    },
    "003": {
        31: "set_label(data_src, data_id, data_val, tensor_path)", 46: "gen_id()", 54: "set_task_id()",
        65: "ait debug compare aclcmp xx_args", 83: "set_task_id()", 98: "import set_label, gen_id",
        99: "data_id = gen_id()", 100: 'set_label("pta", data_id, hidden_states)',
        101: 'set_label("acl", data_id, acl_model_out[0])', 107: "import set_label, gen_id",
        108: "data_id = gen_id()", 109: 'set_label("pta", data_id, data_val=attention_output)',
        110: 'set_label("acl", data_id, tensor_path=', 120: "export ACLTRANSFORMER_SAVE_TENSOR=1",
        121: "export ACLTRANSFORMER_SAVE_TENSOR_MAX=2", 123: "export ACLTRANSFORMER_SAVE_TENSOR_RUNNER=",
        130: "ait debug compare aclcmp --exec",
    },
    "004": {
        25: "ait llm dump --exec", 33: "--type layer tensor", 34: "--only-save-desc",
        35: "ait llm dump --exec xx --type model", 36: "--execute-range", 37: "--save-operation-child",
        38: "--save-time", 39: "--operation-name", 40: "--save-tiling", 41: "--save-tensor-part", 42: "--output",
        43: "--device-id", 44: "--log-level", 65: "import atb_json_to_onnx", 67: "model_level = 1",
        68: "layer_topo_info =", 69: "atb_json_to_onnx(layer_topo_info, model_level)", 82: "DumpConfig(dump_path",
        96: "register_hook(model, config", 107: "from ait_llm import DumpConfig, register_hook",
        108: "dump_config = DumpConfig", 109: "register_hook(model, dump_config)",
        129: "ait llm compare --golden-path xx --my-path xx", 138: "--op-mapping-file",
        147: "ait llm compare -gp xx.pth -mp xx.bin", 163: "ait llm opcheck -i", 170: "--input", 171: "--csv-path",
        172: "--output", 173: "--operation-ids", 174: "--operation-name", 175: "--precision-metric",
        176: "--device-id", 177: "--atb-rerun", 187: "ait llm errcheck --exec",
        211: "from ait_llm.dump import torchair_dump", 214: 'get_ge_dump_config(dump_path="dump")',
        227: "from ait_llm.dump import torchair_dump", 230: "get_fx_dump_config()",
        241: "ait llm compare --my-path [GE dump data]", 244: "ait llm compare --my-path {dump_path}",
        257: "from ait_llm.dump import torchair_dump", 260: 'get_ge_dump_config(dump_path="dump")',
        273: "from ait_llm.dump import torchair_dump", 276: 'fusion_switch_file="fusion_switch.json"',
        302: "ait llm compare --my-path [GE dump data]", 305: "ait llm compare --my-path {dump_path}",
    },
}  # fmt: skip
"""Document → line → words of it."""
