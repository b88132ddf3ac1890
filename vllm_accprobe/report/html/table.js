// The table of pairs: filter, sort, and only the rows that are seen as elements of the page.
// Text from the dumps reaches the page through textContent and title alone, never as markup.
(function () {
  "use strict";
  const a = window.accprobe, number = a.number;
  a.parts.table = function (data, looks) {
  const ROW = 26, SPARE = 12;
  const $ = (id) => document.getElementById(id);
  const box = $("grid-box"), grid = $("grid"), body = $("body"), head = $("head");

  const columns = a.columns(data), { names, col, COLUMNS, over, asNumber, nameTip } = columns;
  const folding = a.folding(data, columns);

  // -- what is shown
  const state = { words: [], status: "all", tap: null, under: false, steps: null, sort: "order", down: false, at: -1, pair: null, brief: false, folded: folding.many };
  let view = new Uint32Array(0), whole = view;

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
    const sign = state.down ? -1 : 1, worst = new Float64Array(n);
    if (state.sort === "status") for (const i of view) worst[i] = asNumber(over(i));   // of one status the worst first
    const next = (a, b) => (worst[a] === worst[b] ? order[a] - order[b] || a - b : worst[a] > worst[b] ? -1 : 1);
    view.sort((a, b) => (keys[a] === keys[b] ? next(a, b) : sign * (keys[a] < keys[b] ? -1 : 1)));
    whole = view;
    if (state.folded) view = folding.of(whole);
    else folding.whole();
    $("ranks").setAttribute("aria-pressed", String(state.folded));
    state.at = -1;
    for (const b of $("status").children) {
      b.setAttribute("aria-pressed", String(b.value === state.status));
      b.lastChild.textContent = (counts[b.value] || 0).toLocaleString("en");
    }
    $("save").disabled = !m;
    $("shown").textContent = m.toLocaleString("en") + (m === 1 ? " pair" : " pairs") + (m < n ? " of " + n.toLocaleString("en") : "");
    $("tap-chip").hidden = state.tap === null;
    $("tap-chip").textContent = state.tap === null ? "" : chipText() + "  ✕";
    $("tap-chip").setAttribute("aria-label", "Remove the filter on " + chipText());
    for (const th of head.children) {
      th.setAttribute("aria-sort", th.dataset.id === state.sort ? (state.down ? "descending" : "ascending") : "none");
    }
    grid.setAttribute("aria-rowcount", String(view.length + 1));
    size();
    box.scrollTop = 0;
    draw();
    a.link.changed();
  }

  function size() { box.style.height = (state.brief ? "min(36vh, 340px, " : "min(62vh, 640px, ") + (44 + Math.max(view.length, 2) * ROW) + "px)"; }
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
  const LETTER = 7.25;                // pixels of a letter of a name
  const ending = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);
  function drawRow(k, room) {
    const i = view[k], tr = document.createElement("tr"), s = col.status.at(i);
    tr.className = "row" + (s === "fail" || s === "pass" || s === "skip" ? " " + s : "") + (k === state.at ? " at" : "");
    tr.id = "r" + k;
    tr.dataset.k = k;
    tr.setAttribute("aria-rowindex", String(k + 2));
    if (k === state.at) tr.setAttribute("aria-selected", "true");
    for (const c of COLUMNS) {
      const td = tr.appendChild(document.createElement("td")), others = c.id === "rank" ? folding.others(i) : 0;
      const text = String(c.text(i)) + (others ? " +" + others : "");
      td.className = [c.cls, c.num ? "num" : "", c.prio].filter(Boolean).join(" ");
      td.textContent = c.ends && !a.paper.on ? ending(text, room) : text;
      td.title = others ? "The worst of " + (others + 1) + " ranks" : c.tip ? c.tip(i) : text;
    }
    return tr;
  }
  function said(text) {
    const tr = document.createElement("tr"), td = tr.appendChild(document.createElement("td"));
    // Paper has fewer columns than the screen that is measured here, and one too many would take the others' room.
    td.colSpan = a.paper.on ? COLUMNS.filter((c) => !c.prio).length : [...head.children].filter((th) => th.offsetParent !== null).length;
    td.className = "none";
    td.textContent = text;
    return tr;
  }
  function draw() {
    const paper = a.paper.on;
    const first = paper ? 0 : Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
    const last = Math.min(view.length, paper ? a.paper.ROWS : Math.ceil((box.scrollTop + box.clientHeight) / ROW) + SPARE);
    const rows = document.createDocumentFragment(), names = head.querySelector("[data-id=order]");
    const room = Math.max(8, Math.floor((names.clientWidth - 16) / LETTER));
    if (first > 0) rows.append(spacer(first * ROW));
    for (let k = first; k < last; k++) rows.append(drawRow(k, room));
    if (last < view.length && paper) rows.append(said("The first " + last + " of " + view.length.toLocaleString("en") + " pairs; compare.csv has all of them."));
    else if (last < view.length) rows.append(spacer((view.length - last) * ROW));
    if (!view.length) rows.append(said(data.n ? "No pair matches. Clear the filter, or choose another status." : "There are no pairs."));
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
  a.paper.follow(draw);

  // -- one pair with all its fields
  function show(i, scroll = true) {
    const panel = $("detail"), dl = document.createElement("dl"), top = document.createElement("div");
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
      div.appendChild(document.createElement("dd")).textContent = typeof x === "number" ? number(x, name === "cosine" ? 10 : 6) : x === null ? "–" : typeof x === "boolean" ? (x ? "yes" : "no") : String(x);
    }
    panel.replaceChildren(top);
    const opened = panel.hidden;
    state.pair = i;
    panel.hidden = false;
    a.parts.pair(panel, i, looks, col.tap.at(i), col.role.at(i));
    if (state.folded && folding.others(i)) {
      const b = panel.appendChild(document.createElement("button")), at = col.step.at(i);
      b.type = "button";
      b.className = "chip ranks";
      b.textContent = "Show all " + (folding.others(i) + 1) + " ranks of it";
      b.addEventListener("click", () => {
        Object.assign(state, { tap: col.tap.at(i), under: false, steps: at === null ? null : [at, at], folded: false, pair: null });
        $("detail").hidden = true;
        refresh();
        grid.focus({ preventScroll: true });
      });
    }
    const all = panel.appendChild(document.createElement("details"));
    all.open = !panel.querySelector("table, figure, .shape");
    all.appendChild(document.createElement("summary")).textContent = "All fields";
    all.append(dl);
    if (opened && scroll) panel.scrollIntoView({ block: "nearest" });
    a.link.changed();
  }
  function hide() {
    $("detail").hidden = true;
    Object.assign(state, { brief: false, pair: null });
    a.link.changed();
    size();
    draw();
    grid.focus({ preventScroll: true });
  }
  function stand(k) {
    state.at = Math.max(0, Math.min(view.length - 1, k));
    const y = state.at * ROW, seen = box.clientHeight - 32 - ROW;
    if (y < box.scrollTop) box.scrollTop = y;
    else if (y > box.scrollTop + seen) box.scrollTop = y - seen;
    draw();
  }
  function move(k, open) {
    if (!view.length) return;
    stand(k);
    if (open || !$("detail").hidden) show(view[state.at]);
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
    else if (e.key === "Enter" && state.at >= 0) show(view[state.at]);
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
  const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  let timer = 0;
  $("find").addEventListener("input", (e) => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.words = wordsOf(e.target.value); refresh(); }, 120);
  });
  $("tap-chip").addEventListener("click", () => { Object.assign(state, { tap: null, under: false, steps: null, brief: false }); refresh(); $("find").focus(); });

  $("save").addEventListener("click", () => a.save(whole, columns));
  $("ranks").hidden = !folding.many;
  $("ranks").addEventListener("click", () => { state.folded = !state.folded; refresh(); });

  // Failures first, the worst of them first. under: also what lies inside; steps: [first, last]; open: the first one,
  // in a table that leaves room for it.
  a.showTap = function (tap, { under = false, steps = null, scroll = true, open = true } = {}) {
    Object.assign(state, { tap, under, steps, status: "all", sort: "status", down: true, brief: open });
    state.pair = null;
    $("detail").hidden = true;
    refresh();
    if (open && view.length) { stand(0); show(view[0], false); }
    if (scroll) $("pairs").scrollIntoView({ block: "start" });
  };
  // For the other parts of the page: what a pair says, and all pairs of a step whose taps begin so, in data-flow order.
  a.pairs = {
    at: (name, i) => col[name].at(i),
    over,
    below(prefix, step) {
      const c = col.tap, own = (c.d ?? [c.at(0)]).map((t) => t.startsWith(prefix)), out = [];
      if (own.some(Boolean)) for (let i = 0; i < data.n; i++) if (own[c.i ? c.i[i] : 0] && col.step.at(i) === step) out.push(i);
      return out.sort((x, y) => asNumber(col.order.at(x)) - asNumber(col.order.at(y)) || x - y);
    },
  };
  // i: a pair's number on the page; it is shown among the pairs of its tap.
  a.showPair = function (i) {
    $("find").value = "";
    Object.assign(state, { words: [], tap: col.tap.at(i), under: false, steps: null, status: "all", brief: false });
    refresh();
    if (view.indexOf(i) < 0) { state.folded = false; refresh(); }
    move(view.indexOf(i), true);
    grid.focus({ preventScroll: true });
  };
  const usual = col.status.d && col.status.d.includes("fail") ? "fail" : "all";
  state.status = usual;
  refresh();

  a.link.part({
    keys: ["find", "tap", "under", "steps", "ranks", "status", "sort", "pair"],
    get() {
      const sort = (state.down ? "-" : "") + state.sort;
      return [["find", state.words.join(" ")], ["tap", state.tap], ["under", state.tap !== null && state.under ? 1 : null], ["steps", state.steps && state.steps.join("..")],
        ["ranks", state.folded === folding.many ? null : "all"],
        ["status", state.status === usual ? null : state.status], ["sort", sort === "order" ? null : sort], ["pair", state.pair]];
    },
    set(q) {
      const under = q.get("under") === "1", tap = q.get("tap"), steps = /^(-?\d{1,9})\.\.(-?\d{1,9})$/.exec(q.get("steps") ?? "");
      const known = tap !== null && (col.tap.d ?? []).some((t) => t === tap || (under && String(t).startsWith(tap + ".")));
      const [, minus, by] = /^(-?)(\w+)$/.exec(q.get("sort") ?? "") ?? [], sort = COLUMNS.some((c) => c.id === by);
      const status = ["all", "fail", "pass", "skip"].includes(q.get("status")) ? q.get("status") : usual;
      const find = (q.get("find") ?? "").slice(0, 400), pair = a.link.whole(q.get("pair"), data.n);
      $("find").value = find;
      Object.assign(state, { words: wordsOf(find), tap: known ? tap : null, under: known && under, steps: known && steps ? [Number(steps[1]), Number(steps[2])] : null,
        folded: folding.many && q.get("ranks") !== "all", status, sort: sort ? by : "order", down: sort && minus === "-", brief: pair !== null, pair: null });
      $("detail").hidden = true;
      refresh();
      if (pair !== null) {
        const k = view.indexOf(pair);
        if (k >= 0) stand(k);
        show(pair, false);
      }
      if (pair !== null || known) $("pairs").scrollIntoView({ block: "start" });
    },
  });
  };
})();
