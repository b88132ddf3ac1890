// The pairs that the table shows, in its order, as a csv file with compare.csv's columns; numbers have the page's digits.
// Text that a spreadsheet would run as a formula gets a leading apostrophe, as in report/table.py.
(function () {
  "use strict";
  const a = window.accprobe, FORMULA = /^[=+\-@\t\r]/, LISTS = { shape: " × ", max_abs_index: ", " }, CHUNK = 4096;
  const NUMBERS = { NaN: "nan", Inf: "inf", "-Inf": "-inf" };
  const quoted = (text) => (/[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
  // numeric: perhaps of a column of numbers, where NaN and infinity are texts.
  function cell(x, numeric, between) {
    if (x === null || x === undefined) return "";
    if (typeof x === "number") return String(x);
    if (typeof x === "boolean") return x ? "True" : "False";
    const text = String(x);
    if (numeric && Object.hasOwn(NUMBERS, text)) return NUMBERS[text];
    if (between) return quoted("[" + (text === "scalar" ? "" : text.split(between).join(", ")) + "]");
    return quoted(FORMULA.test(text) ? "'" + text : text);
  }
  // view: the pairs' numbers on the page; columns: what a.columns gives.
  a.save = function (view, { names, col }) {
    const parts = [names.join(",") + "\n"];
    for (let from = 0; from < view.length; from += CHUNK) {
      const lines = [];
      for (const i of view.subarray(from, from + CHUNK)) lines.push(names.map((n) => cell(col[n].at(i), !col[n].i, LISTS[n])).join(","));
      parts.push(lines.join("\n") + "\n");
    }
    const link = a.element("a"), url = URL.createObjectURL(new Blob(parts, { type: "text/csv;charset=utf-8" }));
    link.href = url;
    link.download = "compare-filtered.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  };
})();
