// Whatever stands for an origin (the culprit's name, its line among the origins, or any element with data-origin="0",
// counted from 0) shows that origin's pairs, failures first, the worst one open.
(function () {
  "use strict";
  const a = window.accprobe;
  // origins: their taps.
  a.parts.clicks = function (origins) {
    const mark = (e, i) => { if (e && e.dataset.origin === undefined) e.dataset.origin = String(i); };
    mark(document.querySelector("h1 .culprit"), 0);
    document.querySelectorAll("section[aria-labelledby=h-origins] tbody tr").forEach((tr, i) => mark(tr.querySelector("code"), i));
    for (const e of document.querySelectorAll("[data-origin]")) {
      if (!/^(A|BUTTON)$/.test(e.tagName)) { e.setAttribute("role", "button"); e.tabIndex = 0; }
      e.title ||= "Show its pairs, failures first, the worst one open";
    }
    function show(e) {
      const chosen = e.target.closest("[data-origin]"), tap = chosen && origins[Number(chosen.dataset.origin)];
      if (tap === undefined || tap === null || (e.type === "click" && String(getSelection()))) return;
      e.preventDefault();
      a.showTap(tap);
    }
    document.addEventListener("click", show);
    document.addEventListener("keydown", (e) => { if ((e.key === "Enter" || e.key === " ") && !/^(A|BUTTON)$/.test(e.target.tagName)) show(e); });
  };
})();
