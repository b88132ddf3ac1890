"""The names that users import stay what they are, whatever else has been imported."""

import pkgutil
import subprocess
import sys

import vllm_accprobe


def test_no_public_name_is_a_submodule() -> None:
    """Importing a submodule puts it into its package, over a function of the same name."""
    modules = {m.name for m in pkgutil.iter_modules(vllm_accprobe.__path__)}
    assert modules & set(vllm_accprobe.__all__) == set()


def test_compare_is_a_function_each_time() -> None:
    code = (
        "import vllm_accprobe\n"
        "from vllm_accprobe import compare\n"
        "import vllm_accprobe.comparison.engine, vllm_accprobe.cli.compare\n"
        "assert callable(compare) and compare is vllm_accprobe.compare\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        vllm_accprobe.compare('no-such-dump', 'nor-this')\n"
        "    except Exception as error:\n"
        "        assert 'no-such-dump' in str(error), error\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
