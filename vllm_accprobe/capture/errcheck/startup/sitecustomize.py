"""Run by every Python of a command under errcheck, at its start: torch is watched once somebody imports it.

The problem: a plain script knows nothing of accprobe, and `bash x.sh` starts Python where nobody can reach in. The
idea: this folder stands first in PYTHONPATH, and Python imports ``sitecustomize`` by itself. It takes its folder off
the path again, runs the sitecustomize that would have been found without it, and waits for ``torch.nn.modules.module``
to be imported: a process without torch pays for nothing. Whatever goes wrong here is a line, and the script runs as it
would.
Not here: the watch (plain_script.py).
"""

import os
import sys
from importlib import machinery, util

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = "torch.nn.modules.module"


class _WhenImported:
    """Finds torch's module as it would be found, and watches once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                _watch(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def _watch(module):
    """Heavy imports wait for the first call of a module: torch itself is still being imported."""
    original = module.Module.__call__

    def first(self, *args, **kwargs):
        if sys.modules["torch"].compiler.is_compiling():
            return original(self, *args, **kwargs)
        module.Module.__call__ = original
        try:
            if "vllm_accprobe" not in sys.modules and util.find_spec("vllm_accprobe") is None:
                sys.path.append(os.path.abspath(os.path.join(_HERE, *[os.pardir] * 4)))
            from vllm_accprobe.capture.errcheck import plain_script

            plain_script.from_environment()
        except Exception as error:
            print(f"accprobe: errcheck cannot watch this script ({type(error).__name__}: {error})", file=sys.stderr)
        return module.Module.__call__(self, *args, **kwargs)

    setattr(first, "__accprobe_original__", original)  # noqa: B010
    module.Module.__call__ = first


def _next():
    """The sitecustomize that this one stands before."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("VLLM_ACCPROBE_ERRCHECK", "") not in ("", "0"):
    sys.meta_path.insert(0, _WhenImported())
_next()
