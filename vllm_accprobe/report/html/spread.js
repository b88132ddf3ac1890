// How a pair's values and errors are spread: both histograms in the same bins, the error over position and over column,
// as plain SVG; for a pair without them, the command that shows them.
(function () {
  "use strict";
  const a = window.accprobe, NS = "http://www.w3.org/2000/svg", W = 300, H = 84;
  function bars(values, top, name, tip) {    // values: [height 0..1, class]
    const svg = document.createElementNS(NS, "svg"), step = W / values.length;
    svg.setAttribute("viewBox", "0 0 " + W + " " + H);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", name);
    values.forEach(([height, cls], i) => {
      if (!height) return;
      const r = svg.appendChild(document.createElementNS(NS, "rect")), h = Math.max(1, height * (H - 2));
      for (const [k, v] of [["x", i * step], ["y", H - h], ["width", Math.max(step * 0.9, 0.8)], ["height", h], ["class", cls]]) r.setAttribute(k, v);
      r.appendChild(document.createElementNS(NS, "title")).textContent = tip(i);
    });
    return svg;
  }
  function figure(box, name, svg, left, right, note) {
    const f = box.appendChild(a.element("figure", "spread")), ends = a.element("div", "ends");
    f.append(a.element("figcaption", "", name), svg, ends);
    ends.append(a.element("span", "", left), a.element("span", "", note || ""), a.element("span", "", right));
  }
  function histogram(box, name, s, side) {
    const counts = s[side], n = counts.length - 3, most = Math.max(1, ...s.golden.slice(0, n), ...s.mine.slice(0, n));
    const [low, high] = s.range, size = (high - low) / n, at = (i) => a.number(low + i * size, 3);
    const svg = bars(counts.slice(0, n).map((c) => [c ? Math.log1p(c) / Math.log1p(most) : 0, side]), most, name + ": counts of values, logarithmic", (i) => at(i) + " to " + at(i + 1) + ": " + counts[i]);
    const odd = ["NaN", "+Inf", "−Inf"].map((w, k) => counts[n + k] && counts[n + k] + " " + w).filter(Boolean).join(", ");
    figure(box, name + ", log count", svg, a.number(low, 3), a.number(high, 3), odd);
  }
  function errors(box, name, [peak, parts], first, last, what) {
    const step = (last - first + 1) / parts.length, from = (i) => first + Math.ceil(i * step), to = (i) => Math.max(from(i), first + Math.ceil((i + 1) * step) - 1);
    const value = (p) => (p > 1000 ? "not finite" : a.number((p / 1000) * peak, 3));
    const svg = bars(parts.map((p) => [p < 0 ? 0 : Math.min(p, 1000) / 1000, p > 1000 ? "odd" : "error"]), peak, name + ", at most " + a.number(peak, 3), (i) => what + " " + from(i) + (to(i) > from(i) ? "–" + to(i) : "") + ": " + value(parts[i]));
    figure(box, name, svg, what + " " + first, String(last), "peak " + (parts.includes(1001) ? "∞" : a.number(peak, 3)));
  }
  // A name as a glob that means it: what --taps takes for a list, an exclusion or blanks around is any character, and what
  // the page shows as an escape or leaves out may be anything.
  const literal = (s) => s.replace(/\\(?:x..|u.{4}|U.{8}|.)|…|[*?[]|,|^!|^ | $/g, (c) => ("*?[".includes(c) ? "[" + c + "]" : c[0] === "\\" || c === "…" ? "*" : "?"));
  const folder = (s) => "compare-" + s.replace(/[^\w.-]+/g, "_").slice(0, 80);
  const quoted = (s) => (/^[\w.\/:@%+=,-]+$/.test(s) ? s : "'" + s.replaceAll("'", "'\\''") + "'");
  // looks: with again, the command that compares these dumps, and no_spread, how many pairs have none and why.
  a.parts.spread = function (into, s, looks, tap, role, identical) {
    if (!s && identical) {
      into.append(a.element("p", "hint", "Identical: both sides hold the same values, and no error is there to draw."));
      return;
    }
    if (!s) {
      const left = looks.no_spread.length ? " (without: " + looks.no_spread.join(", ") + ")" : "";
      const kept = Object.keys(looks.spreads).length ? "are kept for the failed pairs of the origins and the worst others" + left : "were not taken: nothing failed, or it was judged again without the tensors" + left;
      const p = a.element("p", "hint", "Histograms, error over position and over column " + kept + "; of this tap alone: ");
      p.append(a.element("code", "again", looks.again + " --taps " + quoted(literal(tap)) + " --out " + folder(tap)));
      into.append(p);
      if (role.startsWith("input")) into.append(a.element("p", "hint", "Of an input only the rows beyond its limit are kept: one that passes has none. The output that it is shows all of them."));
      return;
    }
    const box = into.appendChild(a.element("div", "spreads"));
    histogram(box, "Golden", s, "golden");
    histogram(box, "Mine", s, "mine");
    errors(box, "Row error over position", s.positions, s.ends[0], s.ends[1], "position");
    errors(box, "Error over column ÷ golden’s RMS", s.columns, 0, s.width - 1, "column");
    into.append(a.element("p", "hint", "Histograms and columns from " + (s.read[0] < s.read[1] ? s.read[0] + " of " + s.read[1] : "all " + s.read[1]) + (/^(output|inplace)/.test(role) ? " rows" : " rows beyond the limit (an input's others are not kept)") + ", positions from all of them."));
  };
})();
