"""``accprobe inspect PATH``: what there is at a path, as tables for the eye, csv or JSON.

A dump's tensors and operators, one of its taps in detail, or a request's prompt (inspect_dump.py); of another tool's
dump, which format it is, too. With --size how large a capture of a model will be; with --repair a dump that a killed
run left behind is finished first. Not here: two dumps (compare.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import options
from vllm_accprobe.cli.options import SelectionOptions, argument, option
from vllm_accprobe.cli.output import answer, answered, report, say_notes, show
from vllm_accprobe.refusals import CommandError, NothingThere


@dataclass(frozen=True)
class InspectOptions:
    """What is inspected."""

    path: Path | None = argument("[DUMP|FILE|MODEL_DIR]", "A dump of any format, a file of one, a model's folder.",
                                 None)  # fmt: skip
    names: list[str] = argument("[TAP|GLOB]...", "One TAP, or tap/role#call as in compare.csv: in detail. Or globs "
                                "over taps, e.g. '*.mlp.*'; '!...' excludes: a list. FILE.txt, FILE.csv: the list "
                                "goes there.", [])  # fmt: skip
    formats: bool = option("--formats", False, "List the formats that can be read, or only name PATH's.")
    repair: bool = option("--repair", False, "Finish the files that a killed run left behind.")
    as_json: bool = options.as_json()


@dataclass(frozen=True)
class ListOptions:
    """Of the list of tensors."""

    csv: Path | None = option("--csv", None, "Write a csv there: all chosen tensors, in full precision.",
                              metavar="FILE")  # fmt: skip
    limit: int | None = option("--limit", None, "At most this many; 0: all. Default: 200 rows, in json all.", min=0,
                               metavar="N")  # fmt: skip
    ops: bool = option("--ops", False, "Operators only: calls, shapes, ranges.")
    tree: bool = option("--tree", False, "The model's modules as a tree, with shapes; also ATB's topology.")
    level: int | None = options.level()


@dataclass(frozen=True)
class TensorOptions:
    """Of one tap, or of a prompt."""

    calls: str = option("--calls", "", "Ordinals of the tap's calls within a step.", metavar="RANGES")
    rows: str = option("--rows", "", "Rows to print or save, e.g. 0,5-9.", metavar="RANGES")
    positions: str = option("--positions", "", "Positions within the request, e.g. 0-3.", metavar="RANGES")
    save: Path | None = option("--save", None, "Save the tensor, or its rows: .npy, .safetensors.", metavar="FILE")
    prompt: bool = option("--prompt", False, "No tensor, but the prompt of the request that --requests names: its "
                          "token ids.")  # fmt: skip
    tokenizer: Path | None = options.tokenizer()


@dataclass(frozen=True)
class SizeOptions:
    """How large a capture will be."""

    size: bool = option("--size", False, "PATH is a model's folder or config.json: how large will a capture of it be?")
    tokens: int | None = option("--tokens", None, "With --size: of prompts and answers together. Default: 1000.", min=1,
                                metavar="N")  # fmt: skip
    answers: int | None = option("--answers", None, "With --size: how many of these are sampled. Default: 16.", min=0,
                                 metavar="N")  # fmt: skip
    modules: str | None = options.modules()
    preset: str | None = option("--preset", None, "With --size, as VLLM_ACCPROBE_PRESET: its modules.", metavar="NAME")
    tp: int | None = option("--tp", None, "With --size: ranks of tensor parallelism. Default: 1.", min=1, metavar="N")


def inspect(
    what: InspectOptions,
    chosen: SelectionOptions,
    of_list: ListOptions,
    of_tensor: TensorOptions,
    of_size: SizeOptions,
    name: str = "inspect",
) -> None:
    """List a dump's tensors, or show one; name the format of a path; compute the size of a capture.

    inspect DUMP lists the tensors with their statistics, and the operators that were called. Of our own dumps no
    payload is read, so this is quick on any. Of another tool's, the format is printed first, and what is listed without
    statistics is read to compute them. Operators' tensors are listed where a GLOB has '::'.
    Of another tool's results, or a run of an evaluation, it says what is in them.
    inspect DUMP TAP shows one tensor: statistics, histogram, chosen rows; --save keeps it.
    inspect MODEL_DIR --size is exact for Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and
    V3. Another decoder is counted by what its config.json has in common with these. Parameters come on top where they
    fit a quarter of the budget.

    Exit code 0: done, 2: no dump or unreadable, 3: nothing matches, or nothing was recorded.
    """
    kind, opened = _kind(name, what, of_list, of_tensor, of_size)
    path, names = what.path, what.names
    if kind == "size":
        options.refuse("--size", chosen, of_list, of_tensor)
        _size(_needed(path, "MODEL_DIR"), of_size, what.as_json)
        return
    if kind in ("formats", "repair"):
        options.refuse(f"--{kind}", of_size, chosen, of_list, of_tensor)
        if names:
            raise CommandError(f"--{kind} takes one path: leave {names[0]} out")
        run: Any = partial(_formats, path) if kind == "formats" else partial(_repair, path)
    elif kind == "show":
        from vllm_accprobe.cli.inspect_dump import show_tap

        options.refuse("one TAP", of_size, of_list)
        if len(names) > 1:
            raise CommandError(f"one TAP is shown in detail, and {len(names)} are named")
        tap = names[0] if names else ""
        run = partial(show_tap, _needed(path, "DUMP"), opened, tap, chosen, of_tensor)
    else:
        from vllm_accprobe.cli.inspect_dump import summary

        options.refuse("a list of tensors", of_size, of_tensor)
        dump = _needed(path, "DUMP")
        brought = not names and not any(options.used(group) for group in (chosen, of_list)) and _brought(dump)
        listed = partial(summary, dump, opened, names, chosen, of_list, named=name == "inspect")
        run = brought or listed
    answered(name, what.as_json, run)


def _kind(
    name: str, what: InspectOptions, of_list: ListOptions, of_tensor: TensorOptions, of_size: SizeOptions
) -> tuple[str, Any]:
    """(formats, repair, size, show or summary; the dump where it was opened for that). name: of the command that was
    typed, of which the older ones say it."""
    if name != "inspect":
        return name, None
    for kind, selected in (("formats", what.formats), ("repair", what.repair), ("size", of_size.size)):
        if selected:
            return kind, None
    if options.used(of_tensor):
        return "show", None
    if len(what.names) != 1 or options.used(of_list) or what.path is None:
        return "summary", None
    from vllm_accprobe.cli.inspect_dump import is_tap
    from vllm_accprobe.formats import open_dump

    opened = open_dump(what.path)
    return ("show" if is_tap(opened, what.names[0]) else "summary"), opened


def _brought(path: Path) -> Any:
    """What shows another tool's results, or a run of an evaluation; None for a dump and what is unknown."""
    from vllm_accprobe.cli import compare_other
    from vllm_accprobe.formats import DumpError
    from vllm_accprobe.formats.common import result_tables, sniff

    if result_tables.kind_of(result_tables.header_of(path)):
        return lambda: compare_other.show_results(path)
    try:
        sniff.find(path)
    except DumpError:
        return lambda: compare_other.show_evaluation(path) or sniff.find(path)
    return None


