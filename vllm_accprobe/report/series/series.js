// Filters the taps, and shows which row is which line. All text is on the page already; nothing becomes markup.
(function () {
  "use strict";
  const rows = [...document.querySelectorAll("#taps tbody tr")], find = document.getElementById("find");
  const shown = document.getElementById("shown"), readout = document.getElementById("series-readout");
  const line = (tap) => document.getElementById("line-" + tap);
  const texts = rows.map((r) => r.firstElementChild.textContent.toLowerCase());
  function refresh() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let n = 0;
    rows.forEach((row, i) => {
      const ok = words.every((w) => texts[i].includes(w)), own = line(row.dataset.tap);
      row.hidden = !ok;
      if (own) own.toggleAttribute("hidden", !ok);
      n += ok;
    });
    shown.textContent = n.toLocaleString("en") + (n === 1 ? " tap" : " taps") + (n < rows.length ? " of " + rows.length.toLocaleString("en") : "");
  }
  let on = null;
  function point(tap) {
    for (const [id, yes] of [[on, false], [tap, true]]) {
      if (id === null || id === undefined) continue;
      const row = document.getElementById("tap-" + id);
      if (line(id)) line(id).classList.toggle("on", yes);
      if (row) row.classList.toggle("on", yes);
    }
    on = tap;
    const row = document.getElementById("tap-" + tap);
    if (row) readout.textContent = [...row.children].map((c) => c.textContent.trim()).join("  ");
  }
  for (const part of document.querySelectorAll("[data-tap]")) {
    part.addEventListener("mouseenter", () => point(part.dataset.tap));
    part.addEventListener("focus", () => point(part.dataset.tap));
  }
  for (const g of document.querySelectorAll("#series-chart g.line")) {
    g.addEventListener("click", () => { const row = document.getElementById("tap-" + g.dataset.tap); if (row) { row.scrollIntoView({ block: "center" }); row.focus({ preventScroll: true }); } });
  }
  find.addEventListener("input", refresh);
  refresh();
  document.body.dataset.ready = "1";
})();
