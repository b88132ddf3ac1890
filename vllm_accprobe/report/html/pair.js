// One pair, looked at closely: the shape of its error, its worst rows, and the values that were kept: the error over the
// golden value (a wrong scale is a tilted line, an offset a level one, noise a cloud), and how both are distributed.
(function () {
  "use strict";
  const a = window.accprobe;
  function table(entry) {
    const box = a.element("div", "worst-rows"), [total, ...rows] = entry;
    box.append(a.element("h3", "", total > rows.length ? "Worst " + rows.length + " of " + total + " rows that differ" : "Rows that differ: " + total));
    const t = box.appendChild(a.element("table")), head = t.createTHead().insertRow(), body = t.createTBody();
    ["Request", "Position", "Phase", "Row error", "× limit"].forEach((h, i) => { const th = a.element("th", i > 0 && i !== 2 ? "num" : "", h); th.scope = "col"; head.append(th); });
    for (const [request, position, phase, error, ratio] of rows) {
      const tr = body.insertRow();
      if (typeof ratio !== "number" || ratio > 1) tr.className = "bad";
      [request, position, phase, a.number(error, 3), typeof ratio === "number" ? a.number(ratio, 3) : "∞"].forEach((x, i) => tr.append(a.element("td", i > 0 && i !== 2 ? "num" : "", String(x))));
    }
    box.append(a.element("p", "hint", "Row error: the largest of relative L2, norm ratio and lone element, as a relative L2 error."));
    return box;
  }
  function look() {
    const font = { family: a.css("sans"), size: 11.5, color: a.css("dim") };
    const axis = { gridcolor: a.css("line"), zeroline: false, linecolor: a.css("line"), tickfont: font, nticks: 5 };
    return { font, axis, layout: { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, margin: { l: 56, r: 8, t: 8, b: 38 }, autosize: true, dragmode: false, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font },
      hoverlabel: { bgcolor: a.css("panel"), font: { family: a.css("mono"), size: 12, color: a.css("ink") } } } };
  }
  const config = { displaylogo: false, responsive: true, displayModeBar: false };
  function scatter(box, s) {
    const { font, axis, layout } = look(), n = s.worst, finite = (x) => (typeof x === "number" ? x : null);
    const g = s.golden.map(finite), m = s.mine.map((x, i) => (finite(x) === null || g[i] === null ? null : x - g[i])), seen = g.filter((x) => x !== null);
    const ends = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
    const rows = [["other rows", n, g.length, "limit", 4, 0.55], ["worst row", 0, n, "fail", 5, 0.8]].filter(([, from, to]) => to > from);
    const traces = rows.map(([name, from, to, colour, size, opacity]) => ({ type: "scatter", mode: "markers", name, x: g.slice(from, to), y: m.slice(from, to), marker: { color: a.css(colour), size, opacity }, hovertemplate: "golden %{x:.4g}<br>mine − golden %{y:.4g}<extra></extra>" }));
    traces.unshift({ type: "scatter", mode: "lines", name: "equal", x: ends, y: [0, 0], line: { color: a.css("dim"), width: 1, dash: "dot" }, hoverinfo: "skip" });
    return window.Plotly.newPlot(box, traces, { ...layout, margin: { ...layout.margin, t: 26 }, xaxis: { ...axis, title: { text: "golden", font, standoff: 4 } }, yaxis: { ...axis, title: { text: "mine − golden", font, standoff: 2 } } }, config);
  }
  function histogram(box, s) {
    const { font, axis, layout } = look(), seen = s.golden.concat(s.mine).filter((x) => typeof x === "number");
    const low = Math.min(...seen), high = Math.max(...seen), bins = { start: low, end: high + (high - low) * 1e-6, size: (high - low) / 36 || 1 };
    const one = (name, x, colour) => ({ type: "histogram", name, x: x.filter((v) => typeof v === "number"), xbins: bins, autobinx: false, opacity: 0.6, marker: { color: a.css(colour) } });
    return window.Plotly.newPlot(box, [one("golden", s.golden, "prefill"), one("mine", s.mine, "decode")], { ...layout, margin: { ...layout.margin, t: 26 }, barmode: "overlay", bargap: 0, xaxis: { ...axis, title: { text: "value", font, standoff: 4 } }, yaxis: { ...axis, title: { text: "count", font, standoff: 2 } } }, config);
  }
  // into: the element to fill; i: the pair's number on the page.
  a.parts.pair = function (into, i, looks, tap, role) {
    const shape = looks.shapes.find(([module, r]) => module === tap && (r === role || !r));
    if (shape) { const p = a.element("p", "shape"); p.append(a.element("strong", "", "Shape of the error: "), shape[2]); into.append(p); }
    a.parts.around(into, looks.around, tap);
    a.parts.operators(into, i, tap, looks);
    const box = a.element("div", "closer"), rows = looks.rows[i], s = looks.samples[i];
    if (rows) box.append(table(rows));
    if (s && window.Plotly) {
      const charts = [["Error over golden value", scatter], ["Distribution of both", histogram]];
      for (const [name, make] of charts) {
        const figure = a.element("figure"), plot = a.element("div", "small-plot");
        figure.append(a.element("figcaption", "", name), plot);
        plot.setAttribute("role", "img");
        plot.setAttribute("aria-label", name + " of " + s.golden.length + " sampled values");
        box.append(figure);
        a.paper.follow(() => make(plot, s), plot);
        requestAnimationFrame(() => { make(plot, s).then(() => { plot.dataset.ready = "1"; }); });
      }
    }
    if (box.children.length) into.append(box);
    a.parts.spread(into, looks.spreads[i], looks, tap, role, a.pairs.at("identical", i) === true);
    if (s) into.append(a.element("p", "hint", s.golden.length + " sampled values, " + s.worst + " of them from the worst row" + (s.request === null ? "" : " (" + s.request + ", position " + s.position + ")") + ". accprobe show prints any row whole."));
    else if (rows) into.append(a.element("p", "hint", "Values were sampled for the worst pair of each failed tensor only; accprobe show prints any row."));
  };
})();
