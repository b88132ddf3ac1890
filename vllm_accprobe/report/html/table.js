// The table of pairs: filter, sort, and only the rows that are seen as elements of the page.
// Text from the dumps reaches the page through textContent and title alone, never as markup.
(function () {
  "use strict";
  const a = window.accprobe, number = a.number;
  a.parts.table = function (data, looks) {
  const ROW = 26, SPARE = 12;
  const $ = (id) => document.getElementById(id);
  const box = $("grid-box"), grid = $("grid"), body = $("body"), head = $("head");

  // One column in whichever of its three forms: see columns.py.
  function column(name) {
    const c = data.cols[name];
    if (!c) return { at: () => null };
    if (c.v) return { at: (i) => c.v[i], v: c.v };
    if (c.i) return { at: (i) => c.d[c.i[i]], d: c.d, i: c.i };
    return { at: () => c.c, d: [c.c] };
  }
  const names = Object.keys(data.cols);
  const col = Object.fromEntries(names.map((n) => [n, column(n)]));

  const value = (i) => { const w = col.worst_row_rel_l2.at(i); return w === null ? col.rel_l2.at(i) : w; };
  const MEASURES = { row_rel_l2: "row L2", row_norm_ratio: "norm ratio", element: "element", created: "created", exact: "equality", nonfinite: "NaN/Inf" };
  function over(i) {                // as facts.severity: who failed by something else than its measure reaches its limit
    const x = reach(i);
    return col.status.at(i) !== "fail" ? x : x === null ? "Inf" : typeof x === "number" ? Math.max(x, 1) : x;
  }
  function reach(i) {
    if (col.status.at(i) === "skip") return null;
    if (col.nonfinite_mismatch.at(i) > 0) return "Inf";
    const measure = col.measure.at(i), x = col.measured.at(i), allowed = col.allowed.at(i);
    if (typeof x === "number" && allowed > 0) return (measure === "row_norm_ratio" ? Math.abs(x - 1) : x) / allowed;
    const v = value(i), l = col.limit.at(i);
    if (typeof v !== "number" || typeof l !== "number") return v === "NaN" || v === "Inf" ? "Inf" : null;
    return l > 0 ? v / l : v > 0 ? "Inf" : 0;
  }
  function where(i) {
    const r = col.worst_request.at(i), p = col.worst_position.at(i);
    return [r, p].filter((x) => x !== null && x !== undefined).join(" @ ");
  }
  const asNumber = (x) => (x === null || x === undefined ? -Infinity : typeof x === "number" ? x : x === "-Inf" ? -Number.MAX_VALUE : Infinity);
  const rank = { fail: 2, pass: 1, skip: 0 };

  // key: number to sort by; text: what the cell shows; prio p2, p3: hidden on narrower pages.
  // unless: a column that says nothing here is left out.
  const COLUMNS = [
    { id: "status", label: "Status", w: 62, cls: "st", text: (i) => col.status.at(i), key: (i) => rank[col.status.at(i)] ?? 3, down: true },
    { id: "order", label: "Tap", w: 0, cls: "name", text: (i) => col.tap.at(i) + (col.call.at(i) ? " #" + col.call.at(i) : ""), tip: nameTip, key: (i) => asNumber(col.order.at(i)) },
    { id: "role", label: "Tensor", w: 112, cls: "name", text: (i) => col.role.at(i), text_key: "role" },
    { id: "step", label: "Step", w: 56, num: true, text: (i) => number(col.step.at(i), 6), key: (i) => asNumber(col.step.at(i)) },
    { id: "rank", label: "Rank", w: 56, num: true, prio: "p3", unless: col.rank.d || (col.rank.v && !col.rank.v.some((x) => x !== 0)), text: (i) => number(col.rank.at(i), 6), key: (i) => asNumber(col.rank.at(i)) },
    { id: "phase", label: "Phase", w: 68, prio: "p2", text: (i) => col.phase.at(i) ?? "–", text_key: "phase" },
    { id: "shape", label: "Shape", w: 96, prio: "p3", text: (i) => col.shape.at(i) ?? "–", text_key: "shape" },
    { id: "over", label: "× limit", w: 74, num: true, cls: "over", text: (i) => { const x = over(i); return x === null ? "–" : x === "Inf" ? "∞" : number(x, 3); }, key: (i) => asNumber(over(i)), down: true },
    { id: "measure", label: "Measure", w: 82, prio: "p2", unless: !col.measure.d || col.measure.d.every((x) => x === null), text: (i) => (col.status.at(i) === "skip" ? "–" : MEASURES[col.measure.at(i)] ?? "row L2"), text_key: "measure", tip: (i) => col.message.at(i) || "" },
    { id: "value", label: "Value", w: 78, num: true, text: (i) => number(col.measured.at(i) ?? value(i), 4), key: (i) => asNumber(col.measured.at(i) ?? value(i)), down: true, tip: (i) => "relative L2 of the worst row: " + number(value(i), 4) },
    { id: "limit", label: "Limit", w: 82, num: true, prio: "p2", text: (i) => (col.measure.at(i) === "row_norm_ratio" ? "1 ± " : "") + number(col.allowed.at(i) ?? col.limit.at(i), 2), key: (i) => asNumber(col.allowed.at(i) ?? col.limit.at(i)), down: true },
    { id: "cosine", label: "Cosine", w: 86, num: true, prio: "p2", text: (i) => number(col.cosine.at(i), 6), key: (i) => { const x = asNumber(col.cosine.at(i)); return x === -Infinity ? Infinity : x; } },
    { id: "max_abs_err", label: "Max abs", w: 82, num: true, prio: "p3", text: (i) => number(col.max_abs_err.at(i), 3), key: (i) => asNumber(col.max_abs_err.at(i)), down: true },
    { id: "where", label: "Worst at", w: 96, prio: "p3", text: (i) => where(i) || "–", key: (i) => asNumber(col.worst_position.at(i)) },
    { id: "message", label: "Message", w: 170, prio: "p3", unless: (col.message.d && !col.message.d.some(Boolean)) || (col.measure.d && col.measure.d.some(Boolean)), text: (i) => col.message.at(i) || "", text_key: "message" },
  ].filter((c) => !c.unless);
  function nameTip(i) {
    const g = col.golden.at(i), m = col.mine.at(i);
    return (g === m ? g : g + "  ↔  " + m) + (col.cls.at(i) ? "  (" + col.cls.at(i) + ")" : "");
  }

  // -- what is shown
  const state = { words: [], status: "all", tap: null, under: false, steps: null, sort: "order", down: false, at: -1 };
  let view = new Uint32Array(0);

  function ranks(name) {            // text columns sort by the place of their text in the sorted dictionary
    const c = col[name];
    const sorted = [...c.d.keys()].sort((a, b) => String(c.d[a] ?? "").localeCompare(String(c.d[b] ?? ""), "en", { numeric: true }));
    const place = new Float64Array(c.d.length);
    sorted.forEach((d, k) => { place[d] = k; });
    return c.i ? (i) => place[c.i[i]] : () => 0;
  }
  function matches(words) {         // per word: which texts of which columns hold it; a row needs every word somewhere
    const searched = ["golden", "mine", "cls", "message", "status", "phase", "worst_request", "dtype_golden", "dtype_mine", "rule"].map((n) => col[n]).filter((c) => c.d);
    return words.map((w) => searched.map((c) => ({ i: c.i, hit: c.d.map((t) => t !== null && String(t).toLowerCase().includes(w)) })));
  }
  function refresh() {
    const tests = matches(state.words), n = data.n, out = new Uint32Array(n);
    const wanted = (t) => t === state.tap || (state.under && t.startsWith(state.tap + "."));
    const tapAt = state.tap === null ? null : (col.tap.d ?? [col.tap.at(0)]).map(wanted);
    let m = 0;
    const counts = { all: 0, fail: 0, pass: 0, skip: 0 };
    for (let i = 0; i < n; i++) {
      if (tapAt && !tapAt[col.tap.i ? col.tap.i[i] : 0]) continue;
      if (state.steps) { const at = col.step.at(i); if (at === null || at < state.steps[0] || at > state.steps[1]) continue; }
      let ok = true;
      for (let t = 0; ok && t < tests.length; t++) ok = tests[t].some((c) => c.hit[c.i ? c.i[i] : 0]);
      if (!ok) continue;
      const s = col.status.at(i);
      counts.all++;
      counts[s] = (counts[s] || 0) + 1;
      if (state.status === "all" || s === state.status) out[m++] = i;
    }
    const spec = COLUMNS.find((c) => c.id === state.sort);
    const key = spec.text_key ? ranks(spec.text_key) : spec.key;
    const keys = new Float64Array(n), order = Float64Array.from({ length: n }, (_, i) => asNumber(col.order.at(i)));
    view = out.slice(0, m);
    for (const i of view) keys[i] = key(i);
    const sign = state.down ? -1 : 1;
    view.sort((a, b) => (keys[a] === keys[b] ? order[a] - order[b] || a - b : sign * (keys[a] < keys[b] ? -1 : 1)));
    state.at = -1;
    for (const b of $("status").children) {
      b.setAttribute("aria-pressed", String(b.value === state.status));
      b.lastChild.textContent = (counts[b.value] || 0).toLocaleString("en");
    }
    $("shown").textContent = m.toLocaleString("en") + (m === 1 ? " pair" : " pairs") + (m < n ? " of " + n.toLocaleString("en") : "");
    $("tap-chip").hidden = state.tap === null;
    $("tap-chip").textContent = state.tap === null ? "" : chipText() + "  ✕";
    $("tap-chip").setAttribute("aria-label", "Remove the filter on " + chipText());
    for (const th of head.children) {
      th.setAttribute("aria-sort", th.dataset.id === state.sort ? (state.down ? "descending" : "ascending") : "none");
    }
    grid.setAttribute("aria-rowcount", String(m + 1));
    box.style.height = "min(62vh, 640px, " + (44 + Math.max(m, 2) * ROW) + "px)";
    box.scrollTop = 0;
    draw();
  }

  function chipText() {
    const steps = state.steps, at = !steps ? "" : steps[0] === steps[1] ? ", step " + steps[0] : ", steps " + steps[0] + "–" + steps[1];
    return (state.under ? "under " : "tap ") + state.tap + at;
  }

  // -- drawing
  function spacer(height) {
    const tr = document.createElement("tr");
    tr.className = "space";
    tr.setAttribute("aria-hidden", "true");
    const td = tr.appendChild(document.createElement("td"));
    td.style.height = height + "px";
    return tr;
  }
  function drawRow(k) {
    const i = view[k], tr = document.createElement("tr"), s = col.status.at(i);
    tr.className = "row" + (s === "fail" || s === "pass" || s === "skip" ? " " + s : "") + (k === state.at ? " at" : "");
    tr.id = "r" + k;
    tr.dataset.k = k;
    tr.setAttribute("aria-rowindex", String(k + 2));
    if (k === state.at) tr.setAttribute("aria-selected", "true");
    for (const c of COLUMNS) {
      const td = tr.appendChild(document.createElement("td")), text = String(c.text(i));
      td.className = [c.cls, c.num ? "num" : "", c.prio].filter(Boolean).join(" ");
      td.textContent = text;
      td.title = c.tip ? c.tip(i) : text;
    }
    return tr;
  }
  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
    const last = Math.min(view.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + SPARE);
    const rows = document.createDocumentFragment();
    if (first > 0) rows.append(spacer(first * ROW));
    for (let k = first; k < last; k++) rows.append(drawRow(k));
    if (last < view.length) rows.append(spacer((view.length - last) * ROW));
    if (!view.length) {
      const tr = document.createElement("tr"), td = tr.appendChild(document.createElement("td"));
      td.colSpan = [...head.children].filter((th) => th.offsetParent !== null).length;
      td.className = "none";
      td.textContent = data.n ? "No pair matches. Clear the filter, or choose another status." : "There are no pairs.";
      rows.append(tr);
    }
    body.replaceChildren(rows);
    if (state.at >= first && state.at < last) grid.setAttribute("aria-activedescendant", "r" + state.at);
    else grid.removeAttribute("aria-activedescendant");
  }
  let waiting = false;
  box.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }, { passive: true });
  window.addEventListener("resize", draw);

  // -- one pair with all its fields
  function show(k) {
    const i = view[k], panel = $("detail"), dl = document.createElement("dl"), top = document.createElement("div");
    top.className = "top";
    const title = top.appendChild(document.createElement("code"));
    title.textContent = nameTip(i);
    const close = top.appendChild(document.createElement("button"));
    close.type = "button";
    close.textContent = "Close";
    close.addEventListener("click", hide);
    for (const name of names) {
      if (name === "golden" || name === "mine") continue;
      const x = col[name].at(i), div = dl.appendChild(document.createElement("div"));
      if (name === "message") { if (!x) { div.remove(); continue; } div.className = "wide"; }
      div.appendChild(document.createElement("dt")).textContent = name.replaceAll("_", " ");
      div.appendChild(document.createElement("dd")).textContent = typeof x === "number" ? number(x, name === "cosine" ? 10 : 6) : x === null ? "–" : String(x);
    }
    panel.replaceChildren(top);
    const opened = panel.hidden;
    panel.hidden = false;
    a.parts.pair(panel, i, looks, col.tap.at(i), col.role.at(i));
    const all = panel.appendChild(document.createElement("details"));
    all.open = !panel.querySelector("table, figure, .shape");
    all.appendChild(document.createElement("summary")).textContent = "All fields";
    all.append(dl);
    if (opened) panel.scrollIntoView({ block: "nearest" });
  }
  function hide() {
    $("detail").hidden = true;
    grid.focus({ preventScroll: true });
  }
  function move(k, open) {
    if (!view.length) return;
    state.at = Math.max(0, Math.min(view.length - 1, k));
    const y = state.at * ROW, seen = box.clientHeight - 32 - ROW;
    if (y < box.scrollTop) box.scrollTop = y;
    else if (y > box.scrollTop + seen) box.scrollTop = y - seen;
    draw();
    if (open || !$("detail").hidden) show(state.at);
  }
  body.addEventListener("click", (e) => {
    const tr = e.target.closest("tr.row");
    if (tr && !String(getSelection())) move(Number(tr.dataset.k), true);
  });
  grid.addEventListener("keydown", (e) => {
    if (e.target !== grid || e.ctrlKey || e.metaKey || e.altKey) return;
    const page = Math.max(1, Math.floor(box.clientHeight / ROW) - 2);
    const to = { ArrowDown: state.at + 1, ArrowUp: state.at - 1, PageDown: state.at + page, PageUp: state.at - page, Home: 0, End: view.length - 1 }[e.key];
    if (to !== undefined) move(to, false);
    else if (e.key === "Enter" && state.at >= 0) show(state.at);
    else if (e.key === "Escape") hide();
    else return;
    e.preventDefault();
  });
  $("detail").addEventListener("keydown", (e) => { if (e.key === "Escape") hide(); });

  // -- controls
  for (const c of COLUMNS) {
    const colEl = $("cols").appendChild(document.createElement("col"));
    if (c.w) colEl.style.width = c.w + "px";
    if (c.prio) colEl.className = c.prio;
    const th = head.appendChild(document.createElement("th")), b = th.appendChild(document.createElement("button"));
    th.dataset.id = c.id;
    th.scope = "col";
    th.className = [c.num ? "num" : "", c.prio].filter(Boolean).join(" ");
    b.type = "button";
    b.textContent = c.label;
    b.title = c.id === "order" ? "Sort in data-flow order" : "Sort by " + c.label.toLowerCase();
    b.addEventListener("click", () => {
      if (state.sort === c.id) state.down = !state.down;
      else { state.sort = c.id; state.down = Boolean(c.down); }
      refresh();
    });
  }
  for (const s of ["all", "fail", "pass", "skip"]) {
    const b = $("status").appendChild(document.createElement("button"));
    b.type = "button";
    b.value = s;
    b.append(s + " ", document.createElement("small"));
    b.addEventListener("click", () => { state.status = s; refresh(); });
  }
  let timer = 0;
  $("find").addEventListener("input", (e) => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.words = e.target.value.toLowerCase().split(/\s+/).filter(Boolean); refresh(); }, 120);
  });
  $("tap-chip").addEventListener("click", () => { Object.assign(state, { tap: null, under: false, steps: null }); refresh(); $("find").focus(); });

  // under: also what lies inside; steps: [first, last]; open: the worst of what is shown, with all its fields.
  a.showTap = function (tap, { under = false, steps = null, scroll = false, open = false } = {}) {
    Object.assign(state, { tap, under, steps, status: "all", sort: "order", down: false });
    if (open) Object.assign(state, { sort: "over", down: true });
    refresh();
    if (open && view.length) move(0, true);
    if (scroll) $("pairs").scrollIntoView({ block: "start" });
  };
  const failed = col.status.d && col.status.d.includes("fail");
  if (failed) state.status = "fail";
  refresh();
  };
})();
