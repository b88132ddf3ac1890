"""What the documents name, besides lines of code: options, environment variables, functions, keys and files.

Each has its place in docs/migration.md, and is typed in one of these modules (``tests/e2e/test_seeds.py`` looks for
both); the columns of tables stand in columns.py.
"""

NAMES: dict[str, str] = {
    "000": (
        "summary compare jprof summary_diff_check PrecisionDebugger dump_path hook_name rank step model dump_torch_api "
        "begin_dump end_dump clear_context X_DEBUG X_DEDUP X_DUMP_NUM --cpu_init --blacklist --factory=load "
        "--detail_compare_path --seed _summary.csv xray_debug dump.json result.csv"
    ),
    "001": (
        "run_ut multi_run_ut api_precision_compare -api_info --api_info_file -save_error_data -o --out_path -j "
        "--jit_compile -d --device -csv_path --result_csv_path -f --filter_api -config --config_path -n --num_splits "
        "-npu --npu_csv_path -gpu --gpu_csv_path white_list black_list error_data_path precision is_online nfs_path "
        "host port rank_list tls_path rank step seed is_deterministic scope list online_run_ut level server.key "
        "server.crt config.json config.yaml accuracy_checking_result_ accuracy_checking_details_ "
        "api_precision_compare_result_ api_precision_compare_details_ ut_error_data"
    ),
    "002": "acc_check multi_acc_check npu_fusion_attention_grad",
    "003": (
        "set_label gen_id set_task_id data_src data_id data_val tensor_path --exec ACLTRANSFORMER_SAVE_TENSOR "
        "ACLTRANSFORMER_SAVE_TENSOR_MAX ACLTRANSFORMER_SAVE_TENSOR_RUNNER"
    ),
    "004": (
        "--exec --type model layer op kernel tensor cpu_profiling onnx -sd --only-save-desc -ids --save-operation-ids "
        "-er --execute-range -child --save-operation-child -time --save-time -opname --operation-name -tiling "
        "--save-tiling -stp --save-tensor-part -o --output -device --device-id -l --log-level ait_dump "
        "operation_io_tensors kernel_io_tensors torch_tensors model_tree.json atb_json_to_onnx DumpConfig dump_path "
        "token_range module_list tensor_part device_id register_hook hook_type --golden-path -gp --my-path -mp "
        "--op-mapping-file -mf --input -i --csv-path -c --operation-ids --precision-metric -metric abs cos_sim kl "
        "--atb-rerun -rerun --exit get_ge_dump_config get_fx_dump_config fusion_switch_file fusion_switch.json"
    ),
}
"""Document → its names."""
ELSEWHERE = {"npu_fusion_attention_grad": "test_npu_attention.py", "precision": "test_check_config.py"}
"""Name → the test that has it, where no line of these modules needs it."""
