// Unpack, then start each part of the page: the table first, which the others point into.
(async function () {
  "use strict";
  const a = window.accprobe;
  try {
    const [pairs, view] = (await Promise.all(["pairs-json", "view-json"].map(a.unpack))).map((text) => JSON.parse(text));
    a.parts.table(pairs, view.looks);
    a.parts.tree(view.tree);
    a.parts.first();
    a.parts.clicks(view.tree.origins);
    a.parts.chart(view.depth);
    a.parts.heat(view.heat);
    a.link.start();
    document.body.dataset.ready = "1";
  } catch (error) {
    const p = a.element("p", "missing", "This browser cannot unpack the page (" + error.message + "). The numbers are in compare.csv.");
    document.querySelector("main").prepend(p);
    console.error(error);
  }
})();
