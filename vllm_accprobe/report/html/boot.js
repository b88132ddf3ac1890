// Unpack, then start each part of the page: the table first, because it needs no chart library.
(async function () {
  "use strict";
  const a = window.accprobe;
  try {
    const pairs = JSON.parse(await a.unpack("pairs-json"));
    const rest = a.unpack("view-json");
    const view = JSON.parse(await rest);
    a.parts.table(pairs, view.looks);
    a.parts.tree(view.tree);
    a.parts.first();
    a.parts.clicks(view.tree.origins);
    const packed = document.getElementById("plotly-js");
    if (packed) {
      const script = document.createElement("script");
      script.textContent = await a.unpack("plotly-js");
      document.head.append(script);
    }
    if (window.Plotly) {
      a.parts.chart(view.depth);
      a.parts.heat(view.heat);
    }
    a.link.start();
    document.body.dataset.ready = "1";
  } catch (error) {
    const p = a.element("p", "missing", "This browser cannot unpack the page (" + error.message + "). The numbers are in compare.csv.");
    document.querySelector("main").prepend(p);
    console.error(error);
  }
})();
