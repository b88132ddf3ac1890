// What the page's scripts share: unpacking of the data blocks (gzip as base64), numbers as text, colours of an error.
(function () {
  "use strict";
  async function unpack(id) {
    const binary = atob(document.getElementById(id).textContent.trim());
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }
  function number(x, digits) {
    if (x === null || x === undefined) return "–";
    if (typeof x !== "number") return String(x);
    if (x === 0) return "0";
    if (Number.isInteger(x) && Math.abs(x) < 1e15) return String(x);
    const a = Math.abs(x);
    return a < 1e-4 || a >= 1e6 ? x.toExponential(digits - 1) : String(+x.toPrecision(digits));
  }
  const times = (x) => (x === "Inf" || x === Infinity || x === "NaN" ? "∞" : number(x, 3) + "×");
  // Error over limit → one of the steps of the scale in page.css; 0: no error, 6 and more: beyond the limit.
  const STEPS = [0.003, 0.03, 0.1, 0.3, 1, 3, 30];
  function step(ratio) {
    if (ratio === null || ratio === undefined || ratio < 0) return null;
    if (typeof ratio !== "number") return STEPS.length + 1;
    if (ratio === 0) return 0;
    const at = STEPS.findIndex((s) => ratio <= s);
    return at < 0 ? STEPS.length + 1 : at + 1;
  }
  function element(tag, className, text) {
    const e = document.createElement(tag);
    if (className) e.className = className;
    if (text !== undefined) e.textContent = text;
    return e;
  }
  window.accprobe = { unpack, number, times, step, STEPS, element, parts: {} };
})();
