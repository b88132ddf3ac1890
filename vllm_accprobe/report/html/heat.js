// Layers × tokens of one request: the worst row error of each cell, in units of its limit. A layer opens into its taps.
// Codes are those of report/heat.py: 0 missing, 1 no error, 2 … 254 logarithmic, 255 infinite.
(function () {
  "use strict";
  const a = window.accprobe;
  a.parts.heat = function (data) {
    const chart = document.getElementById("heat"), readout = document.getElementById("heat-readout");
    const choice = document.getElementById("heat-request"), back = document.getElementById("heat-back"), title = document.getElementById("heat-level");
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
    const label = (name) => (name.length > 28 ? "…" + name.slice(-27) : name);
    const margin = (all) => 16 + 6.6 * Math.max(...all.map((r) => label(r.shown).length));

    data.requests.forEach((r, i) => {
      const option = a.element("option", "", r.label + "  (" + (r.worst === 0 ? "no error" : "worst " + a.times(r.worst)) + ")");
      option.value = String(i);
      choice.append(option);
    });
    const state = { request: 0, group: null, row: 0, column: 0, moved: false };
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
    function axisLabels(n, room) {     // every token's text, or every other's, where that has room; else positions
      const r = data.requests[state.request], apart = Math.max(1, Math.ceil(n / Math.max(3, Math.floor((room + 90) / 70))));
      const pick = (every) => r.start.map((_, i) => i).filter((i) => i % every === 0);
      const upright = Math.max(1, Math.ceil((n * 13) / room)), spoken = r.tokens && r.width === 1;
      if (!spoken || (apart > 1 && upright > 2)) return { columns: pick(apart), texts: pick(apart).map((i) => String(r.start[i])), angle: 0, below: 38 };
      if (apart === 1) return { columns: pick(1), texts: pick(1).map((i) => r.start[i] + "<br>" + a.escaped(word(i))), angle: 0, below: 56 };
      const texts = pick(upright).map((i) => word(i) + " " + r.start[i]);
      return { columns: pick(upright), texts: texts.map(a.escaped), angle: -90, below: 34 + 6.6 * Math.max(...texts.map((t) => t.length)) };
    }
    function describe(row, column) {
      const x = ratio(cell(row, column)), r = data.requests[state.request];
      const what = x === null ? "not compared" : x === 0 ? "no error" : x === "Inf" ? "NaN or infinity, unequal, or golden is 0" : a.times(x) + " the limit";
      return row.name + ", position " + tokens(column) + said(column) + (r.decode[column] ? " (decode)" : " (prefill)") + ": " + what;
    }
    function colours() {
      // z is the step of the shared scale; equal bands, so that the page's legend is the chart's.
      const n = a.STEPS.length + 2, scale = [];
      for (let s = 0; s < n; s++) scale.push([s / n, a.css("step" + s)], [(s + 1) / n, a.css("step" + s)]);
      return scale;
    }
    function draw() {
      const all = rows(), r = data.requests[state.request], n = r.start.length;
      const z = all.map((row) => Array.from({ length: n }, (_, c) => a.step(ratio(cell(row, c)))));
      const font = { family: a.css("sans"), size: 12, color: a.css("dim") };
      const every = Math.max(1, Math.ceil(all.length / Math.max(4, Math.floor((chart.clientHeight - 50) / 15))));
      const ticks = all.map((_, i) => i).filter((i) => i % every === 0);
      const left = margin(all), labels = axisLabels(n, Math.max(60, chart.clientWidth - left - 10));
      const first = r.decode.indexOf(1);
      const shapes = [{ type: "rect", xref: "x", yref: "y", x0: state.column - 0.5, x1: state.column + 0.5, y0: state.row - 0.5, y1: state.row + 0.5, line: { color: a.css("ink"), width: 2 } }];
      if (first > 0) shapes.push({ type: "line", xref: "x", yref: "paper", x0: first - 0.5, x1: first - 0.5, y0: 0, y1: 1, line: { color: a.css("decode"), width: 1, dash: "dot" } });
      const gap = n < 200 && all.length < 60 ? 1 : 0;
      const trace = {
        type: "heatmap", z, xgap: gap, ygap: gap, zmin: -0.5, zmax: a.STEPS.length + 1.5, colorscale: colours(), showscale: false, hoverongaps: false,
        hoverinfo: "text", text: all.map((row) => Array.from({ length: n }, (_, c) => a.escaped(describe(row, c)))), texttemplate: "",
      };
      const axis = { showgrid: false, zeroline: false, linecolor: a.css("line"), tickfont: font, ticks: "" };
      const layout = {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: a.css("soft"), font, margin: { l: left, r: 10, t: 8, b: labels.below }, shapes, dragmode: false, autosize: true,
        hoverlabel: { bgcolor: a.css("panel"), bordercolor: a.css("limit"), align: "left", font: { family: a.css("mono"), size: 12, color: a.css("ink") } },
        xaxis: { ...axis, range: [-0.5, n - 0.5], tickvals: labels.columns, ticktext: labels.texts, tickangle: labels.angle, fixedrange: true, title: { text: r.width > 1 ? "position (" + r.width + " to a column)" : "position", font, standoff: 6 } },
        yaxis: { ...axis, range: [all.length - 0.5, -0.5], tickvals: ticks, ticktext: ticks.map((i) => a.escaped(label(all[i].shown))), fixedrange: true },
      };
      back.hidden = state.group === null;
      title.textContent = state.group === null ? "all layers" : groups[state.group].name;
      readout.textContent = describe(all[state.row], state.column);
      a.link.changed();
      return window.Plotly.react(chart, [trace], layout, { displaylogo: false, responsive: true, displayModeBar: false });
    }
    function place(row, column) {
      const all = rows();
      state.row = Math.max(0, Math.min(all.length - 1, row));
      state.column = Math.max(0, Math.min(data.requests[state.request].start.length - 1, column));
      const r = { x0: state.column - 0.5, x1: state.column + 0.5, y0: state.row - 0.5, y1: state.row + 0.5 };
      window.Plotly.relayout(chart, Object.fromEntries(Object.entries(r).map(([k, v]) => ["shapes[0]." + k, v])));
      readout.textContent = describe(all[state.row], state.column);
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
      Object.assign(state, { request, group: groups[group] && groups[group].taps.length > 1 ? group : null, moved: false });
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
    chart.addEventListener("keydown", (e) => {
      const to = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key];
      if (to) place(state.row + to[0], state.column + to[1]);
      else if (e.key === "Home") place(state.row, 0);
      else if (e.key === "End") place(state.row, 1e9);
      else if (e.key === "Enter") enter();
      else if (e.key === "Escape" || e.key === "Backspace") leave();
      else return;
      e.preventDefault();
    });
    [state.row, state.column] = worst();
    draw().then(() => {
      chart.on("plotly_click", (e) => {
        const p = e.points[0];
        place(p.pointIndex ? p.pointIndex[0] : p.y, p.pointIndex ? p.pointIndex[1] : p.x);
        enter();
      });
      chart.on("plotly_hover", (e) => { const p = e.points[0]; readout.textContent = describe(rows()[Math.round(p.y)], Math.round(p.x)); });
      chart.on("plotly_unhover", () => { readout.textContent = describe(rows()[state.row], state.column); });
      chart.dataset.ready = "1";
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    a.paper.follow(draw);
  };
})();
