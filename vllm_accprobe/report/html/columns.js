// What a pair's row shows: the columns of columns.py read, and the table's columns made of them.
(function () {
  "use strict";
  const a = window.accprobe, number = a.number;
  // data → { names, col: by name, COLUMNS, over, asNumber, nameTip }.
  a.columns = function (data) {
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
  function over(i) {                // as over.severity: who failed reaches its limit, who passed is not endlessly beyond it
    const x = reach(i);
    if (col.status.at(i) === "pass" && x === "Inf" && !(col.nonfinite_mismatch.at(i) > 0)) return 1;
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

  const longest = (c) => (c.d || c.v || []).reduce((most, x) => Math.max(most, String(x ?? "").length), 0);
  const fits = (letters, least, most) => Math.min(most, Math.max(least, Math.round(letters * 7.3) + 18));

  // key: number to sort by; text: what the cell shows; prio p2, p3: hidden on narrower pages; ends: what has no room
  // keeps its end, which says more of a name than its beginning.
  // unless: a column that says nothing here is left out.
  const COLUMNS = [
    { id: "status", label: "Status", w: 76, cls: "st", text: (i) => col.status.at(i), key: (i) => rank[col.status.at(i)] ?? 3, down: true },
    { id: "order", label: "Tap", w: 0, cls: "name", text: (i) => col.tap.at(i) + (col.call.at(i) ? " #" + col.call.at(i) : ""), tip: nameTip, ends: true, key: (i) => asNumber(col.order.at(i)) },
    { id: "role", label: "Tensor", w: fits(longest(col.role), 112, 160), cls: "name", text: (i) => col.role.at(i), text_key: "role" },
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
    { id: "where", label: "Worst at", w: fits(longest(col.worst_request) + 3 + longest(col.worst_position), 96, 150), prio: "p3", text: (i) => where(i) || "–", key: (i) => asNumber(col.worst_position.at(i)) },
    { id: "message", label: "Message", w: 170, prio: "p3", unless: (col.message.d && !col.message.d.some(Boolean)) || (col.measure.d && col.measure.d.some(Boolean)), text: (i) => col.message.at(i) || "", text_key: "message" },
  ].filter((c) => !c.unless);
  if (window.matchMedia("(max-width: 760px)").matches) {   // how bad it is stays in sight where the others scroll
    const [one] = COLUMNS.splice(COLUMNS.findIndex((c) => c.id === "over"), 1);
    COLUMNS.splice(1, 0, one);
    COLUMNS[2].w = 238;                // the name ends where a phone does
  }
  function nameTip(i) {
    const g = col.golden.at(i), m = col.mine.at(i);
    return (g === m ? g : g + "  ↔  " + m) + (col.cls.at(i) ? "  (" + col.cls.at(i) + ")" : "");
  }
  return { names, col, COLUMNS, over, asNumber, nameTip };
  };
})();
