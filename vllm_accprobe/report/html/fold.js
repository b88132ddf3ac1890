// Ranks folded: of a tensor that many ranks have, one row, the worst of them.
(function () {
  "use strict";
  const a = window.accprobe, MANY = 8;          // from more ranks on they are folded when the page opens
  // columns: of a.columns(data). → { many, of(view): the rows that stand for all, others(i): how many more a row stands for }.
  a.folding = function (data, columns) {
    const { col, over, asNumber } = columns, rank = { fail: 2, pass: 1, skip: 0 };
    const all = new Set();
    for (let i = 0; i < data.n && all.size <= MANY; i++) all.add(col.rank.at(i));
    const key = (i) => [col.tap.i ? col.tap.i[i] : col.tap.at(i), col.role.i ? col.role.i[i] : col.role.at(i), col.call.at(i), col.step.at(i)].join("/");
    let more = new Map();
    function of(view) {
      const worst = new Map(), size = new Map();
      for (const i of view) {
        const k = key(i), old = worst.get(k);
        size.set(k, (size.get(k) ?? 0) + 1);
        if (old === undefined) { worst.set(k, i); continue; }
        const d = (rank[col.status.at(i)] ?? 3) - (rank[col.status.at(old)] ?? 3);
        if (d > 0 || (d === 0 && asNumber(over(i)) > asNumber(over(old)))) worst.set(k, i);
      }
      more = new Map([...worst].map(([k, i]) => [i, size.get(k) - 1]));
      return view.filter((i) => more.has(i));
    }
    return { many: all.size > MANY, of, others: (i) => more.get(i) ?? 0, whole() { more = new Map(); } };
  };
})();
