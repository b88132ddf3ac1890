// How far each tap is over its own limit, against depth, drawn by plotly.js: the dashed line at 1 is every tap's limit.
// Marks are what a tap created, with origins by their numbers; the thin lines behind are what its outputs are off by in
// all. Where there is no room for each tap, a layer is one mark, its worst; zoomed in, its taps are.
(function () {
  "use strict";
  const a = window.accprobe, escaped = a.escaped;
  const ROOM = 5, LOWEST = -4;        // pixels of a mark; the decade below which nothing is told apart
  a.parts.chart = function (data) {
  const chart = document.getElementById("chart"), readout = document.getElementById("chart-readout");
  const points = data.points;
  if (!points.length) return;

  const PHASES = [["prefill", "prefill"], ["decode", "decode"], ["other", "no phase"]].filter(([id]) => points.some((p) => p[id] !== null));
  const most = (xs) => xs.reduce((m, x) => (x === null || (m !== null && m >= x) ? m : x), null);
  const one = (p, i) => ({ ...p, x: i, first: i, last: i, name: p.tap, worst: p, origins: p.origin === null ? [] : [p.origin] });
  const singles = points.map(one);
  const height = (m) => (m.nonfinite ? Infinity : Math.max(m.created ?? 0, ...PHASES.map(([id]) => m[id] ?? 0)));
  function layer(group) {             // many taps as one mark
    if (group.length === 1) return group[0];
    const worst = group.reduce((w, m) => ((m.origins.length > 0) - (w.origins.length > 0) || height(m) - height(w)) > 0 ? m : w);
    const own = group.filter((m) => m.origins.length), made = (own.length ? own : group).map((m) => m.created);
    const sum = (id) => group.reduce((n, m) => n + m[id], 0);
    return {
      x: worst.x, first: group[0].x, last: group.at(-1).x, name: worst.layer, layer: worst.layer, cls: "", worst: worst.worst,
      created: own.length && made.includes(null) ? null : most(made), ...Object.fromEntries(PHASES.map(([id]) => [id, most(group.map((m) => m[id]))])),
      origins: group.flatMap((m) => m.origins), pairs: sum("pairs"), failed: sum("failed"), nonfinite: sum("nonfinite"),
    };
  }
  function byLayer() {
    const groups = [], known = new Map();
    for (const m of singles) {
      const key = m.layer ?? "tap " + m.first;
      if (!known.has(key)) { known.set(key, groups.length); groups.push([]); }
      groups[known.get(key)].push(m);
    }
    return groups.map(layer).sort((p, q) => p.x - q.x);
  }
  const layers = byLayer(), WHOLE = [-0.5, points.length - 0.5];
  const state = { range: WHOLE, marks: [], at: 0 };
  function seen() {
    const [from, to] = state.range, inside = singles.filter((m) => m.x >= from && m.x <= to);
    return inside.length * ROOM <= Math.max(300, chart.clientWidth) || layers.length === points.length ? singles : layers;
  }

  const finite = points.flatMap((p) => [p.created, p.prefill, p.decode, p.other]).filter((x) => x > 0);
  const low = Math.max(LOWEST, Math.floor(Math.log10(finite.reduce((m, x) => Math.min(m, x), 0.1)))) - 0.6;
  const high = Math.log10(finite.reduce((m, x) => Math.max(m, x), 1)) + 0.55;
  const ZERO = 10 ** (low + 0.25), TOP = 10 ** (high - 0.14);
  const y = (x) => (x === null ? null : x === 0 ? ZERO : Math.max(x, 10 ** (low + 0.6)));

  function describe(m) {
    const parts = [];
    if (m.origins.length) parts.push(m.origins.map((n) => "origin " + n).join(", "));
    if (m.created !== null) parts.push("created " + a.times(m.created));
    for (const [id, name] of PHASES) if (m[id] !== null) parts.push("off by " + a.times(m[id]) + " in " + (id === "other" ? "all" : name));
    if (m.nonfinite) parts.push(m.nonfinite + " without a number: NaN/Inf, or values that must be equal");
    if (m.failed) parts.push(m.failed + " of " + m.pairs + " pairs failed");
    if (m.first !== m.last) parts.push("worst " + m.worst.tap);
    return parts;
  }
  const hover = (m) => "<b>" + escaped(m.name) + "</b><br>" + (m.cls ? escaped(m.cls) + "<br>" : "") + describe(m).map(escaped).join("<br>");

  function ticks() {                  // first point of each layer: a tick, a change of shade
    const out = [];
    let last = null;
    points.forEach((p, i) => {
      if (p.layer !== last) {
        last = p.layer;
        if (p.layer !== null || out.length) out.push({ i, layer: p.layer });
      }
    });
    return out;
  }

  function draw() {
    const marks = state.marks = seen(), x = marks.map((m) => m.x), text = marks.map(hover);
    state.at = Math.min(state.at, marks.length - 1);
    const traces = PHASES.map(([id, name]) => ({
      type: "scatter", mode: "lines", name, x, y: marks.map((m) => y(m[id])), hovertext: text, hoverinfo: "text", connectgaps: true,
      line: { color: a.css(id), width: 1 }, opacity: 0.7,
    }));
    const made = marks.filter((m) => m.created !== null && !m.origins.length);
    if (made.length) {
      traces.push({
        type: "scatter", mode: "markers", name: "created", x: made.map((m) => m.x), y: made.map((m) => y(m.created)), hovertext: made.map(hover), hoverinfo: "text",
        marker: { symbol: "circle", size: marks.length > 300 ? 3 : 5, color: a.css("ink"), opacity: 0.75 },
      });
    }
    traces.push({ type: "scatter", mode: "lines", name: "limit", x: WHOLE, y: [1, 1], hoverinfo: "skip", line: { color: a.css("limit"), width: 1.25, dash: "dash" } });
    const broken = marks.filter((m) => m.nonfinite && !m.origins.length);
    if (broken.length) {
      traces.push({
        type: "scatter", mode: "markers", name: "NaN/Inf, or must be equal", x: broken.map((m) => m.x), y: broken.map(() => TOP), hovertext: broken.map(hover), hoverinfo: "text",
        marker: { symbol: "x", size: 8, color: a.css("fail") },
      });
    }
    const blamed = marks.filter((m) => m.origins.length);
    if (blamed.length) {
      traces.push({
        type: "scatter", mode: "markers+text", name: "origins", x: blamed.map((m) => m.x), y: blamed.map((m) => (m.created === null ? TOP : y(m.created))), hovertext: blamed.map(hover), hoverinfo: "text",
        text: blamed.map((m) => m.origins[0] + (m.origins.length > 1 ? "+" : "")), textfont: { family: a.css("sans"), size: 11, color: a.css("panel") }, textposition: "middle center",
        marker: { symbol: "circle", size: 17, color: a.css("fail"), opacity: 1, line: { width: 0 } },
      });
    }
    const shades = ticks(), shapes = [], annotations = [];
    shades.forEach((m, k) => {
      const end = k + 1 < shades.length ? shades[k + 1].i : points.length;
      if (m.layer !== null && k % 2 === 0) shapes.push({ type: "rect", layer: "below", xref: "x", yref: "paper", x0: m.i - 0.5, x1: end - 0.5, y0: 0, y1: 1, line: { width: 0 }, fillcolor: a.css("soft"), opacity: 0.6 });
    });
    const [from, to] = state.range, culprit = points.findIndex((p) => p.origin === 1);
    if (culprit >= from && culprit <= to) {
      const name = points[culprit].tap, label = name.length > 44 ? "…" + name.slice(-43) : name, part = (culprit - from) / (to - from);
      const right = part > 0.6 || (1 - part) * (chart.clientWidth - 90) < label.length * 7 + 60;
      const x0 = marks === layers ? blamed.find((m) => m.origins.includes(1)).x : culprit;
      shapes.push({ type: "line", layer: "below", xref: "x", yref: "paper", x0, x1: x0, y0: 0, y1: 1, line: { color: a.css("fail"), width: 1.25 } });
      annotations.push({ x: x0, xref: "x", y: 1, yref: "paper", yanchor: "bottom", xanchor: right ? "right" : "left", showarrow: false,
        text: "culprit  " + escaped(label), font: { color: a.css("fail"), size: 12 }, borderpad: 2, xshift: right ? 6 : -6 });
    }
    const named = shades.filter((m) => m.layer !== null && m.i >= from && m.i <= to), every = Math.max(1, Math.ceil(named.length / Math.max(4, chart.clientWidth / 42)));
    const labelled = named.filter((_, k) => k % every === 0);
    const decades = [];
    for (let e = Math.ceil(low + 0.4); e <= high; e++) decades.push(e);
    const step = Math.max(1, Math.ceil(decades.length / 7)), main = decades.filter((e) => e % step === 0);
    const font = { family: a.css("sans"), size: 12, color: a.css("dim") };
    const axis = { gridcolor: a.css("line"), zeroline: false, linecolor: a.css("line"), tickfont: font, title: { font } };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, margin: { l: 74, r: 16, t: 52, b: 40 }, hovermode: "closest",
      hoverlabel: { bgcolor: a.css("panel"), bordercolor: a.css("limit"), align: "left", font: { family: a.css("mono"), size: 12, color: a.css("ink") } },
      legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.065, yanchor: "bottom", font: { ...font, color: a.css("ink") } }, dragmode: "zoom", shapes, annotations, autosize: true,
      xaxis: { ...axis, showgrid: false, range: [...state.range], tickvals: labelled.map((m) => m.i), ticktext: labelled.map((m) => escaped(m.layer.split(".").at(-1))), tickangle: 0,
        title: { text: named.length ? "layer" : "data flow", font, standoff: 6 } },
      yaxis: { ...axis, type: "log", range: [low, high], fixedrange: true, tickvals: [ZERO, ...main.map((e) => 10 ** e)], ticktext: ["0", ...main.map((e) => (e >= 0 && e < 5 ? 10 ** e + "×" : e === -1 ? "0.1×" : e === -2 ? "0.01×" : "1e" + e + "×"))],
        title: { text: "over its own limit", font, standoff: 4 } },
    };
    const config = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: false };
    chart.dataset.marks = marks === layers ? "layers" : "taps";
    return window.Plotly.react(chart, traces, layout, config);
  }

  function zoom(range) {
    const from = range && Math.max(WHOLE[0], Math.min(...range)), to = range && Math.min(WHOLE[1], Math.max(...range));
    const kept = state.marks[state.at];
    state.range = range && to > from ? [from, to] : WHOLE;
    const next = seen(), inside = next.findIndex((m) => m.last >= kept.x && m.first <= kept.x);
    state.at = Math.max(0, inside);
    return draw();
  }
  function tell(k) {
    state.at = Math.max(0, Math.min(state.marks.length - 1, k));
    const m = state.marks[state.at];
    readout.textContent = m.name + (m.cls ? " (" + m.cls + ")" : "") + ": " + describe(m).join(", ");
  }
  function enter() {                  // a layer opens into its taps, a tap shows its pairs
    const m = state.marks[state.at];
    if (m.first === m.last) a.showTap(m.name, { scroll: true });
    else zoom([m.first - 0.5, m.last + 0.5]).then(() => tell(state.at));
  }
  chart.addEventListener("keydown", (e) => {
    const to = { ArrowRight: state.at + 1, ArrowLeft: state.at - 1, Home: 0, End: state.marks.length - 1 }[e.key];
    if (to !== undefined) {
      tell(to);
      const m = state.marks[state.at], curve = PHASES.findIndex(([id]) => m[id] !== null);
      if (m.x < state.range[0] || m.x > state.range[1]) zoom([m.x - (state.range[1] - state.range[0]) / 2, m.x + (state.range[1] - state.range[0]) / 2]);
      else if (curve >= 0) window.Plotly.Fx.hover(chart, [{ curveNumber: curve, pointNumber: state.at }]);
    } else if (e.key === "Enter") enter();
    else if (e.key === "Escape" || e.key === "Backspace") zoom(null);
    else return;
    e.preventDefault();
  });
  draw().then(() => {
    state.at = Math.max(0, state.marks.findIndex((m) => m.origins.includes(1)));
    const which = (e) => state.marks.findIndex((m) => m.x === e.points[0].x);
    chart.on("plotly_hover", (e) => tell(which(e)));
    chart.on("plotly_click", (e) => { tell(which(e)); enter(); });
    chart.on("plotly_doubleclick", () => { zoom(null); });
    chart.on("plotly_relayout", (e) => { if ("xaxis.range[0]" in e) zoom([e["xaxis.range[0]"], e["xaxis.range[1]"]]); });
    chart.dataset.ready = "1";
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  a.paper.follow(draw);
  };
})();
