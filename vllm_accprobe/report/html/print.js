// On paper: light colours whatever the screen has, drawings as wide as the page, and of the table its first rows, whole.
// What is closed stays closed. The rules of layout are in print.css.
(function () {
  "use strict";
  const a = window.accprobe, WIDE = 690, ROWS = 50;   // A4 at 96 pixels an inch within print.css's margins: 703
  let followers = [];
  // follow(draw, element): draw() again when paper begins or ends, as long as the element is on the page.
  a.paper = { on: false, ROWS, WIDE, follow(draw, element = document.body) { followers.push({ draw, element }); } };
  function turn(on) {
    if (a.paper.on === on) return;
    a.paper.on = on;
    document.documentElement.classList.toggle("paper", on);
    followers = followers.filter((f) => f.element.isConnected);
    for (const f of followers) f.draw();
  }
  addEventListener("beforeprint", () => turn(true));
  addEventListener("afterprint", () => turn(false));
  window.matchMedia("print").addEventListener("change", (e) => turn(e.matches));
})();
