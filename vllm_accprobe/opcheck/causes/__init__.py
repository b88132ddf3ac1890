"""Why an operator is wrong: edits of its call under which the reference gives mine's output (docs/opcheck.md, Causes).
"""
