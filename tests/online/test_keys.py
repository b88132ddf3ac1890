"""msprobe's config.json, both sides."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.online.keys import RECEIVES, SENDS, Endpoint, read_keys


def config(path: Path, **block: Any) -> Path:
    base = {"is_online": True, "nfs_path": "", "host": "127.0.0.1", "port": 59208, "rank_list": [1, 0]}
    path.write_text(json.dumps({"task": "run_ut", "run_ut": base | block}))
    return path


def test_the_receiving_side(tmp_path: Path) -> None:
    found = read_keys(config(tmp_path / "c", white_list=["conv1d"], black_list=["add"], odd=1), RECEIVES)
    assert found.endpoint == Endpoint("127.0.0.1", 59208)
    assert found.ranks == (0, 1)
    assert found.ops == ("conv1d", "*.conv1d", "*.conv1d.*", "!add", "!*.add", "!*.add.*")
    assert found.notes == ("run_ut.odd is not known and has no effect",)
    assert read_keys(config(tmp_path / "c", tls_path="certs"), RECEIVES).endpoint.tls == Path("certs")


def test_a_shared_folder_goes_before_a_line(tmp_path: Path) -> None:
    found = read_keys(config(tmp_path / "c", nfs_path="/nfs/data", host="", port=-1, tls_path="x"), RECEIVES)
    assert found.endpoint == Endpoint(shared=Path("/nfs/data"))


def test_the_sending_side(tmp_path: Path) -> None:
    block = {"scope": [], "list": [], "online_run_ut": True, "host": "10.0.0.5", "port": 1}
    (tmp_path / "c").write_text(json.dumps({"task": "tensor", "rank": [], "tensor": block}))
    found = read_keys(tmp_path / "c", SENDS)
    assert found.endpoint == Endpoint("10.0.0.5", 1)
    assert (found.ranks, found.notes) == (None, ())


@pytest.mark.parametrize(("block", "said"), [
    ({"is_online": False}, "run_ut.is_online is not true"),
    ({"port": -1}, "run_ut.port is -1: a number from 1 to 65535, or name nfs_path"),
    ({"host": ""}, "run_ut.host is missing"),
    ({"rank_list": [-1]}, "the ranks are [-1]"),
    ({"rank_list": []}, "the ranks are []"),
    ({"nfs_path": 3}, "nfs_path is no text"),
    ({"white_list": "conv1d"}, "white_list is no list of names"),
])  # fmt: skip
def test_what_is_wrong_is_a_line(tmp_path: Path, block: dict[str, Any], said: str) -> None:
    with pytest.raises(DumpError) as error:
        read_keys(config(tmp_path / "c", **block), RECEIVES)
    assert said in str(error.value)
    for text in ("[]", "{", '{"task": "x"}'):
        (tmp_path / "c").write_text(text)
        with pytest.raises(DumpError):
            read_keys(tmp_path / "c", RECEIVES)
