"""A comparison in a notebook: a data frame, a figure, and a few lines of HTML.

The problem: who explores a comparison wants its numbers in the tools of a notebook. The idea: three functions behind
the methods of ``Comparison``; pandas and plotly are imported when they are called; the HTML has no script.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.result import COLUMNS, Pair
from vllm_accprobe.report import facts, verdict_parts
from vllm_accprobe.report.charts import depth
from vllm_accprobe.report.html.sections import command_lines as _command, escaped
from vllm_accprobe.report.text import num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

_INTEGERS = tuple(f.name for f in fields(Pair) if str(f.type) in ("int", "int | None"))
_FLOATS = tuple(f.name for f in fields(Pair) if str(f.type) == "float | None" and f.name in COLUMNS)
COLOURS = {"prefill": "#1d5fbf", "decode": "#b25a00", "other": "#5b4a9e"}


def _imported(module: str, method: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{method}: {e}: pip install 'vllm-accprobe[notebook]'", name=e.name) from None


def to_pandas(comparison: Comparison) -> Any:
    """A pandas.DataFrame. Raises ModuleNotFoundError without pandas, the extra ``notebook``."""
    pd = _imported("pandas", "to_pandas")
    frame = pd.DataFrame({name: list(comparison.table.column(name)) for name in COLUMNS}, columns=COLUMNS)
    kinds = dict.fromkeys(_INTEGERS, "Int64") | dict.fromkeys(_FLOATS, "float64")
    return frame.astype(kinds)


def plot_depth(comparison: Comparison) -> Any:
    """A plotly.graph_objects.Figure over the taps in data-flow order: what each created over its own limit, with the
    origins' numbers, and behind it what its outputs are off by in all, prefill and decode apart; 1 is every tap's
    limit. What is 0, which a logarithmic axis cannot show, or has no number, is left out. Raises ModuleNotFoundError
    without plotly, the extra ``notebook``."""
    go = _imported("plotly.graph_objects", "plot_depth")
    points = depth(comparison)
    at = list(range(len(points)))
    # Plotly reads some markup in texts.
    names = [escaped(f"{p.tap} ({p.cls})" if p.cls else p.tap) for p in points]
    figure = go.Figure()

    def add(label: str, values: list[float | None], colour: str, **how: Any) -> None:
        if any(v is not None for v in values):
            figure.add_scatter(x=at, y=values, name=label, text=names, line={"color": colour, "width": 1},
                               hovertemplate="%{text}<br>%{y:.3g}x<extra>" + label + "</extra>", **how)  # fmt: skip

    for phase, colour in COLOURS.items():
        label = "no phase" if phase == "other" else phase
        add(label, [getattr(p, phase) or None for p in points], colour, mode="lines")
    add("created", [p.created or None for p in points], "#191b1d", mode="markers")
    if points:
        figure.add_hline(y=1.0, line={"color": "#6b7178", "dash": "dash", "width": 1})
    for i, p in enumerate(points):
        if p.origin is not None:
            text = "culprit" if p.origin == 1 else f"origin {p.origin}"
            figure.add_vline(x=i, line={"color": "#b3261e", "width": 1}, annotation_text=text)
    figure.update_layout(
        title=escaped(facts.headline(comparison), 160), xaxis_title="data flow", template="simple_white"
    )
    figure.update_yaxes(type="log", title="over its own limit")
    return figure


def repr_html(comparison: Comparison) -> str:
    colour = "#17703f" if comparison.verdict == "pass" else "#b3261e"
    out = [f'<div><p><strong style="color:{colour}">{escaped(facts.headline(comparison), 1000)}</strong></p>']
    out += [f"<p>note: {escaped(note, 1000)}</p>" for note in comparison.notes[:5]]
    for i, o in enumerate(comparison.origins[1:5], 2):
        out.append(
            f"<p>origin {i}: {escaped(facts.origin_title(o))}: {escaped(facts.origin_detail(comparison, o), 1000)}</p>"
        )
    for o in comparison.origins[:1]:
        sentence = (
            ("", facts.sentence(o), 400),
            ("shape of the error: ", facts.shape(o), 400),
            ("in compiled and captured graphs: ", facts.graph(o), 400),
            ("gap: ", facts.inside(comparison, o), 1000),
        )
        out += [f"<p>{label}{escaped(text, limit)}</p>" for label, text, limit in sentence if text]
    for step in comparison.would_decide[:3]:
        out.append(f"<p>{escaped(step['why'])}:</p><pre>{_command(step['command'])}</pre>")
    if habits := verdict_parts.machine_lines(comparison.machines):
        items = "".join(f"<li>{escaped(line)}</li>" for line in habits[:8])
        out.append(f"<p>{verdict_parts.MACHINES_TITLE}:</p><ul>{items}</ul>")
    rows = []
    for cause in facts.causes(comparison)[:10]:
        p = cause.worst
        measure, value, limit = facts.decided(p)
        cells = (p.tap, p.role, facts.step_of(p), measure, num(value, 4), num(limit), facts.over(p), cause.like)
        rows.append("<tr>" + "".join(f"<td>{escaped(c)}</td>" for c in cells) + "</tr>")
    if rows:
        head = "".join(f"<th>{h}</th>" for h in ("tap", "tensor", "step", "measure", "value", "limit", "× limit", ""))
        out.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    for step in comparison.next_steps:
        out.append(f"<p>next, {escaped(step['why'])}:</p><pre>{_command(step['command'])}</pre>")
    coverage = "; ".join(f"{label}: {value}" for label, value in facts.coverage_rows(comparison)[:5])
    return "".join(out) + f"<p><small>{escaped(safe(coverage, 400), 400)}</small></p></div>"
