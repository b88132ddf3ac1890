// Where a module's code is, and the operators that it called in a pair's step, in order, each with its error: pairs whose
// taps are "<module>::<operator>". A row opens the operator's worst pair.
(function () {
  "use strict";
  const a = window.accprobe, MOST = 60, BAD = { fail: 2, pass: 1, skip: 0 };
  const size = (x) => (x === null ? -1 : typeof x === "number" ? x : Infinity);
  function worst(pairs) {
    return pairs.reduce((w, i) => (w === null || size(a.pairs.over(i)) > size(a.pairs.over(w)) ? i : w), null);
  }
  function text(pairs) {
    const w = worst(pairs), x = w === null ? null : a.pairs.over(w);
    return x === null ? "–" : pairs.every((i) => a.pairs.at("identical", i) === true) ? "identical" : a.times(x);
  }
  // The calls of the module's operators: [[call, its pairs]], in order.
  function calls(module, step) {
    const out = new Map();
    for (const i of a.pairs.below(module + "::", step)) {
      const key = a.pairs.at("tap", i) + "#" + a.pairs.at("call", i);
      if (!out.has(key)) out.set(key, []);
      out.get(key).push(i);
    }
    return [...out.values()];
  }
  // into: the element to fill; i: the pair that is shown; looks: with code, where each tap's code is, and around.
  a.parts.operators = function (into, i, tap, looks) {
    const module = tap.split("::")[0], found = calls(module, a.pairs.at("step", i));
    if (Object.hasOwn(looks.code, module)) {
      const p = into.appendChild(a.element("p", "hint code", "Code: "));
      p.append(a.element("code", "", looks.code[module]));
    }
    if (!found.length) {
      if (looks.around.some((o) => o.module === tap)) into.append(a.element("p", "hint", "No operators of this module are here: VLLM_ACCPROBE_OPS=1 on both sides captures them."));
      return;
    }
    const box = into.appendChild(a.element("div", "worst-rows operators")), shown = found.slice(0, MOST);
    box.append(a.element("h3", "", "Operators of " + module + " in step " + a.pairs.at("step", i) + ", in order: " + (found.length > MOST ? MOST + " of " : "") + found.length));
    const t = box.appendChild(a.element("table")), head = t.createTHead().insertRow(), body = t.createTBody();
    ["Operator", "Call", "Inputs × limit", "Outputs × limit", "Status"].forEach((h, k) => { const th = a.element("th", k > 0 && k < 4 ? "num" : "", h); th.scope = "col"; head.append(th); });
    for (const pairs of shown) {
      const into_it = pairs.filter((p) => a.pairs.at("role", p).startsWith("input")), out = pairs.filter((p) => !into_it.includes(p));
      const status = pairs.map((p) => a.pairs.at("status", p)).reduce((x, y) => (BAD[y] > BAD[x] ? y : x)), opens = worst(out.length ? out : pairs);
      const tr = body.insertRow(), b = a.element("button", "link", a.pairs.at("tap", pairs[0]).slice(module.length + 2));
      b.type = "button";
      b.addEventListener("click", () => a.showPair(opens));
      if (status === "fail") tr.className = "bad";
      if (pairs.includes(i)) tr.setAttribute("aria-current", "true");
      tr.append(a.element("td"), ...[String(a.pairs.at("call", pairs[0])), text(into_it), text(out), status].map((x, k) => a.element("td", k < 3 ? "num" : "st " + status, x)));
      tr.firstChild.append(b);
    }
  };
})();
