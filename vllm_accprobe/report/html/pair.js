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
  // Both sides' numbers where they are farthest apart.
  function wrong(into, i) {
    const g = a.pairs.at("max_abs_golden", i), m = a.pairs.at("max_abs_mine", i);
    if (g === null || m === null || a.pairs.at("identical", i) === true) return;
    const at = a.pairs.at("max_abs_index", i), p = into.appendChild(a.element("p", "apart")), value = (name, x) => p.append(name + " ", a.element("b", "", a.number(x, 6)));
    p.append("Farthest apart" + (at ? " at [" + at + "]" : "") + ": ");
    value("golden", g);
    value(", mine", m);
  }
  const only = (xs) => xs.filter((x) => typeof x === "number");
  const span = (xs) => (xs.length ? xs.reduce(([l, h], x) => [Math.min(l, x), Math.max(h, x)], [Infinity, -Infinity]) : [0, 1]);
  const wider = ([l, h], by = 0.04) => { const d = (h - l || Math.abs(h) || 1) * by; return [l - d, h + d]; };
  function scatter(box, s) {
    const finite = (x) => (typeof x === "number" ? x : null), g = s.golden.map(finite), m = s.mine.map((x, i) => (finite(x) === null || g[i] === null ? null : x - g[i]));
    const rows = [["others", "other rows", s.worst, g.length], ["worst", "worst row", 0, s.worst]].filter(([, , from, to]) => to > from);
    box.append(a.draw.keys([["equal", "equal"], ...rows]));
    const { root, x, y } = a.draw.axes(box.appendChild(a.element("div", "plot")), wider(span(only(g))), wider(span([0, ...only(m)])), ["golden", "mine − golden"]);
    root.append(a.draw.svg("line", { class: "equal", x1: x(wider(span(only(g)))[0]), x2: x(wider(span(only(g)))[1]), y1: y(0), y2: y(0) }));
    for (const [cls, , from, to] of rows) {
      let d = "";
      for (let i = from; i < to; i++) if (m[i] !== null) d += "M" + x(g[i]).toFixed(1) + " " + y(m[i]).toFixed(1) + "h0";
      root.append(a.draw.svg("path", { class: cls, d: d || "M0 0" }));
    }
    box.lastChild.append(root);
  }
  const BINS = 36;
  function histogram(box, s) {
    const [low, high] = span(only(s.golden.concat(s.mine))), size = (high - low) / BINS || 1;
    const count = (xs) => { const out = new Array(BINS).fill(0); for (const v of only(xs)) out[Math.min(BINS - 1, Math.floor((v - low) / size))]++; return out; };
    const sides = [["golden-bars", count(s.golden)], ["mine-bars", count(s.mine)]];
    box.append(a.draw.keys([["golden-bars", "golden"], ["mine-bars", "mine"]]));
    const { root, x, y } = a.draw.axes(box.appendChild(a.element("div", "plot")), [low, low + size * BINS], [0, Math.max(1, ...sides.flatMap(([, c]) => c)) * 1.04], ["value", "count"]);
    for (const [cls, counts] of sides) root.append(a.draw.svg("path", { class: cls, d: counts.map((c, i) => (c ? "M" + x(low + i * size) + " " + y(0) + "V" + y(c) + "H" + x(low + (i + 1) * size) + "V" + y(0) + "z" : "")).join("") }));
    box.lastChild.append(root);
  }
  // into: the element to fill; i: the pair's number on the page.
  a.parts.pair = function (into, i, looks, tap, role) {
    const shape = looks.shapes.find(([module, r]) => module === tap && (r === role || !r));
    if (shape) { const p = a.element("p", "shape"); p.append(a.element("strong", "", "Shape of the error: "), shape[2]); into.append(p); }
    wrong(into, i);
    a.parts.around(into, looks.around, tap);
    a.parts.operators(into, i, tap, looks);
    const box = a.element("div", "closer"), rows = looks.rows[i], s = looks.samples[i];
    if (rows) box.append(table(rows));
    if (s) {
      const charts = [["Error against golden value", scatter], ["Distribution of both", histogram]];
      for (const [name, make] of charts) {
        const figure = a.element("figure"), plot = a.element("div", "small-plot");
        figure.append(a.element("figcaption", "", name), plot);
        plot.setAttribute("role", "img");
        plot.setAttribute("aria-label", name + " of " + s.golden.length + " sampled values");
        box.append(figure);
        const draw = () => { plot.replaceChildren(); make(plot, s); };
        requestAnimationFrame(() => { draw(); plot.dataset.ready = "1"; a.draw.follow(plot, draw); });
      }
    }
    if (box.children.length) into.append(box);
    a.parts.spread(into, looks.spreads[i], looks, tap, role, a.pairs.at("identical", i) === true);
    if (s) into.append(a.element("p", "hint", s.golden.length + " sampled values, " + s.worst + " of them from the worst row" + (s.request === null ? "" : " (" + s.request + ", position " + s.position + ")") + ". accprobe inspect DUMP TAP prints any row whole."));
    else if (rows) into.append(a.element("p", "hint", "Values were sampled for the worst pair of each failed tensor only; accprobe inspect DUMP TAP prints any row."));
  };
})();
