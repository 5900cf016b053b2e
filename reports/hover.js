// Shows the text of the nearest element with `data-tip` while the pointer is over a chart.
"use strict";
(() => {
  const REACH_PX = 24;
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let lit = null;

  const distance = (element, x, y) => {
    const box = element.getBoundingClientRect();
    return Math.hypot(
      Math.max(box.left - x, 0, x - box.right),
      Math.max(box.top - y, 0, y - box.bottom),
    );
  };

  const show = (element, x, y) => {
    lit?.classList.remove("lit");
    lit = element;
    tip.hidden = !element;
    if (!element) return;
    element.classList.add("lit");
    tip.textContent = element.dataset.tip;
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, y - tip.offsetHeight - 12)}px`;
  };

  const follow = (event) => {
    let nearest = null, least = REACH_PX;
    for (const element of event.currentTarget.querySelectorAll("[data-tip]")) {
      const d = distance(element, event.clientX, event.clientY);
      if (d < least) [nearest, least] = [element, d];
    }
    show(nearest, event.clientX, event.clientY);
  };

  for (const chart of document.querySelectorAll("svg")) {
    chart.addEventListener("pointermove", follow);
    chart.addEventListener("pointerdown", follow);
    chart.addEventListener("pointerleave", () => show(null));
  }
})();
