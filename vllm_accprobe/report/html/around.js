// What fed an origin and what it feeds: inputs left, the module in the middle, outputs right, each edge with its error.
// Names reach it as text of SVG elements alone; a node opens its pair, by click and by key.
(function () {
  "use strict";
  const a = window.accprobe, NS = "http://www.w3.org/2000/svg", W = 960, BOX = 258, TALL = 40, GAP = 14, MOST = 34;
  function svg(tag, attributes, text) {
    const e = document.createElementNS(NS, tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    return e;
  }
  const short = (s) => { const all = [...s]; return all.length > MOST ? "…" + all.slice(1 - MOST).join("") : s; };
  function node(into, x, y, tap, role, said, pair, cls) {
    const g = into.appendChild(svg("g", { class: cls }));
    g.append(svg("title", {}, said), svg("rect", { x, y, width: BOX, height: TALL, rx: 5 }), svg("text", { x: x + 9, y: y + 17 }, short(tap)), svg("text", { x: x + 9, y: y + 32, class: "role" }, short(role)));
    if (pair === null) return;
    g.setAttribute("role", "button");
    g.setAttribute("tabindex", "0");
    g.setAttribute("aria-label", said + ". Opens this pair");
    g.addEventListener("click", () => a.showPair(pair));
    g.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); e.stopPropagation(); a.showPair(pair); } });
  }
  function edge(into, labels, x0, y0, x1, y1, one, after) {
    const how = ["order", "own"].includes(one.by) ? " order" : "", g = into.appendChild(svg("g", { class: one.status + how, "aria-hidden": "true" })), middle = (x0 + x1) / 2;
    g.append(svg("path", { d: "M" + x0 + " " + y0 + "C" + middle + " " + y0 + " " + middle + " " + y1 + " " + (x1 - 6) + " " + y1 }), svg("polygon", { points: x1 + "," + y1 + " " + (x1 - 8) + "," + (y1 - 4) + " " + (x1 - 8) + "," + (y1 + 4) }));
    const label = one.status === "identical" ? "identical" : one.over === null ? "not compared" : a.times(one.over);
    labels.push(svg("text", { x: after ? x1 - 4 : x0 + 4, y: (after ? y1 : y0) - 5, class: "said " + one.status, "text-anchor": after ? "end" : "start", "aria-hidden": "true" }, label));
  }
  // into: where it goes; around: of every origin; tap: of the pair that is shown.
  a.parts.around = function (into, around, tap) {
    const one = around.find((o) => o.module === tap) || around.find((o) => o.tap === tap);
    if (!one) return;
    const rows = Math.max(one.fed_by.length, one.feeds.length, 1), high = rows * (TALL + GAP) + GAP, middle = (W - BOX) / 2;
    const figure = into.appendChild(a.element("figure", "around"));
    figure.append(a.element("figcaption", "", "What fed it, and what it feeds"));
    const s = figure.appendChild(svg("svg", { viewBox: "0 0 " + W + " " + high, role: "group", "aria-label": one.said }));
    const labels = [], lines = s.appendChild(svg("g", {})), at = (i, n) => high / 2 + (i - (n - 1) / 2) * (TALL + GAP);
    const name = (e) => (e.by === "own" ? "its own" : e.tap), fed = (e) => (e.by === "own" || !e.in ? e.role : e.role + " → " + e.in);
    node(s, middle, high / 2 - TALL / 2, one.tap, one.role, one.tap + "/" + one.role, null, "self");
    one.fed_by.forEach((e, i) => {
      const y = at(i, one.fed_by.length);
      edge(lines, labels, BOX, y, middle, high / 2, e, false);
      node(s, 0, y - TALL / 2, name(e), fed(e), "Fed by " + e.said, e.pair, "near");
    });
    one.feeds.forEach((e, i) => {
      const y = at(i, one.feeds.length);
      edge(lines, labels, middle + BOX, high / 2, W - BOX, y, e, true);
      node(s, W - BOX, y - TALL / 2, e.tap, e.role, "Feeds " + e.said, e.pair, "near");
    });
    s.append(...labels);
    const more = one.left_out[0] + one.left_out[1];
    into.append(a.element("p", "hint", "× is the error over that tensor’s own limit, in the step of the origin’s first row. A whole line: equal bytes say so; a dashed one: only the order of the data flow does." + (more ? " " + more + " more are left out." : "")));
  };
})();