def _needed(path: Path | None, word: str) -> Path:
    if path is None:
        raise CommandError(f"{word} is missing: name a path; accprobe inspect --help says more")
    return path


def _formats(path: Path | None) -> None:
    """The formats of dumps that can be read, or which one ``path`` is of (formats/common/sniff.py)."""
    from vllm_accprobe.formats.common import sniff

    if path is not None:
        _, found, notes = sniff.find(path)
        typer.echo(sniff.OWN if found is None else found.name)
        answer(path=path, format=sniff.OWN if found is None else found.name)
        say_notes(notes)
        return
    problems: list[str] = []
    known = sniff.formats(problems)
    rows = [(sniff.OWN, sniff.OWN_HOW), *((f.name, f.how + (f" ({f.package})" if f.package else "")) for f in known)]
    answer(formats=[{"name": name, "recognised_by": how} for name, how in rows])
    width = max(len(name) for name, _ in rows)
    show(f"{name:<{width}}  {how}" for name, how in rows)
    say_notes(problems)


def _repair(dump: Path | None) -> None:
    """Finishes what a killed run left (dump/repair.py)."""
    from vllm_accprobe.dump.repair import repair
    from vllm_accprobe.formats.common.sniff import own
    from vllm_accprobe.report.text import count

    place, note = own(_needed(dump, "DUMP"))
    say_notes([note] if note else [])
    done = repair(place)
    answer(dump=place, ranks=done)
    for r in done:
        extra = [f"{count(r.segments, 'segment file')} finished"]
        extra += [f"{r.cut} bytes of a torn line cut off"] if r.cut else []
        extra += [f"{count(r.dropped, 'segment file')} without a whole tensor removed"] if r.dropped else []
        what = f"{r.tensors} tensors readable; {', '.join(extra)}"
        if not r.needed:
            what = f"closed in order, {'nothing can be brought back' if r.lost else 'nothing to do'}"
        show([f"rank {r.rank}: {what}", *r.lost])
    if not done:
        raise NothingThere(f"{place}: no rank has written anything")


