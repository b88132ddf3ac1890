"""The columns of each csv that a document shows, in the document's order and spelling.

Document 002 has msprobe's in English, though the files' headers are Chinese; document 001 has them as they are.
"""

from collections.abc import Iterable

SUMMARY = ("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")
COMPARED = ("Index", "Status", "Module (Bench/Target)", "Cosine", "RMSE", "IsClose (%)", "Max Err (t)", "GtNum")
UNIT_TESTS = ("name", "op_name", "dtype", "shape", "min-val", "max-val", "is_pass", "xpu_max", "gpu_max")
CHECKED = ("API name", "Forward Test Success", "Backward Test Success", "Message")
CHECK_DETAILS = (
    "API name", "Bench Dtype", "DEVICE Dtype", "Shape", "余弦相似度", "最大绝对误差", "双百指标", "双千指标",
    "双万指标", "二进制一致错误率", "误差均衡性", "均方根误差", "小值域错误占比", "相对误差最大值", "相对误差平均值",
    "inf/nan 错误率", "相对误差错误率", "绝对误差错误率", "ULP 误差最大值", "ULP 误差平均值", "ULP 误差大于阈值占比",
    "Status", "message",
)  # fmt: skip
TWO_MACHINES = (
    "API name", "小值域错误比值", "小值域判定结果", "均方根误差比值", "均方根误差判定结果", "相对误差最大值比值",
    "相对误差最大值判定结果", "相对误差平均值比值", "相对误差平均值判定结果", "误差均衡性比值", "误差均衡性判定结果",
    "inf / nan 错误率", "inf / nan 判定结果", "相对误差错误率", "相对误差判定结果", "绝对误差错误率",
    "绝对误差判定结果", "二进制一致错误率", "二进制一致错误率判定结果", "ULP 误差平均值", "ULP 误差大于阈值占比",
    "ULP 误差大于阈值占比比值", "ULP 误差判定结果", "双千指标", "双千指标判定结果", "比对结果", "比对算法", "Message",
)  # fmt: skip
"""Document 001 calls the third 小值域错误判定结果; release 26.2 leaves two signs out."""
MINDSPORE = (
    "API Name", "Bench Dtype", "Tested Dtype", "Shape", "Cosine", "MaxAbsErr", "MaxRelativeErr", "Status", "message",
)  # fmt: skip
LABELS = (
    "data_id", "pta_data_path", "pta_dtype", "pta_shape", "acl_data_path", "acl_dtype", "acl_shape", "cmp_flag",
    "cosine_similarity", "max_relative_error", "mean_relative_error", "relative_euclidean_distance",
    "cmp_fail_reason",
)  # fmt: skip


def alike(columns: Iterable[str]) -> list[str]:
    """Without what a document and the tool's own header differ in: blanks, and capitals of one word."""
    return [column.replace(" ", "").lower() for column in columns]
