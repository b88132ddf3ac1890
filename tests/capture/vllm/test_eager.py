"""An engine is made eager in every word that its release has, and run.json says what it is, not what was asked."""

import dataclasses
import enum
import sys
from types import ModuleType, SimpleNamespace as Plain
from typing import Any

import pytest
import torch

from vllm_accprobe import plugin


class CUDAGraphMode(enum.Enum):  # vLLM 0.11.0, config/compilation.py
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


class CompilationMode(enum.IntEnum):  # vLLM 0.13, config/compilation.py; 0.11 has the same numbers as plain integers
    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@dataclasses.dataclass
class LevelConfig:
    """CompilationConfig of vLLM 0.11.0."""

    level: int | None = None
    cudagraph_mode: CUDAGraphMode | None = None


@dataclasses.dataclass
class ModeConfig:
    """CompilationConfig of vLLM 0.13 to 0.15.1 (``level`` is a deprecated word for it)."""

    mode: CompilationMode | None = None
    cudagraph_mode: CUDAGraphMode | None = None


def decides(config: Any, enforce_eager: bool) -> Any:
    """VllmConfig.__post_init__ as far as it decides: 0.11.0 config/__init__.py 336 to 383, 0.13 vllm.py 652 to 731."""
    name = "level" if isinstance(config, LevelConfig) else "mode"
    config = dataclasses.replace(config)
    if getattr(config, name) is None:
        setattr(config, name, 0 if enforce_eager else 3)
    if config.cudagraph_mode is None:
        config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE if getattr(config, name) == 3 else CUDAGraphMode.NONE
    if config.cudagraph_mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
        assert getattr(config, name) == 3, "Compilation level should be CompilationLevel.PIECEWISE"  # 0.11.0: 474
    if enforce_eager:
        config.cudagraph_mode = CUDAGraphMode.NONE
    return Plain(model_config=Plain(enforce_eager=enforce_eager), compilation_config=config)


class Decorated(torch.nn.Module):
    """A class under ``support_torch_compile`` (0.11.0 compilation/decorators.py: 206)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        mode = getattr(config, "mode", None) if hasattr(config, "mode") else config.level
        self.do_not_compile = mode in (0, 1)
        self.linear = torch.nn.Linear(2, 2)


@dataclasses.dataclass
class EngineArgs:
    compilation_config: Any
    enforce_eager: bool = False

    def create_engine_config(self) -> Any:
        return decides(self.compilation_config, self.enforce_eager)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """EngineArgs as the plugin leaves them."""

    class Args(EngineArgs):
        create_engine_config = EngineArgs.create_engine_config

    module = ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = Args  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    monkeypatch.setattr(plugin, "_patched", set())
    plugin._patch_engine_args()
    return Args


ASKED = [
    LevelConfig(), LevelConfig(level=3), LevelConfig(level=1),
    LevelConfig(level=3, cudagraph_mode=CUDAGraphMode.PIECEWISE), LevelConfig(cudagraph_mode=CUDAGraphMode.FULL),
    ModeConfig(), ModeConfig(mode=CompilationMode.VLLM_COMPILE),
    ModeConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE, cudagraph_mode=CUDAGraphMode.FULL),
]  # fmt: skip


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_an_engine_is_eager_whatever_its_arguments_say(arguments: type[EngineArgs], asked: Any, eager: bool) -> None:
    from vllm_accprobe.capture.vllm.vllm_compat import compiles

    before = dataclasses.replace(asked)
    built = arguments(asked, eager).create_engine_config()
    model = Decorated(built.compilation_config)
    assert model.do_not_compile
    assert not compiles(built, model)
    config = built.compilation_config
    assert (config.cudagraph_mode, built.model_config.enforce_eager) == (CUDAGraphMode.NONE, True)
    assert not (config.level if isinstance(config, LevelConfig) else config.mode)
    assert asked == before  # its owner may build another engine with it


def test_what_is_changed_is_said(arguments: type[EngineArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(plugin, "_say", lines.append)
    arguments(ModeConfig(mode=CompilationMode.VLLM_COMPILE), True).create_engine_config()
    arguments(ModeConfig(), True).create_engine_config()
    (line,) = lines
    assert "mode VLLM_COMPILE" in line


@pytest.mark.parametrize(
    ("config", "enforced", "compiled"),
    [
        (LevelConfig(level=3), True, True),  # nobody's patch has been there
        (LevelConfig(level=1), True, True),  # the runner compiles the whole model later, and says so nowhere
        (LevelConfig(), True, False),
        (LevelConfig(), False, True),
        (LevelConfig(level=0, cudagraph_mode=CUDAGraphMode.FULL), False, True),
        (ModeConfig(mode=CompilationMode.VLLM_COMPILE), True, True),
        (ModeConfig(mode=CompilationMode.NONE), False, False),
    ],
    ids=str,
)
def test_what_the_engine_is_stands_in_its_modules(config: Any, enforced: bool, compiled: bool) -> None:
    from vllm_accprobe.capture.vllm.vllm_compat import compiles, facts

    built = decides(config, enforced)
    model = Decorated(built.compilation_config)
    assert compiles(built, model) is compiled
    said = facts(built, model)
    assert (said["eager"], said["enforce_eager"]) == (not compiled, enforced)


def test_a_model_compiled_by_itself_is_compiled() -> None:
    from vllm_accprobe.capture.vllm.vllm_compat import compiled_modules, compiles

    built = decides(ModeConfig(), True)
    model = Decorated(built.compilation_config)
    assert compiled_modules(model) == []
    model.linear.compile(backend="eager")
    assert compiled_modules(model) == ["linear"]
    assert compiles(built, model)