def _size(model: Path, of_size: SizeOptions, as_json: bool) -> None:
    """How large a capture will be (run/dump_size.py)."""
    from vllm_accprobe.config import ConfigError, ProbeConfig, words_choose
    from vllm_accprobe.run import dump_size

    tokens, tp = of_size.tokens or 1000, of_size.tp or 1
    answers = 16 if of_size.answers is None else of_size.answers
    settings = {name: value for name, value in (("modules", of_size.modules), ("preset", of_size.preset)) if value}
    try:
        words = ProbeConfig.from_kwargs(**settings)
    except ConfigError as why:
        raise CommandError(f"--{why}") from None
    try:
        config, width = dump_size.read_config(model)
        chooses = (lambda path, cls: words_choose(words.modules, path, path, cls)) if words.modules_left else None
        token, logits = dump_size.per_token(config, tp, width, chooses, words.parts)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as why:
        what = f"no {why} in it" if isinstance(why, KeyError) else "its numbers are no decoder's"
        raise CommandError(f"{model}: {what}; capture one token, and accprobe inspect says its size") from None
    total = token * tokens + logits * answers
    if not total:
        raise CommandError("--modules: no module of a decoder is chosen")
    kind = str(config.get("model_type"))
    known = kind in dump_size.MEASURED
    fields = {"schema": 1, "bytes_per_token": token, "bytes_per_logits": logits, "tokens": tokens, "bytes": total,
              "ranks": tp, "bytes_per_rank": total // tp, "model_type": kind, "exact": known}  # fmt: skip
    on, each, budget = f"{tp} rank{'s' * (tp > 1)}", total / tp / 1e9, words.max_gb
    ends = "" if each <= budget else ": capture ends before all of it is there"
    lines = [
        f"{token / 1e6:.3g} MB for a token on {on}, {logits / 1e6:.3g} MB of logits for each that is sampled",
        f"{total / 1e9:.3g} GB for {tokens:,} tokens, {answers:,} of them sampled; parameters come on top",
        f"{each:.3g} GB a rank; its budget is {budget:g} (VLLM_ACCPROBE_MAX_GB){ends}",
        f"note: {kind} was not compared with a capture; it is counted as a decoder of the kinds that were",
    ]
    report(as_json, fields, lines[: 3 if known else 4], indent=None)
