// What the page's drawings share: SVG elements, round numbers on an axis, the note beside the pointer, and being drawn
// again when the room for them or the paper changes. Colours are classes (draw.css), so that they follow light, dark and
// paper by themselves; texts from a dump reach a drawing through textContent alone.
(function () {
  "use strict";
  const a = window.accprobe, NS = "http://www.w3.org/2000/svg";
  function svg(tag, attributes = {}, text) {
    const e = document.createElementNS(NS, tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    return e;
  }
  function round(low, high, most) {   // steps of 1, 2 or 5
    const least = (high - low) / Math.max(1, most), ten = 10 ** Math.floor(Math.log10(least)), out = [];
    const step = ten * ([1, 2, 5, 10].find((k) => k * ten >= least * (1 - 1e-9)) ?? 10);
    if (!(step > 0) || !Number.isFinite(step)) return [low];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(k * step);
    return out;
  }
  // The note beside the pointer: within the box, lines as they come.
  function note(box) {
    const tip = box.appendChild(a.element("div", "tip"));
    tip.hidden = true;
    return {
      show(x, y, title, lines) {
        tip.replaceChildren(...(title ? [a.element("b", "", title)] : []), ...lines.map((l) => a.element("div", "", l)));
        tip.hidden = false;
        const w = tip.offsetWidth, h = tip.offsetHeight, wide = box.clientWidth, high = box.clientHeight;
        const left = x + 14 + w <= wide ? x + 14 : x - 14 - w >= 0 ? x - 14 - w : Math.max(0, Math.min(wide - w, x - w / 2));
        tip.style.left = left + "px";
        tip.style.top = Math.max(2, Math.min(high - h - 2, y - h - 12 >= 0 ? y - h - 12 : y + 14)) + "px";
      },
      hide() { tip.hidden = true; },
    };
  }
  // The room for a drawing in pixels, on paper no more than the paper has.
  const width = (box) => Math.max(60, a.paper.on ? Math.min(box.clientWidth, a.paper.WIDE) : box.clientWidth);
  function follow(box, draw) {
    let drawn = box.clientWidth, waiting = false;
    a.paper.follow(draw, box);
    const seen = new ResizeObserver(() => {
      if (!box.isConnected) { seen.disconnect(); return; }
      if (waiting || box.clientWidth === drawn || a.paper.on) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; drawn = box.clientWidth; draw(); });
    });
    seen.observe(box);
  }
  // A drawing with two linear axes: { root, x(value), y(value), plot }. range: [low, high] each; names: below and beside.
  function axes(box, [x0, x1], [y0, y1], names) {
    const w = width(box), h = box.clientHeight, m = { l: 58, r: 10, t: 8, b: 38 }, root = svg("svg", { width: w, height: h, class: "drawing", "aria-hidden": "true" });
    const x = (v) => m.l + ((v - x0) / (x1 - x0 || 1)) * (w - m.l - m.r), y = (v) => h - m.b - ((v - y0) / (y1 - y0 || 1)) * (h - m.t - m.b);
    for (const t of round(x0, x1, Math.max(2, (w - m.l - m.r) / 80))) {
      root.append(svg("line", { class: "grid", x1: x(t), x2: x(t), y1: m.t, y2: h - m.b }), svg("text", { class: "tick", x: x(t), y: h - m.b + 15, "text-anchor": "middle" }, a.number(t, 3)));
    }
    for (const t of round(y0, y1, 5)) {
      root.append(svg("line", { class: "grid", x1: m.l, x2: w - m.r, y1: y(t), y2: y(t) }), svg("text", { class: "tick", x: m.l - 6, y: y(t) + 4, "text-anchor": "end" }, a.number(t, 3)));
    }
    root.append(svg("text", { class: "axis", x: (m.l + w - m.r) / 2, y: h - 5, "text-anchor": "middle" }, names[0]),
      svg("text", { class: "axis", transform: "translate(12 " + (m.t + h - m.b) / 2 + ") rotate(-90)", "text-anchor": "middle" }, names[1]));
    return { root, x, y };
  }
  // Which colour is what, above a drawing. entries: [class, text].
  function keys(entries) {
    const ul = a.element("ul", "keys");
    for (const [cls, text] of entries) {
      const li = ul.appendChild(a.element("li"));
      li.append(a.element("span", "key " + cls), text);
    }
    return ul;
  }
  a.draw = { svg, note, width, follow, axes, keys };
})();
