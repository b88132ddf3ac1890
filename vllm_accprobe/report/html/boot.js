// Unpack, then start each part of the page: the table first, because it needs no chart library.
(async function () {
  "use strict";
  const a = window.accprobe;
  try {
    const packed = document.getElementById("plotly-js");
    // All at once: what is unpacked in the browser's own threads is there when its turn comes.
    const texts = ["pairs-json", "view-json"].map(a.unpack), library = packed ? a.unpack("plotly-js") : null;
    if (library) library.catch(() => {});  // told below, where it is waited for
    const [pairs, view] = (await Promise.all(texts)).map((text) => JSON.parse(text));
    a.parts.table(pairs, view.looks);
    a.parts.tree(view.tree);
    a.parts.first();
    a.parts.clicks(view.tree.origins);
    if (library) {
      const script = document.createElement("script");
      script.textContent = await library;
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
