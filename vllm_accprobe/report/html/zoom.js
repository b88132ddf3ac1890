// Zoom and pan of a drawing along its horizontal axis, with Perfetto's keys: w and s or Ctrl and wheel zoom, a and d or
// Shift and drag pan, a plain drag zooms into a part, 0 shows all again; on a touch screen two fingers zoom and one pans.
(function () {
  "use strict";
  const a = window.accprobe, DRAGGED = 5, CLOSER = 0.7, PART = 0.2;   // pixels of a drag; of a key: the new span, the part that moves
  // box: the element with the drawing, whose part with class "area" can be dragged. axis: { range() and whole() → [low,
  // high], least: the smallest span, ends() → [left, right] of the axis in pixels of the box, show(range or null) }.
  // → { pulled() }: whether the click that comes belongs to a drag.
  a.zoom = function (box, axis) {
    const down = new Map(), picked = a.element("div", "picked");
    let pulled = false, start = 0, from = null, pans = false, fingers = null, wanted, pointer = null;
    picked.hidden = true;
    box.append(picked);
    box.classList.add("zooms");
    const now = () => (wanted === undefined ? axis.range() : wanted ?? axis.whole());
    const px = (e) => e.clientX - box.getBoundingClientRect().left - box.clientLeft;
    const inside = (x) => { const [l, r] = axis.ends(); return Math.max(l, Math.min(r, x)); };
    function value(x, [low, high] = now()) { const [l, r] = axis.ends(); return low + ((x - l) / (r - l)) * (high - low); }
    function show(range) {             // once a frame
      if (wanted === undefined) requestAnimationFrame(() => { const next = wanted; wanted = undefined; axis.show(next); });
      wanted = range;
    }
    function move(low, span) {
      const [first, last] = axis.whole(), size = Math.max(Math.min(axis.least, last - first), span);
      if (size >= (last - first) * 0.999) { show(null); return; }
      const begin = Math.max(first, Math.min(last - size, low));
      show([begin, begin + size]);
    }
    function scale(factor, x) {        // what is at x stays there
      const [low, high] = now(), [first, last] = axis.whole(), at = value(x);
      const size = Math.max(axis.least, Math.min(last - first, (high - low) * factor));
      move(at - (at - low) * (size / (high - low)), size);
    }
    function pan(part) { const [low, high] = now(); move(low + part * (high - low), high - low); }

    box.addEventListener("wheel", (e) => {
      if (e.ctrlKey || e.metaKey) scale(Math.exp(Math.max(-100, Math.min(100, e.deltaY)) / 200), inside(px(e)));
      else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) && String(now()) !== String(axis.whole())) pan(e.deltaX / box.clientWidth);
      else return;
      e.preventDefault();
    }, { passive: false });
    document.addEventListener("keydown", (e) => {
      const under = document.querySelector(".zooms:hover");
      if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, select, textarea, #tree") || (under ?? document.activeElement) !== box) return;
      const [l, r] = axis.ends(), x = under && pointer !== null ? inside(pointer) : (l + r) / 2;
      if (e.key === "w") scale(CLOSER, x);
      else if (e.key === "s") scale(1 / CLOSER, x);
      else if (e.key === "a" || e.key === "d") pan(e.key === "a" ? -PART : PART);
      else if (e.key === "0") show(null);
      else return;
      e.preventDefault();
    });

    box.addEventListener("pointerdown", (e) => {
      if (e.button || !e.target.closest(".area")) return;
      if (!down.size) { pulled = false; start = px(e); from = now(); pans = e.shiftKey || e.pointerType === "touch"; }
      down.set(e.pointerId, px(e));
      if (down.size === 2) fingers = [...down.values()].map((x) => value(x));
      if (e.shiftKey) e.preventDefault();   // no text is selected
    });
    box.addEventListener("pointermove", (e) => {
      pointer = px(e);
      if (!down.has(e.pointerId)) return;
      down.set(e.pointerId, px(e));
      const [l, r] = axis.ends(), [x, y] = [...down.values()];
      if (!pulled && down.size === 1 && Math.abs(x - start) < DRAGGED) return;
      if (!pulled) { pulled = true; box.setPointerCapture(e.pointerId); }
      if (down.size === 2 && Math.abs(x - y) > 1) {
        const span = ((fingers[1] - fingers[0]) / (y - x)) * (r - l);
        if (span > 0) move(fingers[0] - ((x - l) / (r - l)) * span, span);
      } else if (down.size === 1 && pans) move(from[0] - ((x - start) / (r - l)) * (from[1] - from[0]), from[1] - from[0]);
      else if (down.size === 1) {
        picked.hidden = false;
        picked.style.left = Math.min(inside(start), inside(x)) + "px";
        picked.style.width = Math.abs(inside(x) - inside(start)) + "px";
      }
    });
    function done(e) {
      if (!down.delete(e.pointerId)) return;
      if (pulled && !pans && !down.size && e.type === "pointerup") {
        const [low, high] = [value(inside(start)), value(inside(px(e)))].sort((p, q) => p - q), span = Math.max(axis.least, high - low);
        move((low + high - span) / 2, span);
      }
      picked.hidden = true;
      if (down.size) [start, from] = [[...down.values()][0], now()];   // the finger that is left pans on
      else setTimeout(() => { pulled = false; });                      // the click that follows, if it does, is the drag's
    }
    box.addEventListener("pointerup", done);
    box.addEventListener("pointercancel", done);
    return { pulled: () => pulled };
  };
})();
