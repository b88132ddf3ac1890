"""The table of all references and device kernels that there are: ours, and those of other packages.

The problem: the families need what a reference is (reference.py), and whoever checks a call needs all families; one
file that knew both would be a circle. The idea: this module stands above both, and whoever wants the table asks here.
Not here: what a reference is (reference.py), how a name finds it (reference_table.py), references (references/: a new
one goes there).
"""

from __future__ import annotations

from vllm_accprobe import extensions
from vllm_accprobe.opcheck import references
from vllm_accprobe.opcheck.reference_table import References


def default_references() -> References:
    """Ours, then those of installed packages (extensions.py; an entry point names a module, or one marked function);
    what cannot be used is a sentence in ``problems``."""
    table = References(references.families())
    for extension in extensions.added(extensions.REFERENCES, table.problems):
        try:
            table.add(extension.what)
        except ValueError as error:
            table.problems.append(extensions.unusable("references", extension.name, error))
    return table
