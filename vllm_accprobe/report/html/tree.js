// The module tree, coloured by the worst output error of each subtree; an ARIA tree, filled as it is opened.
(function () {
  "use strict";
  const a = window.accprobe;
  a.parts.tree = function (data) {
    const root = document.getElementById("tree");
    const origins = new Map(data.origins.map((name, i) => [name, i]).reverse());
    const top = { name: "", path: "", kids: new Map(), cls: "", worst: -1, failed: 0, pairs: 0, origin: false };
    const asNumber = (x) => (typeof x === "number" ? x : Infinity);
    for (const [tap, cls, , worst, failed, pairs] of data.taps) {
      const parts = tap.split(".");
      let node = top, path = "";
      for (let i = -1; i < parts.length; i++) {
        if (i >= 0) {
          path = path ? path + "." + parts[i] : parts[i];
          if (!node.kids.has(parts[i])) node.kids.set(parts[i], { name: parts[i], path, kids: new Map(), cls: "", worst: -1, failed: 0, pairs: 0, origin: false });
          node = node.kids.get(parts[i]);
        }
        node.worst = Math.max(node.worst, asNumber(worst));
        node.failed += failed;
        node.pairs += pairs;
        node.origin ||= origins.has(tap);
      }
      node.cls = cls;
    }
    // A chain of single children is one line: model.visual.blocks
    function folded(node) {
      let name = node.name;
      while (node.kids.size === 1 && !node.cls) {
        node = node.kids.values().next().value;
        name += "." + node.name;
      }
      return [name, node];
    }
    function item(shown, level) {
      const [name, node] = folded(shown);
      const li = a.element("li"), row = a.element("div", "node"), kids = node.kids.size;
      li.setAttribute("role", "treeitem");
      li.setAttribute("aria-level", String(level));
      li.setAttribute("aria-selected", "false");
      li.tabIndex = -1;
      li.node = node;
      li.dataset.path = node.path;
      if (kids) li.setAttribute("aria-expanded", "false");
      row.style.paddingInlineStart = 6 + (level - 1) * 14 + "px";
      row.append(a.element("span", "twist", kids ? "▸" : ""));
      const dot = a.element("span", "dot step" + (a.step(node.worst) ?? "none"));
      row.append(dot, a.element("span", "label", name));
      const mark = origins.get(node.path);
      if (mark !== undefined) row.append(a.element("span", "mark", mark === 0 ? "culprit" : "origin " + (mark + 1)));
      else if (node.cls) row.append(a.element("span", "kind", node.cls));
      const worst = node.worst < 0 ? "skipped" : node.worst === 0 ? "no error" : a.times(node.worst);
      row.append(a.element("span", "worst" + (node.worst > 1 ? " bad" : ""), worst));
      li.setAttribute("aria-label", name + (mark !== undefined ? (mark === 0 ? ", culprit" : ", origin") : "") + ", " + worst + (node.worst > 0 ? " the limit" : "") + ", " + node.failed + " of " + node.pairs + " pairs failed");
      row.title = node.path + (node.cls ? " (" + node.cls + ")" : "") + ": " + node.failed + " of " + node.pairs + " pairs failed";
      li.append(row);
      return li;
    }
    function open(li, yes) {
      if (!li.hasAttribute("aria-expanded")) return;
      li.setAttribute("aria-expanded", String(yes));
      li.firstChild.firstChild.textContent = yes ? "▾" : "▸";
      const old = li.querySelector(":scope > ul");
      if (old) old.remove();
      if (yes) {
        const ul = a.element("ul");
        ul.setAttribute("role", "group");
        for (const kid of li.node.kids.values()) ul.append(item(kid, Number(li.getAttribute("aria-level")) + 1));
        li.append(ul);
      }
    }
    const items = () => [...root.querySelectorAll("[role=treeitem]")];
    let current = null;
    function focus(li, take) {
      if (!li) return;
      if (current) { current.tabIndex = -1; current.setAttribute("aria-selected", "false"); }
      current = li;
      li.tabIndex = 0;
      li.setAttribute("aria-selected", "true");
      if (take) li.focus({ preventScroll: true });
      const row = li.firstChild.getBoundingClientRect(), box = root.getBoundingClientRect();
      if (row.top < box.top || row.bottom > box.bottom) root.scrollTop += row.top - box.top - box.height / 3;
    }
    const choose = (li) => a.showTap(li.node.path, { under: true, scroll: false, open: false });

    if (!top.kids.size) root.append(a.element("li", "none", "There are no pairs."));
    for (const kid of top.kids.values()) root.append(item(kid, 1));
    // Opened down to the culprit, or while there is only one way to go.
    const target = data.origins[0];
    for (let li = root.firstElementChild, guard = 0; li && li.node && guard < 100; guard++) {
      const list = [...li.parentElement.children];
      const on = target === undefined ? (list.length === 1 ? li : null) : list.find((x) => target === x.node.path || target.startsWith(x.node.path + "."));
      if (!on) break;
      focus(on, false);
      if (on.node.path === target) break;
      open(on, true);
      li = on.querySelector(":scope > ul > li");
    }
    if (!current && root.firstElementChild.node) focus(root.firstElementChild, false);
    else root.scrollTop = Math.max(0, root.scrollTop);

    root.addEventListener("click", (e) => {
      const li = e.target.closest("[role=treeitem]");
      if (!li) return;
      focus(li, true);
      if (e.target.classList.contains("twist") && li.hasAttribute("aria-expanded")) open(li, li.getAttribute("aria-expanded") !== "true");
      else { if (li.getAttribute("aria-expanded") === "false") open(li, true); choose(li); }
    });
    root.addEventListener("keydown", (e) => {
      const li = e.target.closest("[role=treeitem]");
      if (!li || e.ctrlKey || e.metaKey || e.altKey) return;
      const all = items(), at = all.indexOf(li), opened = li.getAttribute("aria-expanded");
      if (e.key === "ArrowDown") focus(all[at + 1], true);
      else if (e.key === "ArrowUp") focus(all[at - 1], true);
      else if (e.key === "Home") focus(all[0], true);
      else if (e.key === "End") focus(all[all.length - 1], true);
      else if (e.key === "ArrowRight") { if (opened === "false") open(li, true); else if (opened) focus(all[at + 1], true); }
      else if (e.key === "ArrowLeft") { if (opened === "true") open(li, false); else focus(li.parentElement.closest("[role=treeitem]"), true); }
      else if (e.key === "Enter" || e.key === " ") choose(li);
      else if (e.key.length === 1) {
        const next = [...all.slice(at + 1), ...all.slice(0, at + 1)].find((x) => x.node.name.toLowerCase().startsWith(e.key.toLowerCase()));
        focus(next, true);
      } else return;
      e.preventDefault();
    });
  };
})();
