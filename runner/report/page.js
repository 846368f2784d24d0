"use strict";
// The page is whole without this script. It adds: sorting, hiding settings, reading values off.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // ---- The table: a heading sorts; runs of one setting stay together under their mean. --------
  const table = document.getElementById("runs");
  const worth = (row, column) => {
    const text = row.cells[column].dataset.value ?? "";
    const size = Number(text);
    // Nothing, NaN and infinities go last in both directions.
    if (text === "" || text === "nan") return { rank: 2, size: 0, text };
    if (text === "inf" || text === "-inf") return { rank: 1, size: text === "inf" ? 1 : -1, text };
    return Number.isNaN(size) ? { rank: 0, size: Infinity, text } : { rank: 0, size, text };
  };
  const compare = (a, b, sign) =>
    a.rank - b.rank || sign * (a.size === b.size ? a.text.localeCompare(b.text) : a.size - b.size);
  const sort = (heading) => {
    const column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    const sign = down ? -1 : 1;
    for (const other of all("th", table.tHead)) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const by = (a, b) => compare(worth(a, column), worth(b, column), sign);
    const bodies = [...table.tBodies];
    for (const body of bodies) {
      const runs = [...body.rows].filter((row) => !row.classList.contains("mean"));
      body.append(...runs.sort(by));
    }
    table.append(...bodies.sort((a, b) => by(a.rows[0], b.rows[0])));
  };
  if (table) {
    for (const button of all("thead button", table)) {
      button.addEventListener("click", () => sort(button.closest("th")));
    }
  }

  // ---- Settings: pressing a name hides its curves; pointing at it, or at its rows, picks it. ---
  const charts = all("svg[data-chart]");
  const pick = (group) => {
    for (const chart of charts) {
      chart.classList.toggle("pick", group !== null);
      for (const part of all("[data-group]", chart)) {
        part.classList.toggle("picked", part.dataset.group === group);
      }
    }
  };
  const picks = (element) => {
    for (const event of ["pointerenter", "focusin"]) {
      element.addEventListener(event, () => pick(element.dataset.group));
    }
    for (const event of ["pointerleave", "focusout"]) {
      element.addEventListener(event, () => pick(null));
    }
  };
  for (const button of all("#key button")) {
    picks(button);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!shown));
      const group = `[data-group="${button.dataset.group}"]`;
      for (const part of all(`svg[data-chart] ${group}`)) part.classList.toggle("away", shown);
      for (const body of all(`tbody${group}`)) body.classList.toggle("dim", shown);
    });
  }
  if (table && table.tBodies.length > 1) for (const body of table.tBodies) picks(body);

  // ---- Reading values off: by pointer, or by arrow keys (left, right: along; up, down: next). --
  const number = (value) => String(Number(value.toPrecision(4)));
  const axis = (text) => {
    const [low, high, kind] = text.split(" ");
    const [from, to] = [Number(low), Number(high)];
    return (place) => {
      if (kind === "log") return number(from * Math.pow(to / from, place));
      const value = from + (to - from) * place;
      return kind === "percent" ? `${Number((100 * value).toPrecision(3))} %` : number(value);
    };
  };
  const drawn = (path) =>
    [...path.getAttribute("d").matchAll(/[ML](-?[\d.]+) (-?[\d.]+)/g)]
      .map((found) => [Number(found[1]), Number(found[2])]);

  const reader = (chart) => {
    const [left, top, width, height] = chart.dataset.area.split(" ").map(Number);
    const [x, y] = [axis(chart.dataset.x), axis(chart.dataset.y)];
    const reading = chart.parentElement.querySelector(".reading");
    const ring = document.createElementNS(chart.namespaceURI, "circle");
    ring.setAttribute("class", "cursor away");
    ring.setAttribute("r", "4");
    chart.append(ring);
    let lines = null;
    const series = () => {
      lines ??= [
        ...all("path[data-name]:not(.faint)", chart).map((part) => ({ part, at: drawn(part) })),
        ...all("[data-tip]", chart).map((part) => {
          const of = (name, other) => Number(part.getAttribute(name) ?? part.getAttribute(other));
          const half = Number(part.getAttribute("width") ?? 0) / 2;
          return { part, at: [[of("cx", "x") + half, of("cy", "y")]] };
        }),
      ].filter((line) => line.at.length);
      return lines.filter((line) => !line.part.classList.contains("away"));
    };
    let shown = null;
    const show = (line, index) => {
      const [px, py] = line.at[index];
      shown = { line, index };
      ring.setAttribute("cx", px);
      ring.setAttribute("cy", Math.min(Math.max(py, top), top + height));
      ring.classList.remove("away");
      const value = y(1 - (py - top) / height);
      reading.textContent = line.part.dataset.tip ??
        `${line.part.dataset.name}: ${value} at ${x((px - left) / width)}`;
      chart.classList.add("pick");
      for (const other of all(".picked", chart)) other.classList.remove("picked");
      line.part.classList.add("picked");
    };
    const hide = () => {
      shown = null;
      ring.classList.add("away");
      reading.textContent = "";
      chart.classList.remove("pick");
    };
    const nearest = (at, px) => {
      let low = 0;
      let high = at.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (at[middle][0] < px) low = middle; else high = middle;
      }
      return px - at[low][0] < at[high][0] - px ? low : high;
    };
    const follow = (event) => {
      const box = chart.getBoundingClientRect();
      const scale = chart.viewBox.baseVal.width / box.width;
      const [px, py] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
      let best = null;
      for (const line of series()) {
        const near = nearest(line.at, px);
        // A line's neighbours count too: between two of its points it may pass closer by.
        for (const index of [near - 1, near, near + 1]) {
          const point = line.at[index];
          if (!point) continue;
          const far = Math.hypot(point[0] - px, point[1] - py);
          if (!best || far < best.far) best = { far, line, index };
        }
      }
      if (best && best.far < 60) show(best.line, best.index); else hide();
    };
    const step = (event) => {
      const known = series();
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      const move = moves[event.key];
      if (event.key === "Escape") hide();
      if (!move || !known.length) return;
      event.preventDefault();
      if (!shown) return void show(known[0], 0);
      const from = Math.max(known.indexOf(shown.line), 0);
      const single = shown.line.at.length === 1;
      const next = (from + move[0] + (single ? move[1] : 0) + known.length) % known.length;
      const along = (event.shiftKey ? 25 : 1) * move[1];
      const line = known[next];
      const index = next === from ? shown.index + along : nearest(line.at, shown.line.at[shown.index][0]);
      show(line, Math.min(Math.max(index, 0), line.at.length - 1));
    };
    chart.addEventListener("pointermove", follow);
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("keydown", step);
    chart.addEventListener("blur", hide);
  };
  for (const chart of charts) if ("x" in chart.dataset) reader(chart);

  // ---- Paper has no folds. ----------------------------------------------------------------------
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    for (const fold of folded) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of folded) fold.open = false;
  });
  document.documentElement.dataset.ready = "true";
})();
