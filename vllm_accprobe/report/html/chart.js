// Error against depth, drawn by plotly.js. An error of 0 has no place on a logarithmic axis: it gets a line of
// its own at the bottom. The band below is the floor: what honest rounding alone would give.
(function () {
  "use strict";
  const a = window.accprobe;
  a.parts.chart = function (data) {
  const chart = document.getElementById("chart"), readout = document.getElementById("chart-readout");
  const points = data.points;
  if (!points.length) return;

  const escaped = a.escaped;
  const SERIES = [
    { id: "prefill", name: "prefill", symbol: "circle" },
    { id: "decode", name: "decode", symbol: "diamond" },
    { id: "other", name: "no phase", symbol: "square" },
  ].filter((s) => points.some((p) => p[s.id] !== null));

  const seen = [];
  for (const p of points) for (const x of [p.prefill, p.decode, p.other, p.limit, p.floor]) if (x > 0) seen.push(Math.log10(x));
  const low = (seen.length ? Math.floor(Math.min(...bounds(seen))) : -6) - 0.6;
  const high = (seen.length ? Math.max(...bounds(seen)) : 0) + 0.35;
  function bounds(xs) { return [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))]; }
  const ZERO = 10 ** (low + 0.25);
  const show = (x) => (x === null ? "–" : x === 0 ? "0" : x < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(3)));
  const over = (p, id) => p.limit !== null && p[id] !== null && p[id] > p.limit;

  function describe(p) {
    const parts = SERIES.filter((s) => p[s.id] !== null).map((s) => s.name + " " + show(p[s.id]));
    if (p.limit !== null) parts.push("limit " + show(p.limit));
    if (p.floor !== null) parts.push("floor " + show(p.floor));
    if (p.failed) parts.push(p.failed + " of " + p.pairs + " pairs failed");
    if (p.nonfinite) parts.push(p.nonfinite + " with NaN/Inf on one side");
    return parts;
  }
  const hover = points.map((p) => "<b>" + escaped(p.tap) + "</b><br>" + escaped(p.cls) + "<br>" + describe(p).map(escaped).join("<br>"));

  function layers() {               // first point of each layer: a tick, a change of shade
    const ticks = [];
    let last = null;
    points.forEach((p, i) => {
      if (p.layer !== last) {
        last = p.layer;
        const before = ticks.at(-1);
        if (p.layer !== null || before) ticks.push({ i, layer: p.layer });
      }
    });
    return ticks;
  }

  function draw() {
    const css = getComputedStyle(document.documentElement), v = (name) => css.getPropertyValue(name).trim();
    const many = points.length > 1500;
    const traces = SERIES.map((s) => ({
      type: "scatter", mode: many ? "lines" : "lines+markers", name: s.name, x: points.map((_, i) => i),
      y: points.map((p) => (p[s.id] === null ? null : p[s.id] === 0 ? ZERO : p[s.id])),
      hovertext: hover, hoverinfo: "text", connectgaps: true, line: { color: v("--" + s.id), width: 1.75 },
      marker: { symbol: s.symbol, color: v("--" + s.id), opacity: 1, size: points.map((p) => (over(p, s.id) || p.failed ? 7 : 4)),
        line: { width: 0 } },
    }));
    traces.push({
      type: "scatter", mode: "lines", name: "limit", x: points.map((_, i) => i), y: points.map((p) => (p.limit > 0 ? p.limit : null)),
      hoverinfo: "skip", connectgaps: true, line: { color: v("--limit"), width: 1.25, dash: "dash" },
    });
    if (points.some((p) => p.floor > 0)) {
      const xs = points.map((_, i) => i);
      traces.push({ type: "scatter", mode: "lines", x: xs, y: xs.map(() => 10 ** low), hoverinfo: "skip", showlegend: false, line: { width: 0 } });
      traces.push({ type: "scatter", mode: "lines", name: "floor", x: xs, y: points.map((p) => (p.floor > 0 ? p.floor : null)), hoverinfo: "skip", connectgaps: true, line: { width: 0, color: v("--floor-line") }, fill: "tonexty", fillcolor: v("--floor") });
    }
    const broken = points.map((p, i) => (p.nonfinite ? i : -1)).filter((i) => i >= 0);
    if (broken.length) {
      traces.push({
        type: "scatter", mode: "markers", name: "NaN/Inf on one side", x: broken, y: broken.map(() => 10 ** (high - 0.12)),
        hovertext: broken.map((i) => hover[i]), hoverinfo: "text", marker: { symbol: "x", size: 9, color: v("--fail") },
      });
    }
    const marks = layers(), shapes = [], annotations = [];
    marks.forEach((m, k) => {
      const end = k + 1 < marks.length ? marks[k + 1].i : points.length;
      if (m.layer !== null && k % 2 === 0) {
        shapes.push({ type: "rect", layer: "below", xref: "x", yref: "paper", x0: m.i - 0.5, x1: end - 0.5, y0: 0, y1: 1, line: { width: 0 }, fillcolor: v("--soft"), opacity: 0.6 });
      }
    });
    if (data.culprit !== null) {
      const name = points[data.culprit].tap, label = name.length > 44 ? "…" + name.slice(-43) : name;
      const room = (1 - data.culprit / points.length) * (chart.clientWidth - 90);
      const right = data.culprit > points.length * 0.6 || room < label.length * 7 + 60;
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: data.culprit, x1: data.culprit, y0: 0, y1: 1, line: { color: v("--fail"), width: 1.25 } });
      annotations.push({ x: data.culprit, xref: "x", y: 1, yref: "paper", yanchor: "bottom", xanchor: right ? "right" : "left", showarrow: false,
        text: "culprit  " + escaped(label), font: { color: v("--fail"), size: 12 }, borderpad: 2, xshift: right ? 6 : -6 });
    }
    const inLayers = marks.filter((m) => m.layer !== null), every = Math.max(1, Math.ceil(inLayers.length / 24));
    const labelled = inLayers.filter((_, k) => k % every === 0);
    const decades = [];
    for (let e = Math.ceil(low + 0.4); e <= high; e++) decades.push(e);
    const step = Math.max(1, Math.ceil(decades.length / 7)), main = decades.filter((e) => (e - decades[0]) % step === 0);
    const font = { family: v("--sans"), size: 12, color: v("--dim") };
    const axis = { gridcolor: v("--line"), zeroline: false, linecolor: v("--line"), tickfont: font, title: { font } };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, margin: { l: 74, r: 16, t: 52, b: 40 }, hovermode: "closest",
      hoverlabel: { bgcolor: v("--panel"), bordercolor: v("--limit"), align: "left", font: { family: v("--mono"), size: 12, color: v("--ink") } },
      legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.065, yanchor: "bottom", font: { ...font, color: v("--ink") } }, dragmode: "zoom", shapes, annotations, autosize: true,
      xaxis: { ...axis, showgrid: false, range: [-0.5, points.length - 0.5], tickvals: labelled.map((m) => m.i), ticktext: labelled.map((m) => escaped(m.layer.split(".").at(-1))), tickangle: 0,
        title: { text: inLayers.length ? "layer" : "data flow", font, standoff: 6 } },
      yaxis: { ...axis, type: "log", range: [low, high], tickvals: [ZERO, ...main.map((e) => 10 ** e)], ticktext: ["0", ...main.map((e) => (e === 0 ? "1" : e === -1 ? "0.1" : e === -2 ? "0.01" : "1e" + e))],
        title: { text: "relative L2", font, standoff: 4 } },
    };
    const config = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset" };
    return window.Plotly.react(chart, traces, layout, config);
  }

  let at = data.culprit === null ? 0 : data.culprit;
  function tell(i) {
    at = Math.max(0, Math.min(points.length - 1, i));
    const p = points[at];
    readout.textContent = p.tap + (p.cls ? " (" + p.cls + ")" : "") + ": " + describe(p).join(", ");
  }
  chart.addEventListener("keydown", (e) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: points.length - 1 }[e.key];
    if (to !== undefined) {
      tell(to);
      const curve = SERIES.findIndex((s) => points[at][s.id] !== null);
      if (curve >= 0) window.Plotly.Fx.hover(chart, [{ curveNumber: curve, pointNumber: at }]);
    } else if (e.key === "Enter") a.showTap(points[at].tap);
    else return;
    e.preventDefault();
  });
  draw().then(() => {
    chart.on("plotly_hover", (e) => tell(e.points[0].x));
    chart.on("plotly_click", (e) => { tell(e.points[0].x); a.showTap(points[e.points[0].x].tap); });
    chart.dataset.ready = "1";
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  a.paper.follow(draw);
  };
})();
