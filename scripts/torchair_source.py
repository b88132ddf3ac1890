"""Holds our torchair configuration and reader against torchair's own code, as torch_npu's wheel brings it.

    python scripts/torchair_source.py                       downloads torch_npu's wheel, about 44 MB
    python scripts/torchair_source.py --torchair FOLDER     a folder that holds torchair/

The problem: torchair needs a card, and a function written after its documents alone is a guess. The idea: its
configuration and its dumper of FX graphs are plain Python; these modules are loaded from the wheel (nothing of it is
installed), the configuration is asked what it tells GE, and the dumper writes a small graph of aten operators, which
our reader then opens and compares. Not here: GE itself, which needs a card.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

INSIDE = "torch_npu/dynamo/torchair/"


def fetch(where: Path, version: str) -> Path:
    """The folder that holds ``torchair/``, from torch_npu's wheel: its Python files only."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(where)]
    subprocess.run([*command, f"torch-npu=={version}"], check=True)
    (wheel,) = where.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(INSIDE) and name.endswith(".py") and ".." not in name:
                archive.extract(name, where)
    return where / INSIDE.rstrip("/").rpartition("/")[0]


def load(folder: Path) -> None:
    """Makes ``torchair.configs`` and ``torchair.fx_dumper`` importable. torchair's own ``__init__`` wants GE's
    libraries; its packages stand here without them, and every operator counts as one that GE knows."""
    for name in ("torchair", "torchair.core", "torchair._ge_concrete_graph"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    known: Any = types.ModuleType("torchair._ge_concrete_graph.fx2ge_converter")
    known._get_converter = lambda target: target
    sys.modules[known.__name__] = known


def ge_options(dump: Path, switches: Path) -> dict[str, str]:
    """What GE is told for our configuration."""
    from vllm_accprobe import torchair_dump

    config = torchair_dump.get_ge_dump_config(dump, fusion_switch_file=switches, dump_token=[0, 2], dump_layer=["Add"])
    told = dict(config.as_dict()[1])
    told["graph"] = config.debug.graph_dump.full_path("dynamo_original_graph_1")
    return told


def fx_dump(dump: Path, scale: float = 1.0) -> Path:
    """The FX graph of a small function, dumped by torchair's dumper over two executions."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torchair.fx_dumper import _NpuFxDumper  # type: ignore[import-not-found]

    from vllm_accprobe import torchair_dump

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.cat([x, y * scale], 0) @ x.T, -1).relu()

    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind()
    run = _NpuFxDumper(make_fx(function)(x, y), torchair_dump.get_fx_dump_config(dump).debug.data_dump)
    for _ in range(2):
        run(x, y)
    return dump


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torchair", type=Path, help="a folder that holds torchair/")
    parser.add_argument("--version", default="2.13.0", help="of torch_npu, where it is downloaded")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        load(given.torchair or fetch(home / "wheel", given.version))
        switches = home / "fusion_switch.json"
        switches.write_text('{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}')
        for key, value in ge_options(home / "ge", switches).items():
            print(f"GE: {key} = {value.replace(str(home), 'HOME')}")
        from vllm_accprobe import compare

        found = compare(fx_dump(home / "golden"), fx_dump(home / "mine", 1.01))
        files = sum(1 for _ in (home / "golden").rglob("*.npy"))
        place = next((home / "golden").rglob("*.npy")).relative_to(home / "golden").parent
        print(f"FX: {files} files in {place}, {found.coverage['pairs']} pairs: {found.verdict}")
        print(f"FX: first difference {(found.first_divergence or {}).get('module')}")
        return 0 if found.verdict == "fail" and 2 * found.coverage["pairs"] >= files else 1


if __name__ == "__main__":
    sys.exit(main())
