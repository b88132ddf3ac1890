// Layers × tokens of one request: the worst row error of each cell, in units of its limit. A layer opens into its taps.
// Codes are those of report/heat.py: 0 missing, 1 no error, 2 … 254 logarithmic, 255 infinite.
(function () {
  "use strict";
  const a = window.accprobe, { svg } = a.draw, TOP = 8, RIGHT = 10;
  a.parts.heat = function (data) {
    const chart = document.getElementById("heat"), readout = document.getElementById("heat-readout");
    const choice = document.getElementById("heat-request"), back = document.getElementById("heat-back"), whole = document.getElementById("heat-whole"), title = document.getElementById("heat-level");
    const empty = document.getElementById("heat-none");
    if (!data.requests.length) { empty.hidden = false; document.getElementById("heat-tools").hidden = true; chart.hidden = true; return; }

    const code = (text) => { const b = atob(text), out = new Uint8Array(b.length); for (let i = 0; i < b.length; i++) out[i] = b.charCodeAt(i); return out; };
    const ratio = (c) => (c === 0 ? null : c === 1 ? 0 : c === 255 ? "Inf" : 10 ** ((c - 2) / 30 - 4));
    // Rows of the overview: a layer with all its taps, or a tap outside of layers; in data-flow order.
    const groups = [];
    const known = new Map();
    data.taps.forEach((tap, i) => {
      const layer = data.layers[i], key = layer === null ? "tap " + i : "layer " + layer;
      if (!known.has(key)) { known.set(key, groups.length); groups.push({ name: layer ?? tap, layer, taps: [] }); }
      groups[known.get(key)].taps.push(i);
    });
    const short = (name, within) => (within && name.startsWith(within + ".") ? name.slice(within.length + 1) : name);
    function label(name, w) {         // the last parts of a name that have room; of one that is too long its end
      const most = w < 520 ? 18 : 28, parts = name.split(".");
      if (name.length <= most) return name;
      while (parts.length > 1 && parts.join(".").length >= most) parts.shift();
      return "…" + parts.join(".").slice(1 - most);
    }
    const margin = (all, w) => 16 + 7 * Math.max(...all.map((r) => label(r.shown, w).length));

    data.requests.forEach((r, i) => {
      const option = a.element("option", "", r.label + "  (" + (r.worst === 0 ? "no error" : "worst " + a.times(r.worst)) + ")");
      option.value = String(i);
      choice.append(option);
    });
    const state = { request: 0, group: null, row: 0, column: 0, moved: false, range: null };   // range: the columns that are shown, null for all
    const count = () => data.requests[state.request].start.length;
    function columns() {              // [first, end] of those that are drawn
      if (!state.range) return [0, count()];
      const first = Math.min(count() - 1, Math.round(state.range[0]));
      return [first, Math.max(first + 1, Math.round(state.range[1]))];
    }
    let codes = code(data.requests[0].codes);

    function rows() {                 // without what this request has no rows of: text in a vision tower
      const n = data.requests[state.request].start.length;
      const seen = (t) => codes.subarray(t * n, (t + 1) * n).some((c) => c > 0);
      if (state.group === null) return groups.map((g, i) => ({ name: g.name, shown: g.name, group: i, taps: g.taps.filter(seen) })).filter((r) => r.taps.length);
      const g = groups[state.group];
      return g.taps.filter(seen).map((t) => ({ name: data.taps[t], shown: data.taps[t] === g.layer ? "(layer output)" : short(data.taps[t], g.layer), taps: [t] }));
    }
    function cell(row, column) {
      const n = data.requests[state.request].start.length;
      let most = 0;
      for (const t of row.taps) most = Math.max(most, codes[t * n + column]);
      return most;
    }
    function tokens(column) {
      const r = data.requests[state.request], first = r.start[column];
      if (r.width === 1) return String(first);
      const next = r.start[column + 1];
      return first + "–" + (next === undefined ? "end" : next - 1);
    }
    const spelt = (t) => Object.hasOwn(data.texts, t);
    // What the tokens of a column say, set apart so that writing from right to left turns nothing else around.
    function said(column) {
      const r = data.requests[state.request], own = r.tokens ? r.tokens[column] : [];
      if (!own.length) return "";
      const text = own.map((t) => (spelt(t) ? data.texts[t] : "[" + t + " is not in the vocabulary]")).join("");
      return " “\u2068" + text + "\u2069" + (own.length < Math.min(r.width, (r.start[column + 1] ?? Infinity) - r.start[column]) ? "…" : "") + "”";
    }
    function word(column) {            // a token's label on the axis
      const own = data.requests[state.request].tokens[column], text = own.length && spelt(own[0]) ? data.texts[own[0]] : own.length ? "?" : "";
      return text === "" ? "" : text.trim() === "" ? "␣" : text.trim().length > 10 ? text.trim().slice(0, 9) + "…" : text.trim();
    }
    function axisLabels([from, to], room) {     // every token's text, or every other's, where that has room; else positions
      const r = data.requests[state.request], n = to - from, apart = Math.max(1, Math.ceil(n / Math.max(3, Math.floor((room + 90) / 70))));
      const pick = (every) => r.start.map((_, i) => i).filter((i) => i >= from && i < to && i % every === 0);
      const upright = Math.max(1, Math.ceil((n * 13) / room)), spoken = r.tokens && r.width === 1;
      if (!spoken || (apart > 1 && upright > 2)) return { columns: pick(apart), texts: pick(apart).map((i) => [String(r.start[i])]), upright: false, below: 38 };
      if (apart === 1) return { columns: pick(1), texts: pick(1).map((i) => [String(r.start[i]), word(i)]), upright: false, below: 54 };
      const texts = pick(upright).map((i) => word(i) + " " + r.start[i]);
      return { columns: pick(upright), texts: texts.map((t) => [t]), upright: true, below: 30 + 6.6 * Math.max(...texts.map((t) => t.length)) };
    }
    function describe(row, column) {
      const x = ratio(cell(row, column)), r = data.requests[state.request];
      const what = x === null ? "not compared" : x === 0 ? "no error" : x === "Inf" ? "NaN or infinity, unequal, or golden is 0" : a.times(x) + " the limit";
      return row.name + ", position " + tokens(column) + said(column) + (r.decode[column] ? " (decode)" : " (prefill)") + ": " + what;
    }
    const tip = a.draw.note(chart), drawing = chart.insertBefore(a.element("div", "drawn"), chart.firstChild);
    let grid = null;                   // of what is drawn: left, a cell's width and height, the rows, the chosen cell's mark
    function draw() {
      const all = rows(), r = data.requests[state.request], [from, to] = columns(), n = to - from, w = a.draw.width(chart), h = chart.clientHeight;
      const left = margin(all, w), labels = axisLabels([from, to], Math.max(60, w - left - RIGHT)), wide = (w - left - RIGHT) / n, bottom = h - labels.below, high = (bottom - TOP) / all.length;
      const root = svg("svg", { width: w, height: h, class: "drawing", "aria-hidden": "true" }), cells = svg("g", { class: "cells" });
      root.append(svg("rect", { class: "none-here", x: left, y: TOP, width: wide * n, height: bottom - TOP }), cells);
      // A path for each step of the scale; cells that are alike and touch are one piece of it.
      const gap = n < 200 && all.length < 60 && wide > 4 && high > 4 ? 1 : 0, pieces = Array.from({ length: a.STEPS.length + 2 }, () => []);
      all.forEach((row, y) => {
        const steps = Array.from({ length: n }, (_, c) => a.step(ratio(cell(row, from + c))));
        for (let c = 0; c < n; ) {
          let end = c + 1;
          while (!gap && end < n && steps[end] === steps[c]) end++;
          if (steps[c] !== null) pieces[steps[c]].push("M" + (left + c * wide).toFixed(2) + " " + (TOP + y * high).toFixed(2) + "h" + ((end - c) * wide - gap).toFixed(2) + "v" + (high - gap).toFixed(2) + "h" + (gap - (end - c) * wide).toFixed(2) + "z");
          c = end;
        }
      });
      pieces.forEach((d, step) => { if (d.length) cells.append(svg("path", { class: "step" + step, d: d.join("") })); });
      const first = r.decode.indexOf(1) - from;
      if (first > 0 && first < n) root.append(svg("line", { class: "decode-begins", x1: left + first * wide, x2: left + first * wide, y1: TOP, y2: bottom }));
      const every = Math.max(1, Math.ceil(15 / high));
      all.forEach((row, y) => { if (y % every === 0) root.append(svg("text", { class: "ytick", x: left - 6, y: TOP + (y + 0.5) * high + 4, "text-anchor": "end" }, label(row.shown, w))); });
      labels.columns.forEach((c, k) => {
        const x = left + (c - from + 0.5) * wide, at = labels.upright ? { transform: "translate(" + (x + 4) + " " + (bottom + 6) + ") rotate(-90)", "text-anchor": "end" } : { x, y: bottom + 15, "text-anchor": "middle" };
        const text = root.appendChild(svg("text", { class: "xtick", ...at }));
        labels.texts[k].forEach((line, l) => text.append(labels.upright ? line : svg("tspan", { x, dy: l ? 15 : 0 }, line)));
      });
      root.append(svg("text", { class: "axis", x: left + (wide * n) / 2, y: h - 5, "text-anchor": "middle" }, r.width > 1 ? "position (" + r.width + " to a column)" : "position"));
      const at = root.appendChild(svg("rect", { class: "at" })), area = root.appendChild(svg("rect", { class: "area drag", x: left, y: TOP, width: wide * n, height: bottom - TOP }));
      grid = { all, left, wide, high, at, from, to };
      chart.dataset.cells = all.length + " " + n;
      chart.dataset.columns = from + " " + to;
      choose();
      area.addEventListener("pointermove", (e) => { if (e.buttons) { tip.hide(); return; } const [y, x] = under(e); tip.show(left + (x - from + 0.5) * wide, TOP + y * high, "", [readout.textContent = describe(all[y], x)]); });
      area.addEventListener("pointerleave", () => { tip.hide(); readout.textContent = describe(all[state.row], state.column); });
      area.addEventListener("click", (e) => { if (zoomed.pulled()) return; place(...under(e)); tip.hide(); enter(); });
      drawing.replaceChildren(root);
      back.hidden = state.group === null;
      whole.hidden = state.range === null;
      title.textContent = state.group === null ? "all layers" : groups[state.group].name;
      readout.textContent = describe(all[state.row], state.column);
      a.link.changed();
    }
    function under(e) {                // [row, column] of the pointer
      const box = drawing.getBoundingClientRect();
      const at = (px, size, count) => Math.max(0, Math.min(count - 1, Math.floor(px / size)));
      return [at(e.clientY - box.top - TOP, grid.high, grid.all.length), grid.from + at(e.clientX - box.left - grid.left, grid.wide, grid.to - grid.from)];
    }
    function choose() {                // the mark around the chosen cell, never too small to be seen
      const w = Math.max(grid.wide, 5), h = Math.max(grid.high, 5), x = grid.left + (state.column - grid.from + 0.5) * grid.wide - w / 2, y = TOP + (state.row + 0.5) * grid.high - h / 2;
      for (const [k, v] of Object.entries({ x, y, width: w, height: h })) grid.at.setAttribute(k, v);
      grid.at.setAttribute("visibility", state.column >= grid.from && state.column < grid.to ? "visible" : "hidden");
    }
    function place(row, column) {
      state.row = Math.max(0, Math.min(grid.all.length - 1, row));
      state.column = Math.max(0, Math.min(count() - 1, column));
      if (state.column < grid.from || state.column >= grid.to) {      // what is chosen comes into the part that is shown
        const half = (grid.to - grid.from) / 2, first = Math.max(0, Math.min(count() - 2 * half, state.column - half));
        state.range = [first, first + 2 * half];
        draw();
      } else choose();
      readout.textContent = describe(grid.all[state.row], state.column);
      state.moved = true;
      a.link.changed();
    }
    function enter() {                // a layer opens; a tap shows its pairs at that token
      const row = rows()[state.row], r = data.requests[state.request];
      const steps = [r.step0[state.column], r.step1[state.column]], single = row.taps.length === 1;
      if (single) a.showTap(data.taps[row.taps[0]], { steps });
      else {
        const group = row.group, column = state.column;
        a.showTap(groups[group].name, { under: true, steps, scroll: false });
        const worst = row.taps.map((t) => codes[t * r.start.length + column]);
        Object.assign(state, { group, row: worst.indexOf(Math.max(...worst)), column });
        draw();
      }
    }
    function leave() {
      if (state.group === null) return;
      const left = state.group;
      state.group = null;
      state.row = rows().findIndex((r) => r.group === left);
      draw();
      chart.focus({ preventScroll: true });
    }
    function worst() {                // start where the error begins: the first cell beyond the limit, else the worst
      const all = rows(), n = data.requests[state.request].start.length;
      let best = [0, 0, -1];
      for (let r = 0; r < all.length; r++) {
        for (let c = 0; c < n; c++) {
          const x = cell(all[r], c);
          if (x > 122) return [r, c];
          if (x > best[2]) best = [r, c, x];
        }
      }
      return best;
    }
    function turn(request, group) {   // to another request, in the same layer where it has rows of it
      choice.value = String(request);
      codes = code(data.requests[request].codes);
      Object.assign(state, { request, range: null, group: groups[group] && groups[group].taps.length > 1 ? group : null, moved: false });
      if (!rows().length) state.group = null;
      [state.row, state.column] = worst();
    }
    choice.addEventListener("change", () => { turn(Number(choice.value), state.group); draw(); });
    a.link.part({
      keys: ["request", "layer", "cell"],
      get: () => [["request", state.request || null], ["layer", state.group === null ? null : groups[state.group].name], ["cell", state.moved ? state.row + "." + state.column : null]],
      set(q) {
        turn(a.link.whole(q.get("request"), data.requests.length) ?? 0, groups.findIndex((g) => g.name === q.get("layer")));
        const at = /^(\d{1,9})\.(\d{1,9})$/.exec(q.get("cell") ?? "");
        draw();
        if (at) place(Number(at[1]), Number(at[2]));
      },
    });
    back.addEventListener("click", leave);
    const show = (range) => { state.range = range; draw(); };
    whole.addEventListener("click", () => { show(null); chart.focus({ preventScroll: true }); });
    const zoomed = a.zoom(chart, { range: () => state.range ?? [0, count()], whole: () => [0, count()], least: 4, ends: () => [grid.left, grid.left + grid.wide * (grid.to - grid.from)], show });
    chart.addEventListener("keydown", (e) => {
      const to = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key];
      if (to) place(state.row + to[0], state.column + to[1]);
      else if (e.key === "Home") place(state.row, 0);
      else if (e.key === "End") place(state.row, 1e9);
      else if (e.key === "Enter") enter();
      else if (e.key === "Escape" || e.key === "Backspace") { if (state.range) show(null); else leave(); }
      else return;
      e.preventDefault();
    });
    [state.row, state.column] = worst();
    draw();
    chart.dataset.ready = "1";
    a.draw.follow(chart, draw);
  };
})();
