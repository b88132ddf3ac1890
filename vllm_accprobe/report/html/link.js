// The view in the address: each part says what it shows as [key, value], and a link opens the same view again.
// Written with replaceState, so that "back" leaves the page. An address is a stranger's text: each part takes from it
// only what it knows of its own data, and what it does not know is as if it were not there.
(function () {
  "use strict";
  const a = window.accprobe, parts = [], LONGEST = 4000;
  let timer = 0, ready = false;
  function write() {
    const q = new URLSearchParams(), bare = location.href.split("#")[0];
    for (const p of parts) for (const [key, value] of p.get()) if (value !== null && value !== "") q.set(key, String(value));
    const now = String(q);
    try {
      if (now.length <= LONGEST) history.replaceState(history.state, "", now ? bare + "#" + now : bare);
    } catch { /* a frame without an address of its own, or too often within a minute: the view is only not in the address */ }
  }
  function open() {
    const text = location.hash.slice(1);
    if (!text || text.length > LONGEST) return;
    const q = new URLSearchParams(text);
    if (parts.some((p) => p.keys.some((key) => q.has(key)))) for (const p of parts) p.set(q);
  }
  const whole = (text, below) => (/^\d{1,9}$/.test(text ?? "") && Number(text) < below ? Number(text) : null);
  // part: { keys, get() → [[key, value or null]], set(URLSearchParams), which takes a missing key for the beginning }.
  a.link = {
    part(p) { parts.push(p); },
    changed() { if (ready) { clearTimeout(timer); timer = setTimeout(write, 150); } },
    start() { open(); ready = true; addEventListener("hashchange", open); },
    whole,
  };
})();
