// The first screen's buttons: an origin opens its pairs, the worst with all its fields; a command is copied.
(function () {
  "use strict";
  const a = window.accprobe;
  // A page opened as a file may be refused the clipboard: then the text is selected, for the keys that copy.
  function select(code) {
    const range = document.createRange(), chosen = getSelection();
    range.selectNodeContents(code);
    chosen.removeAllRanges();
    chosen.addRange(range);
  }
  async function copied(text) {
    if (!navigator.clipboard) return false;
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  }
  a.parts.first = function () {
    for (const button of a.parts.clicks ? [] : document.querySelectorAll("button.origin")) {
      button.addEventListener("click", () => a.showTap(button.dataset.tap, { scroll: true, open: true }));
    }
    const status = document.getElementById("copied");
    for (const button of document.querySelectorAll("button.copy")) {
      button.addEventListener("click", async () => {
        const code = button.parentElement.querySelector("code"), done = await copied(code.textContent);
        if (!done) select(code);
        button.textContent = done ? "Copied" : "Selected";
        status.textContent = done ? "Copied." : "The clipboard is closed to this page: the command is selected, press Ctrl or ⌘ and C.";
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
    }
  };
})();
