"""Commands of other tools, typed behind our name: one line says which of ours is meant.

The problem: whoever types ``accprobe acc_check -api_info ./dump.json`` reads "No such command", though the command is
there under another name and takes the very options. The idea: a table of the first words, and the line that would do.
Not here: options (told.py, old_spellings.py); the whole list with all differences (docs/migration.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_accprobe.cli.spelling.refusal import CommandError

_CHECK = "accprobe opcheck, with the same options"
OTHERS: dict[tuple[str, ...], str] = {
    ("acc_check",): _CHECK,
    ("multi_acc_check",): _CHECK,
    ("run_ut",): _CHECK,
    ("multi_run_ut",): _CHECK,
    ("api_precision_compare",): "accprobe opdiff -npu FILE -gpu FILE",
    ("jprof",): "accprobe gentest DUMP, with the same options",
    ("summary_diff_check",): "accprobe opdiff GPU.csv XPU.csv RESULT.csv: golden first",
    ("llm", "dump"): "accprobe run --exec COMMAND, with the same options",
    ("llm", "compare"): "accprobe compare --golden-path GOLDEN --my-path MINE",
    ("llm", "opcheck"): "accprobe opcheck -i DIR -c CSV -o OUT",
    ("llm", "errcheck"): "accprobe errcheck --exec COMMAND, with the same options",
    ("debug", "compare"): "accprobe labels --exec COMMAND",
}
"""The first words → what is typed here."""


def refuse_others(words: Sequence[str]) -> None:
    """Raises CommandError where ``words`` begin with another tool's command (msprobe's ``-f pytorch`` before it)."""
    own = tuple(words[2:] if words[:1] in (["-f"], ["--framework"]) else words)
    for names, ours in OTHERS.items():
        if own[: len(names)] == names:
            raise CommandError(f"{' '.join(names)} is here: {ours} (docs/migration.md)")
