// How far each tap is over its own limit, against depth: the dashed line at 1 is every tap's limit.
// Marks are what a tap created, with origins by their numbers; the thin lines behind are what its outputs are off by in
// all. Where there is no room for each tap, a layer is one mark, its worst; zoomed in, its taps are.
(function () {
  "use strict";
  const a = window.accprobe, { svg } = a.draw;
  const ROOM = 5, LOWEST = -4;        // pixels of a mark; the decade below which nothing is told apart
  const NEAR = 20;                    // pixels from a mark that are still on it
  const LEFT = 62, RIGHT = 14, TOP_ROOM = 24, BELOW = 40;
  a.parts.chart = function (data) {
  const chart = document.getElementById("chart"), readout = document.getElementById("chart-readout"), back = document.getElementById("chart-back");
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

  let scale = null;                   // of what is drawn: x(value), value(x), y(factor)
  const tip = a.draw.note(chart);
  const drawing = chart.insertBefore(a.element("div", "drawn"), chart.firstChild);
  // Where a mark is drawn: its origin's number, its dot, its lines.
  function places(m) {
    const at = m.origins.length ? [m.created === null ? TOP : y(m.created)] : m.created !== null ? [y(m.created)] : [];
    if (m.nonfinite && !m.origins.length) at.push(TOP);
    return at.concat(PHASES.map(([id]) => y(m[id])).filter((v) => v !== null)).map((v) => [scale.x(m.x), scale.y(v)]);
  }
  function nearest(px, py) {
    let found = null, best = NEAR;
    state.marks.forEach((m, k) => {
      if (Math.abs(scale.x(m.x) - px) > best) return;
      places(m).forEach(([mx, my], i) => {
        const d = Math.hypot(mx - px, my - py) - (m.origins.length && i === 0 ? 8 : 0);   // a number is larger than a dot
        if (d < best) { best = d; found = k; }
      });
    });
    return found;
  }
  function textOf(m, width) {          // a name's end tells more than its beginning
    const most = Math.floor(width / 6.4);
    return m.length > most ? "…" + m.slice(-Math.max(6, most - 1)) : m;
  }
  const decade = (e) => (e >= 0 && e < 4 ? 10 ** e + "×" : e === -1 ? "0.1×" : e === -2 ? "0.01×" : "1e" + e + "×");

  function draw() {
    const marks = state.marks = seen(), [from, to] = state.range;
    state.at = Math.min(state.at, marks.length - 1);
    tip.hide();
    const made = marks.filter((m) => m.created !== null && !m.origins.length), broken = marks.filter((m) => m.nonfinite && !m.origins.length), blamed = marks.filter((m) => m.origins.length);
    const keys = a.draw.keys([...PHASES, ...(made.length ? [["created", "created"]] : []), ["limit", "limit"], ...(broken.length ? [["broken", "NaN/Inf, or must be equal"]] : []), ...(blamed.length ? [["origins", "origins"]] : [])]);
    drawing.replaceChildren(keys);
    const w = a.draw.width(chart), h = chart.clientHeight - keys.offsetHeight, right = w - RIGHT, bottom = h - BELOW;
    scale = {
      top: keys.offsetHeight,
      x: (v) => LEFT + ((v - from) / (to - from)) * (right - LEFT), value: (px) => from + ((px - LEFT) / (right - LEFT)) * (to - from),
      y: (v) => bottom - ((Math.log10(v) - low) / (high - low)) * (bottom - TOP_ROOM),
    };
    const root = svg("svg", { width: w, height: h, class: "drawing", "aria-hidden": "true" }), clip = root.appendChild(svg("clipPath", { id: "chart-clip" }));
    clip.append(svg("rect", { x: LEFT, y: 0, width: right - LEFT, height: h }));
    const inside = svg("g", { "clip-path": "url(#chart-clip)" }), over = svg("g");
    const shades = ticks();
    shades.forEach((m, k) => {
      const end = k + 1 < shades.length ? shades[k + 1].i : points.length;
      m.middle = (Math.max(m.i - 0.5, from) + Math.min(end - 0.5, to)) / 2;
      if (m.layer !== null && k % 2 === 0 && end - 0.5 >= from && m.i - 0.5 <= to) inside.append(svg("rect", { class: "shade", x: scale.x(m.i - 0.5), y: TOP_ROOM, width: scale.x(end - 0.5) - scale.x(m.i - 0.5), height: bottom - TOP_ROOM }));
    });
    const decades = [];
    for (let e = Math.ceil(low + 0.4); e <= high; e++) decades.push(e);
    const step = Math.max(1, Math.ceil(decades.length / 7));
    for (const [v, text] of [[ZERO, "0"], ...decades.filter((e) => e % step === 0).map((e) => [10 ** e, decade(e)])]) {
      root.append(svg("line", { class: "grid", x1: LEFT, x2: right, y1: scale.y(v), y2: scale.y(v) }), svg("text", { class: "ytick", x: LEFT - 6, y: scale.y(v) + 4, "text-anchor": "end" }, text));
    }
    const named = shades.filter((m) => m.layer !== null && m.middle >= from && m.middle <= to), every = Math.max(1, Math.ceil(named.length / Math.max(4, (right - LEFT) / 38)));
    named.forEach((m, k) => { if (k % every === 0) root.append(svg("text", { class: "xtick", x: scale.x(m.middle), y: bottom + 16, "text-anchor": "middle" }, m.layer.split(".").at(-1))); });
    root.append(svg("text", { class: "axis", x: (LEFT + right) / 2, y: h - 6, "text-anchor": "middle" }, named.length ? "layer" : "data flow"),
      svg("text", { class: "axis", transform: "translate(11 " + (TOP_ROOM + bottom) / 2 + ") rotate(-90)", "text-anchor": "middle" }, "error ÷ limit"));

    const dots = (ms, value) => ms.map((m) => "M" + scale.x(m.x).toFixed(1) + " " + scale.y(value(m)).toFixed(1) + "h0").join("");
    for (const [id] of PHASES) {       // what is missing is passed over
      const path = marks.filter((m) => m[id] !== null).map((m, k) => (k ? "L" : "M") + scale.x(m.x).toFixed(1) + " " + scale.y(y(m[id])).toFixed(1)).join("");
      inside.append(svg("path", { class: "line " + id, d: path || "M0 0" }));
    }
    if (made.length) inside.append(svg("path", { class: "created" + (marks.length > 300 ? " many" : ""), d: dots(made, (m) => y(m.created)) }));
    inside.append(svg("line", { class: "limit", x1: LEFT, x2: right, y1: scale.y(1), y2: scale.y(1) }));
    if (broken.length) inside.append(svg("path", { class: "broken", d: broken.map((m) => { const bx = scale.x(m.x), by = scale.y(TOP); return "M" + (bx - 4) + " " + (by - 4) + "l8 8m-8 0l8 -8"; }).join("") }));
    const culprit = points.findIndex((p) => p.origin === 1);
    if (culprit >= from && culprit <= to) {
      const x0 = scale.x(marks === layers ? blamed.find((m) => m.origins.includes(1)).x : culprit), before = x0 - LEFT, after = right - x0, name = "culprit  " + points[culprit].tap;
      const left = after < name.length * 6.4 && before > after;
      over.append(svg("line", { class: "culprit-line", x1: x0, x2: x0, y1: TOP_ROOM - 6, y2: bottom }),
        svg("text", { class: "culprit-name", x: left ? x0 + 2 : x0 - 2, y: TOP_ROOM - 10, "text-anchor": left ? "end" : "start" }, textOf(name, (left ? before : after) + 4)));
    }
    for (const m of [...blamed].reverse()) {                                  // the culprit's number on top
      if (m.x < from || m.x > to) continue;
      const g = over.appendChild(svg("g", { class: "origin-mark" })), cx = scale.x(m.x), cy = scale.y(m.created === null ? TOP : y(m.created));
      g.append(svg("circle", { cx, cy, r: 9 }), svg("text", { x: cx, y: cy + 4, "text-anchor": "middle" }, m.origins[0] + (m.origins.length > 1 ? "+" : "")));
    }
    const area = svg("rect", { class: "area drag", x: LEFT, y: TOP_ROOM, width: right - LEFT, height: bottom - TOP_ROOM });
    root.append(inside, over, area);
    drawing.append(root);
    root.addEventListener("click", pressed);
    root.addEventListener("pointermove", moved);
    root.addEventListener("pointerleave", () => tip.hide());
    root.addEventListener("dblclick", () => { if (Date.now() - opened > 500) zoom(null); });
    chart.dataset.marks = marks === layers ? "layers" : "taps";
    chart.dataset.range = from + " " + to;
    back.hidden = state.range === WHOLE;
  }

  // -- the pointer: the note says what it is on, a click opens that; zoom.js has drags
  let opened = 0;
  const zoomed = a.zoom(chart, { range: () => state.range, whole: () => WHOLE, least: Math.min(4, points.length), ends: () => [LEFT, a.draw.width(chart) - RIGHT], show: zoom });
  const place = (e) => { const box = drawing.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top - scale.top]; };
  function moved(e) {
    if (e.buttons) return;
    const k = nearest(...place(e));
    if (k === null) tip.hide();
    else { tell(k); mark(); }
  }
  function mark() {                    // the note beside the mark that is chosen
    const m = state.marks[state.at], at = places(m)[0];
    if (at) tip.show(at[0], at[1] + scale.top, m.name, (m.cls ? [m.cls] : []).concat(describe(m)));
  }
  function pressed(e) {
    if (zoomed.pulled()) return;
    const k = nearest(...place(e));
    if (k === null) return;
    tell(k);
    opened = Date.now();
    enter();
  }
  function zoom(range) {
    const from = range && Math.max(WHOLE[0], Math.min(...range)), to = range && Math.min(WHOLE[1], Math.max(...range));
    const kept = state.marks[state.at];
    state.range = range && to > from ? [from, to] : WHOLE;
    const next = seen(), inside = next.findIndex((m) => m.last >= kept.x && m.first <= kept.x);
    state.at = Math.max(0, inside);
    draw();
  }
  function tell(k) {
    state.at = Math.max(0, Math.min(state.marks.length - 1, k));
    const m = state.marks[state.at];
    readout.textContent = m.name + (m.cls ? " (" + m.cls + ")" : "") + ": " + describe(m).join(", ");
  }
  function enter() {                  // a layer opens into its taps, a tap shows its pairs
    const m = state.marks[state.at];
    if (m.first === m.last) a.showTap(m.name, { scroll: true });
    else { zoom([m.first - 0.5, m.last + 0.5]); tell(state.at); }
  }
  chart.addEventListener("keydown", (e) => {
    const to = { ArrowRight: state.at + 1, ArrowLeft: state.at - 1, Home: 0, End: state.marks.length - 1 }[e.key];
    if (to !== undefined) {
      tell(to);
      const m = state.marks[state.at], half = (state.range[1] - state.range[0]) / 2;
      if (m.x < state.range[0] || m.x > state.range[1]) zoom([m.x - half, m.x + half]);
      mark();
    } else if (e.key === "Enter") enter();
    else if (e.key === "Escape" || e.key === "Backspace") zoom(null);
    else return;
    e.preventDefault();
  });
  back.addEventListener("click", () => { zoom(null); chart.focus({ preventScroll: true }); });
  draw();
  state.at = Math.max(0, state.marks.findIndex((m) => m.origins.includes(1)));
  chart.dataset.ready = "1";
  a.draw.follow(chart, draw);
  };
})();
