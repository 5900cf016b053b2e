// Puts a switch between the drawings of a figure, and lets a reader drag over a chart to zoom in.
"use strict";
(() => {
  const SVG = document.querySelector("svg")?.namespaceURI;
  const DRAG_MIN = 6, TICKS = 5, ROUND = [1, 2, 2.5, 5, 10];

  const make = (tag, text, act) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (act) {
      element.type = "button";
      element.addEventListener("click", act);
    }
    return element;
  };

  const steps = (low, high) => {
    const raw = (high - low) / TICKS, power = 10 ** Math.floor(Math.log10(raw));
    const step = ROUND.map((r) => r * power).find((s) => s >= raw * (1 - 1e-9));
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first;
    return Array.from({ length: count + 1 }, (_, i) => (first + i) * step);
  };

  const powers = (low, high) => {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); 10 ** p <= high; p++)
      for (const m of [1, 2, 5]) if (m * 10 ** p >= low * (1 - 1e-9) && m * 10 ** p <= high) found.push(m * 10 ** p);
    const whole = found.filter((t) => Number.isInteger(Math.round(Math.log10(t) * 1e9) / 1e9));
    return found.length < 3 ? steps(low, high) : found.length <= TICKS + 1 || whole.length < 2 ? found : whole;
  };

  // One drawing: the window onto its curves, and the ticks under it.
  const chart = (svg, told) => {
    const window_ = svg.querySelector(".window");
    if (!window_) return null;
    const whole = window_.viewBox.baseVal, box = { x: whole.x, y: whole.y, width: whole.width, height: whole.height };
    const log = window_.dataset.log === "1", [low, high] = [+window_.dataset.low, +window_.dataset.high];
    const into = log ? Math.log10 : (v) => v, outOf = log ? (v) => 10 ** v : (v) => v;
    const at = (pixel) => outOf(into(low) + ((pixel - box.x) / box.width) * (into(high) - into(low)));
    const old = [...svg.querySelectorAll(".x")], floor = old[0]?.getAttribute("d")?.split(" ")[1].split("v")[0];
    const own = document.createElementNS(SVG, "g");
    svg.append(own);

    const zoom = (from, to) => {
      const zoomed = to - from < box.width - 0.01;
      window_.setAttribute("viewBox", `${from} ${box.y} ${to - from} ${box.height}`);
      for (const element of old) element.style.display = zoomed ? "none" : "";
      own.replaceChildren();
      told(zoomed);
      if (!zoomed) return;
      const [a, b] = [at(from), at(to)];
      for (const tick of log ? powers(a, b) : steps(a, b)) {
        const x = box.x + ((into(tick) - into(a)) / (into(b) - into(a))) * box.width;
        const line = document.createElementNS(SVG, "path"), label = document.createElementNS(SVG, "text");
        line.setAttribute("class", "axis");
        line.setAttribute("d", `M${x} ${floor}v4`);
        label.setAttribute("class", "tick mid");
        label.setAttribute("x", x);
        label.setAttribute("y", +floor + 17);
        label.textContent = +tick.toPrecision(6);
        own.append(line, label);
      }
    };

    const pixel = (event) => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      return Math.min(Math.max(point.x, box.x), box.x + box.width);
    };
    const now = (x) => {
      const view = window_.viewBox.baseVal;
      return view.x + ((x - box.x) / box.width) * view.width;
    };
    let start = null, area = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      start = pixel(event);
      area = document.createElementNS(SVG, "rect");
      area.setAttribute("class", "chosen");
      area.setAttribute("y", box.y);
      area.setAttribute("height", box.height);
      svg.append(area);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    svg.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const x = pixel(event);
      area.setAttribute("x", Math.min(start, x));
      area.setAttribute("width", Math.abs(x - start));
    });
    svg.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [a, b] = [start, pixel(event)].sort((m, n) => m - n);
      start = null;
      area.remove();
      if (b - a >= DRAG_MIN) zoom(now(a), now(b));
    });
    svg.addEventListener("dblclick", () => zoom(box.x, box.x + box.width));
    const narrow = () => {
      const view = window_.viewBox.baseVal;
      zoom(view.x, view.x + view.width / 2);
    };
    return { narrow, reset: () => zoom(box.x, box.x + box.width) };
  };

  for (const figure of document.querySelectorAll("figure.plot")) {
    const ways = [...figure.querySelectorAll("[data-way]")], tools = document.createElement("div");
    tools.className = "tools";
    const back = make("button", "whole", () => charts.forEach((c) => c?.reset()));
    const charts = ways.map((way) => chart(way.querySelector("svg"), (zoomed) => { back.disabled = !zoomed; }));
    back.disabled = true;
    const switches = ways.length < 2 ? [] : ways.map((way) => make("button", way.dataset.way, () => show(way)));
    const show = (shown) => {
      charts.forEach((c) => c?.reset());
      ways.forEach((way, i) => {
        way.hidden = way !== shown;
        switches[i]?.setAttribute("aria-pressed", String(way === shown));
      });
    };
    const nearer = make("button", "zoom in", () => charts[ways.findIndex((way) => !way.hidden)]?.narrow());
    nearer.title = "or drag over the chart; double-click: the whole";
    tools.append(...switches, nearer, back);
    figure.append(tools);
    show(ways.find((way) => !way.hidden));
  }
})();
