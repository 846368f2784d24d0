"use strict";
// Sorts the table, draws the charts, and hides settings. Verdict and table stand without it.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const one = (id) => document.getElementById(id);

  // ---- The table: a heading sorts; runs of one setting stay together under their mean. --------
  const table = one("runs");
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
  const sort = (heading, down) => {
    const column = heading.cellIndex;
    const by = (a, b) => compare(worth(a, column), worth(b, column), down ? -1 : 1);
    for (const other of all("th", table.tHead)) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const bodies = [...table.tBodies];
    for (const body of bodies) {
      body.append(...[...body.rows].filter((row) => !row.classList.contains("mean")).sort(by));
    }
    table.append(...bodies.sort((a, b) => by(a.rows[0], b.rows[0])));
  };
  for (const button of all("#runs thead button")) {
    const heading = button.closest("th");
    button.addEventListener("click", () => sort(heading, heading.ariaSort === "ascending"));
  }

  // ---- Figures: colours of the screen, and arrays, which travel as bytes. ----------------------
  const colors = JSON.parse(one("dark").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const arrays = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array,
    u4: Uint32Array, f4: Float32Array, f8: Float64Array };
  const unpacked = ({ dtype, bdata, shape }) => {
    const flat = new arrays[dtype](Uint8Array.from(atob(bdata), (c) => c.charCodeAt(0)).buffer);
    const [rows, columns] = (shape ?? "").split(",").map(Number);
    if (!columns) return flat;
    return Array.from({ length: rows }, (_, i) => flat.subarray(i * columns, (i + 1) * columns));
  };
  const parsed = (text, dark) => JSON.parse(text, (_, value) =>
    value?.bdata ? unpacked(value) : (dark && colors[value]) || value);

  // The rolling mean of runner.report.draw.smoothed.
  const rolled = (values, share, log) => {
    const width = Math.max(1, Math.round(share * values.length));
    const of = Array.from(values, (value) => (log ? Math.log(value) : value));
    return Float32Array.from(of, (here, i) => {
      if (!Number.isFinite(here)) return NaN;
      const from = Math.max(i - ((width - 1) >> 1), 0);
      const near = of.slice(from, i + (width >> 1) + 1).filter(Number.isFinite);
      const mean = near.reduce((sum, value) => sum + value, 0) / near.length;
      return log ? Math.exp(mean) : mean;
    });
  };

  // ---- Charts: drawn when they come near the screen, and again when a control changes. --------
  const state = { hidden: new Set(), run: null, group: null, smoothing: null, paper: false };
  const usual = Number(one("smoothing")?.value);
  const shown = ({ meta }) => !meta || (!state.hidden.has(meta.group) &&
    (state.run === null || (meta.run ? meta.run === state.run : meta.group === state.group)));
  const touch = matchMedia("(pointer: coarse)").matches;
  const charts = all("figure[data-chart]").map((figure) => ({
    figure, key: figure.dataset.chart, plot: figure.querySelector(".plot"), log: null,
    source: figure.querySelector("script").textContent, button: figure.querySelector(".log"),
    reading: figure.querySelector(".reading"), near: false, stale: true, at: null,
  }));
  const save = (chart, format, name) => ({
    name, title: `Download as ${name}`, icon: Plotly.Icons[format === "png" ? "camera" : "disk"],
    click: (plot) => {
      const { width, height } = plot._fullLayout;
      const margin = { ...plot.layout.margin, t: 48 };
      const layout = { ...plot.layout, margin, title: { text: chart.title } };
      Plotly.downloadImage({ data: plot.data, layout }, {
        format, width, height: height + 36, scale: 2, filename: chart.key });
    },
  });
  // From the left, parts of a name are shortened to their first letter and number: "s0.b1.weight".
  const brief = (name) => {
    const parts = name.split(".");
    for (let i = 0; i < parts.length - 1 && parts.join(".").length > 17; i++) {
      parts[i] = parts[i].replace(/^(.)[^\d]*/, "$1");
    }
    return parts.join(".").replace(/^.+(.{16})$/, (text, end) => (text.length > 17 ? `…${end}` : text));
  };
  const narrow = (chart, data, layout) => {
    const { ticktext } = layout.yaxis;
    if (ticktext) [layout.yaxis.ticktext, layout.margin.l] = [ticktext.map(brief), 100];
    if (chart.key !== "histogram") return;
    layout.xaxis.nticks = 4;
    for (const trace of data) trace.text = trace.text?.map((text) => text.replace(/^.* · /, " "));
  };
  const paint = (chart) => {
    const { plot } = chart;
    const { data, layout } = parsed(chart.source, scheme.matches && !state.paper);
    const { meta } = layout;
    chart.title = layout.title.text;
    chart.steps = meta.steps && layout.hovermode === "x unified";
    for (const trace of data) {
      trace.visible = shown(trace);
      if (meta.smooth && trace.customdata && state.smoothing !== null) {
        trace.y = rolled(trace.customdata, state.smoothing, meta.smooth === "log");
      }
    }
    if (chart.log !== null && meta.scales) {
      const [low, high] = meta.scales[chart.log ? "log" : "linear"];
      layout.yaxis.type = chart.log ? "log" : "linear";
      layout.yaxis.nticks = chart.log && high < 1e3 * low ? 3 + (high > 16 * low) : 7;
      layout.yaxis.range = chart.log ? [Math.log10(low), Math.log10(high)] : [low, high];
    }
    chart.log = layout.yaxis.type === "log";
    chart.button?.setAttribute("aria-pressed", String(chart.log));
    delete layout.title;
    layout.showlegend = false;
    layout.margin.t = state.paper ? 8 : 30;
    layout.modebar = { bgcolor: "rgba(0,0,0,0)" };
    layout.uirevision = "kept";
    layout.yaxis.uirevision = String(chart.log);
    if (touch) layout.dragmode = false; // a finger scrolls the page
    if (plot.clientWidth < 420) narrow(chart, data, layout);
    if (state.paper) [layout.width, layout.height] = [480, Math.min(layout.height - 80, 280)];
    plot.style.height = `${layout.height}px`;
    // With another configuration, the library would forget the zoom.
    chart.config ??= { responsive: true, displaylogo: false, doubleClick: "reset", modeBarButtons: [
      [save(chart, "png", "PNG"), save(chart, "svg", "SVG")],
      ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
    Plotly.react(plot, data, layout, chart.config);
    if (chart.at === null) listen(chart);
    chart.stale = false;
  };
  const repaint = () => {
    for (const chart of charts) {
      chart.stale = true;
      if (chart.near || state.paper) paint(chart);
    }
  };

  // ---- Reading values off: by pointer or arrow keys, with one cursor in all charts. ------------
  const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);
  const read = (chart, found) => {
    const texts = found.map((p) => (p.z !== undefined
      ? `${p.y}, ${number(p.x)}: ${p.text ?? number(10 ** p.z)}`
      : p.hovertext ?? p.text) ??
      `${p.fullData.name}: ${number(p.y)}${chart.steps ? "" : ` at ${number(p.x)}`}`);
    chart.reading.textContent = texts.join("; ") + (chart.steps ? ` at ${number(found[0].x)}` : "");
  };
  const leave = (chart) => {
    chart.reading.textContent = "";
    for (const other of charts) {
      if (other !== chart && !other.stale && other.steps) Plotly.Fx.unhover(other.plot, {});
    }
  };
  const follow = (chart, found) => {
    if (!found?.length) return;
    read(chart, found);
    for (const other of chart.steps ? charts : []) {
      if (other === chart || !other.near || other.stale || !other.steps) continue;
      Plotly.Fx.hover(other.plot, { xval: found[0].x }, "xy", true);
    }
  };
  const listen = (chart) => {
    chart.at = -1;
    chart.plot.on("plotly_hover", ({ points }) => follow(chart, points));
    chart.plot.on("plotly_unhover", () => leave(chart));
  };
  const end = (chart) => {
    if (chart.at < 0) return;
    chart.at = -1;
    leave(chart);
    Plotly.Fx.unhover(chart.plot, {});
  };
  const places = (chart) => {
    const known = chart.plot._fullData.map((trace, curveNumber) => ({ trace, curveNumber }))
      .filter(({ trace }) => trace.visible === true && trace.hoverinfo !== "skip" && trace.x?.length);
    if (chart.steps && known.length) {
      const first = known.reduce((a, b) => (b.trace.x.length > a.trace.x.length ? b : a));
      return Array.from(first.trace.x, (xval) => ({ xval }));
    }
    const named = chart.plot._fullLayout.xaxis.type === "category";
    return known.flatMap(({ trace, curveNumber }) => (trace.type === "heatmap"
      ? trace.z.flatMap((row, i) => Array.from(row, (_, j) => ({ xval: named ? j : trace.x[j], yval: i })))
      : Array.from(trace.x, (_, pointNumber) => ({ curveNumber, pointNumber }))));
  };
  const keys = (chart, event) => {
    if (event.target !== chart.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 };
    const zooms = { "+": 0.5, "-": 2 };
    if (moves[event.key]) {
      const known = places(chart);
      if (!known.length) return;
      chart.at = Math.min(Math.max(chart.at + moves[event.key], 0), known.length - 1);
      const place = known[chart.at];
      Plotly.Fx.hover(chart.plot, "xval" in place ? place : [place], "xy");
      // The library waits between two of them, and tells nobody of one that no pointer asked for.
      setTimeout(() => chart.at >= 0 && follow(chart, chart.plot._hoverdata), 60);
    } else if (zooms[event.key]) {
      const [low, high] = chart.plot._fullLayout.xaxis.range;
      const at = chart.steps && chart.at >= 0 ? places(chart)[chart.at].xval : (low + high) / 2;
      const around = (end) => at + (end - at) * zooms[event.key];
      Plotly.relayout(chart.plot, { "xaxis.range": [around(low), around(high)] });
    } else if (event.key === "0") {
      chart.figure.querySelector("[data-val=reset]")?.click();
    } else if (event.key === "Escape") {
      end(chart);
    } else if (event.key.toLowerCase() === "l") {
      chart.button?.click();
    } else return;
    event.preventDefault();
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = charts.find(({ figure }) => figure === target);
      chart.near = isIntersecting;
      if (chart.near && chart.stale) paint(chart);
    }
  }, { rootMargin: "300px" });
  for (const chart of charts) {
    chart.plot.addEventListener("keydown", (event) => keys(chart, event));
    chart.plot.addEventListener("blur", () => end(chart));
    chart.button?.addEventListener("click", () => {
      chart.log = !chart.log;
      paint(chart);
    });
    watch.observe(chart.figure);
  }

  // ---- Controls of all charts: settings, smoothing, a selected run. ----------------------------
  for (const button of all("#key button[data-group]")) {
    button.addEventListener("click", () => {
      const group = Number(button.dataset.group);
      const hides = button.getAttribute("aria-pressed") === "true";
      state.hidden[hides ? "add" : "delete"](group);
      button.setAttribute("aria-pressed", String(!hides));
      for (const body of all(`tbody[data-group="${group}"]`)) body.classList.toggle("dim", hides);
      repaint();
    });
  }
  one("smoothing")?.addEventListener("input", ({ target }) => {
    state.smoothing = Number(target.value) === usual ? null : Number(target.value) / 100;
    target.nextElementSibling.textContent = `${target.value} %`;
    repaint();
  });
  const select = (row) => {
    const panel = one("selected");
    for (const other of all("tr.selected")) other.classList.remove("selected");
    state.run = row?.dataset.run ?? null;
    state.group = row ? Number(row.parentElement.dataset.group) : null;
    row?.classList.add("selected");
    panel.hidden = !row;
    if (row) {
      panel.querySelector("h2").textContent = `Run ${state.run}: the charts show it alone`;
      const facts = [...one(`run-${state.run}`).cells].slice(1);
      panel.querySelector("div").replaceChildren(...facts.flatMap((cell) =>
        [...cell.childNodes].map((node) => node.cloneNode(true))));
      panel.scrollIntoView({ block: "nearest" });
    }
    repaint();
  };
  for (const link of one("selected") ? all("#runs a[href^='#run-']") : []) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const row = link.closest("tr");
      select(row.dataset.run === state.run ? null : row);
    });
  }
  one("selected")?.querySelector("button").addEventListener("click", () => select(null));
  scheme.addEventListener("change", repaint);

  // ---- Paper: all charts, dark on white, and no folds. -----------------------------------------
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    for (const fold of folded) fold.open = true;
    state.paper = true;
    repaint();
  });
  addEventListener("afterprint", () => {
    for (const fold of folded) fold.open = false;
    state.paper = false;
    repaint();
  });
  one("charts")?.removeAttribute("hidden");
  document.documentElement.dataset.ready = "true";
})();
