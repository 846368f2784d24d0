"use strict";
// Sorts, filters and folds the table; draws the charts; lifts settings out in all of them.
// Title, sentences and table stand without it. It computes nothing but the axis that is chosen.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const look = JSON.parse(byId("look").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;

  const state = {
    hovered: null, // setting under the pointer
    kept: [], // settings that were pressed, at most two
    hues: new Map(), // colours of grey settings that were chosen
    filtered: new Set(), // settings that the filter hides
    seeds: false,
    unit: "steps",
    range: null, // zoom of all charts over steps
    paper: false,
  };

  // ---- The table: a heading sorts, a row folds its seeds out. ----------------------------------
  const table = byId("runs");
  const worth = (row, column) => {
    const text = row.cells[column].dataset.value ?? "";
    const size = Number(text);
    // Nothing, NaN and infinities go last in both directions.
    if (text === "" || text === "nan") return { rank: 2, size: 0, text };
    if (text === "inf" || text === "-inf") return { rank: 1, size: text === "inf" ? 1 : -1, text };
    return Number.isNaN(size) ? { rank: 0, size: Infinity, text } : { rank: 0, size, text };
  };
  const compare = (a, b, sign) => {
    if (a.rank !== b.rank) return a.rank - b.rank;
    if (a.size !== b.size) return sign * (a.size - b.size);
    return sign * a.text.localeCompare(b.text);
  };
  const sort = (heading, down) => {
    const column = heading.cellIndex;
    const by = (a, b) => compare(worth(a, column), worth(b, column), down ? -1 : 1);
    for (const other of all("th", table.tHead)) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.append(...[...table.tBodies].sort((a, b) => by(a.rows[0], b.rows[0])));
  };
  for (const button of all("#runs thead button")) {
    const heading = button.closest("th");
    button.addEventListener("click", () => sort(heading, heading.ariaSort === "ascending"));
  }
  const fold = (button, open) => {
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "▾" : "▸";
    for (const row of all("tr.seed", button.closest("tbody"))) row.hidden = !open;
  };
  for (const button of all(".fold")) {
    button.addEventListener("click", () => fold(button, button.ariaExpanded !== "true"));
  }
  byId("more")?.addEventListener("change", ({ target }) => {
    table.classList.toggle("all", target.checked);
  });

  // ---- Figures: colours of the screen, and arrays, which travel as bytes. ----------------------
  const arrays = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array,
    u4: Uint32Array, f4: Float32Array, f8: Float64Array };
  const unpacked = ({ dtype, bdata, shape }) => {
    const flat = new arrays[dtype](Uint8Array.from(atob(bdata), (c) => c.charCodeAt(0)).buffer);
    const [rows, columns] = (shape ?? "").split(",").map(Number);
    if (!columns) return flat;
    return Array.from({ length: rows }, (_, i) => flat.subarray(i * columns, (i + 1) * columns));
  };
  const parsed = (text, dark) => JSON.parse(text, (_, value) =>
    value?.bdata ? unpacked(value) : (dark && look.dark[value]) || value);

  // ---- The horizontal axis of curves: steps, or what a setting had done by then. ---------------
  const titles = { steps: "step", samples: "samples", tokens: "tokens", seconds: "seconds" };
  const converted = (steps, [known, values]) => Float64Array.from(steps, (step) => {
    let next = known.findIndex((other) => other >= step);
    if (next < 0) next = known.length - 1;
    const before = Math.max(next - 1, 0);
    const from = next === 0 ? [0, 0] : [known[before], values[before]];
    const width = known[next] - from[0];
    return width > 0 ? from[1] + ((step - from[0]) / width) * (values[next] - from[1]) : values[next];
  });
  const convert = (data, layout) => {
    let highest = 0;
    for (const trace of data) {
      if (trace.meta?.setting === undefined) continue;
      const axis = look.axes[trace.meta.setting]?.[state.unit];
      if (!axis) {
        trace.visible = false; // its rows do not tell
        continue;
      }
      trace.x = converted(trace.x, axis);
      highest = Math.max(highest, trace.x[trace.x.length - 1] || 0);
    }
    layout.xaxis.range = [0, highest * 1.01 || 1];
    layout.xaxis.tickformat = ".3~s";
    layout.xaxis.title.text = titles[state.unit];
  };

  // ---- Charts: drawn when they come near the screen, and again when a control changes. ---------
  const charts = all("figure[data-chart]").map((figure) => ({
    figure, key: figure.dataset.chart, plot: figure.querySelector(".plot"), log: null,
    source: figure.querySelector("script").textContent, button: figure.querySelector(".log"),
    reading: figure.querySelector(".reading"), near: false, stale: true, at: null, resets: 0,
  }));
  const lifted = () => (state.hovered === null ? state.kept : [...state.kept, state.hovered]);
  const visible = ({ meta }) => {
    if (meta?.setting === undefined) return true;
    if (state.filtered.has(meta.setting)) return false;
    if (meta.seed) return state.seeds || state.kept.includes(meta.setting);
    return !(meta.band && state.seeds);
  };
  const opacity = ({ meta, opacity: usual }, focus) => {
    const full = usual ?? 1;
    if (meta?.setting === undefined) return full;
    const inside = focus.includes(meta.setting);
    if (meta.level && look.settings > 8 && !inside) return 0;
    return !focus.length || inside ? full : full * 0.12;
  };
  const recolored = (trace) => {
    const hue = state.hues.get(trace.meta?.setting);
    if (!hue) return;
    if (trace.line) trace.line.color = hue;
    if (trace.marker) trace.marker.color = hue;
    if (trace.fillcolor) trace.fillcolor = hue;
    for (const bars of [trace.error_x, trace.error_y]) if (bars) bars.color = hue;
  };
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
    if (chart.key.startsWith("heat-") && layout.yaxis.ticktext) {
      layout.yaxis.ticktext = layout.yaxis.ticktext.map(brief);
      layout.margin.l = 100;
    } else if (layout.yaxis.ticktext) {
      layout.yaxis.ticktext = layout.yaxis.ticktext.map((text) =>
        text.length > 18 ? `${text.slice(0, 17)}…` : text);
    }
    if (chart.key !== "histogram") return;
    layout.xaxis.nticks = 4;
    for (const trace of data) trace.text = trace.text?.map((text) => text.replace(/^.* · /, " "));
  };
  const reset = () => {
    state.range = null;
    for (const chart of charts) chart.resets += 1;
    repaint();
  };
  const paint = (chart) => {
    const { plot } = chart;
    const { data, layout } = parsed(chart.source, scheme.matches && !state.paper);
    const { meta } = layout;
    const focus = lifted();
    chart.title = layout.title.text;
    chart.steps = Boolean(meta.steps);
    chart.usual = data.map((trace) => ({ meta: trace.meta, opacity: trace.opacity }));
    for (const trace of data) {
      trace.visible = visible(trace);
      recolored(trace);
      trace.opacity = opacity(trace, focus);
    }
    if (chart.steps && state.unit !== "steps") convert(data, layout);
    const curves = data.filter((trace) => trace.visible && trace.hoverinfo !== "skip");
    if (chart.steps) layout.hovermode = curves.length <= 12 ? "x unified" : "closest";
    if (chart.steps && state.range) layout.xaxis.range = [...state.range];
    if (chart.log !== null && meta.scales?.log) {
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
    const { color } = layout.font;
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: layout.yaxis.linecolor ?? color, activecolor: color };
    layout.uirevision = String(chart.resets);
    layout.xaxis.uirevision = `${chart.resets} ${state.unit} ${state.range}`;
    layout.yaxis.uirevision = `${chart.resets} ${chart.log}`;
    if (touch) layout.dragmode = false; // a finger scrolls the page
    if (plot.clientWidth < 420) narrow(chart, data, layout);
    if (state.paper) {
      layout.width = chart.figure.closest("#answer") ? 800 : 480;
      layout.height = Math.min(layout.height - 80, 300);
    }
    plot.style.height = `${layout.height}px`;
    // With another configuration, the library would forget the zoom.
    chart.config ??= { responsive: true, displaylogo: false, doubleClick: false, modeBarButtons: [
      [save(chart, "png", "PNG"), save(chart, "svg", "SVG")],
      ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d"],
      [{ name: "reset", title: "Reset the zoom", icon: Plotly.Icons.home, click: reset }]] };
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

  // ---- Lifting out: rows, names and curves of one setting stand out in all charts. -------------
  let waiting = false;
  const emphasize = () => {
    const focus = lifted();
    for (const body of all("#runs tbody")) {
      const inside = focus.includes(Number(body.dataset.setting));
      body.classList.toggle("dim", focus.length > 0 && !inside);
    }
    for (const button of all(".keep")) {
      const setting = Number(button.dataset.setting);
      button.setAttribute("aria-pressed", String(state.kept.includes(setting)));
      button.classList.toggle("dim", focus.length > 0 && !focus.includes(setting));
    }
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      for (const chart of charts) {
        if (!chart.near || chart.stale) {
          chart.stale = true;
          continue;
        }
        const shown = chart.usual.map((trace) => opacity(trace, lifted()));
        Plotly.restyle(chart.plot, { opacity: shown });
      }
    });
  };
  const hover = (setting) => {
    if (state.hovered === setting || state.filtered.has(setting)) return;
    state.hovered = setting;
    emphasize();
  };
  const keep = (setting) => {
    const pressed = state.kept.includes(setting);
    state.kept = pressed ? state.kept.filter((other) => other !== setting) : [...state.kept, setting];
    state.kept = state.kept.slice(-2);
    if (!pressed && look.greys.includes(setting) && !state.hues.has(setting)) {
      const taken = [...state.hues.values()];
      state.hues.set(setting, look.hues.find((hue) => !taken.includes(hue)) ?? look.hues[0]);
      document.documentElement.style.setProperty(`--g${setting}`, state.hues.get(setting));
    }
    emphasize();
    repaint();
  };
  for (const button of all(".keep")) {
    const setting = Number(button.dataset.setting);
    button.addEventListener("click", () => keep(setting));
    button.addEventListener("focus", () => hover(setting));
    button.addEventListener("blur", () => hover(null));
  }
  for (const part of all("#runs tbody, #key .keep")) {
    const setting = Number(part.dataset.setting);
    part.addEventListener("pointerenter", () => hover(setting));
    part.addEventListener("pointerleave", () => hover(null));
  }

  // ---- Reading values off: by pointer or arrow keys, with one cursor in all charts. ------------
  const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);
  const textOf = (chart, point) => {
    const given = point.hovertext ?? (point.z === undefined ? point.text : undefined);
    if (given !== undefined && given !== null) return given;
    const x = number(point.x);
    if (point.z !== undefined) return `${point.y}, ${x}: ${number(10 ** point.z)}`;
    const value = `${point.fullData.name}: ${number(point.y)}`;
    return chart.steps ? value : `${value} at ${x}`;
  };
  const read = (chart, points) => {
    const texts = points.map((point) => textOf(chart, point)).join("; ");
    chart.reading.textContent = chart.steps ? `${texts} at ${number(points[0].x)}` : texts;
  };
  const settingOf = ({ data, customdata }) =>
    (data?.meta?.cells ? customdata : data?.meta?.setting) ?? null;
  const nearest = (points, event) => {
    if (!event?.clientY || points.length === 1) return points[0];
    const distance = (p) => {
      const top = p.fullData ? p.yaxis._offset + p.yaxis.l2p(p.yaxis.d2l(p.y)) : Infinity;
      return Math.abs(event.clientY - event.target.closest(".plot").getBoundingClientRect().top - top);
    };
    return points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  };
  const leave = (chart) => {
    chart.reading.textContent = "";
    hover(null);
    for (const other of charts) {
      if (other !== chart && !other.stale && other.steps) Plotly.Fx.unhover(other.plot, {});
    }
  };
  const follow = (chart, points) => {
    if (!points?.length) return;
    read(chart, points);
    for (const other of chart.steps ? charts : []) {
      if (other === chart || !other.near || other.stale || !other.steps) continue;
      Plotly.Fx.hover(other.plot, { xval: points[0].x }, "xy", true);
    }
  };
  const zoomed = (chart, changes) => {
    const range = changes["xaxis.range"] ??
      ("xaxis.range[0]" in changes ? [changes["xaxis.range[0]"], changes["xaxis.range[1]"]] : null);
    if (!chart.steps || !range || String(range) === String(state.range)) return;
    state.range = range.map(Number);
    for (const other of charts) {
      if (other === chart || !other.steps) continue;
      other.stale = true;
      if (other.near) paint(other);
    }
  };
  const listen = (chart) => {
    chart.at = -1;
    chart.plot.on("plotly_hover", ({ points, event }) => {
      follow(chart, points);
      hover(settingOf(nearest(points, event)));
    });
    chart.plot.on("plotly_unhover", () => leave(chart));
    chart.plot.on("plotly_click", ({ points, event }) => {
      const setting = settingOf(nearest(points, event));
      if (setting !== null && setting >= 0) keep(setting);
    });
    chart.plot.on("plotly_relayout", (changes) => zoomed(chart, changes));
    chart.plot.on("plotly_doubleclick", reset);
  };
  const end = (chart) => {
    if (chart.at < 0) return;
    chart.at = -1;
    leave(chart);
    Plotly.Fx.unhover(chart.plot, {});
  };
  const places = (chart) => {
    const drawn = chart.plot._fullData.map((trace, curveNumber) => ({ trace, curveNumber }))
      .filter(({ trace }) => trace.visible === true && trace.hoverinfo !== "skip" && trace.x?.length);
    if (chart.steps && drawn.length) {
      const curves = drawn.filter(({ trace }) => !trace.meta?.join);
      const longest = curves.reduce((a, b) => (b.trace.x.length > a.trace.x.length ? b : a));
      return Array.from(longest.trace.x, (xval) => ({ xval }));
    }
    return drawn.flatMap(({ trace, curveNumber }) => (trace.type === "heatmap"
      ? trace.z.flatMap((row, i) => Array.from(row, (_, j) => ({ xval: trace.x?.[j] ?? j, yval: i })))
      : Array.from(trace.x, (_, pointNumber) => ({ curveNumber, pointNumber }))));
  };
  const keys = (chart, event) => {
    if (event.target !== chart.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 };
    const zooms = { "+": 0.5, "-": 2 };
    if (moves[event.key]) {
      const steps = places(chart);
      if (!steps.length) return;
      chart.at = Math.min(Math.max(chart.at + moves[event.key], 0), steps.length - 1);
      const place = steps[chart.at];
      Plotly.Fx.hover(chart.plot, "xval" in place ? place : [place], "xy");
      // The library waits between two of them, and tells nobody of one that no pointer asked for.
      setTimeout(() => chart.at >= 0 && follow(chart, chart.plot._hoverdata), 60);
    } else if (zooms[event.key]) {
      const [low, high] = chart.plot._fullLayout.xaxis.range;
      const middle = chart.steps && chart.at >= 0 ? places(chart)[chart.at].xval : (low + high) / 2;
      const around = (edge) => middle + (edge - middle) * zooms[event.key];
      Plotly.relayout(chart.plot, { "xaxis.range": [around(low), around(high)] });
    } else if (event.key === "0") {
      reset();
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
  }, { rootMargin: "200px" });
  for (const chart of charts) {
    chart.plot.addEventListener("keydown", (event) => keys(chart, event));
    chart.plot.addEventListener("blur", () => end(chart));
    chart.button?.addEventListener("click", () => {
      chart.log = !chart.log;
      paint(chart);
    });
    watch.observe(chart.figure);
  }

  // ---- Controls of all charts. -----------------------------------------------------------------
  const filter = byId("filter");
  filter?.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    state.filtered.clear();
    for (const button of all(".keep")) {
      const setting = Number(button.dataset.setting);
      const fits = button.textContent.toLowerCase().includes(wanted);
      if (!fits) state.filtered.add(setting);
      (button.closest("tbody") ?? button).hidden = !fits;
    }
    repaint();
  });
  const seeds = byId("seeds");
  seeds?.addEventListener("change", () => {
    state.seeds = seeds.checked;
    repaint();
  });
  const unit = byId("unit");
  for (const name of Object.keys(titles).slice(1)) {
    if (Object.values(look.axes).some((axes) => axes[name])) unit?.append(new Option(name));
  }
  unit?.addEventListener("change", () => {
    state.unit = unit.value;
    reset();
  });
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const button of all("button.copy")) {
    button.addEventListener("click", async () => {
      await copy(button.dataset.copy);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
  const help = byId("help");
  byId("help-button").addEventListener("click", () => help.showModal());
  help.querySelector(":scope > button").addEventListener("click", () => help.close());
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey) return;
    if (event.key === "?") help.showModal();
    else if (event.key === "/" && filter) filter.focus();
    else if (event.key.toLowerCase() === "s" && seeds) seeds.click();
    else if (event.key === "Escape" && state.kept.length && !help.open) {
      state.kept = [];
      emphasize();
      repaint();
    } else return;
    event.preventDefault();
  });
  scheme.addEventListener("change", repaint);

  // ---- Paper: all charts, dark on white, and no folds. -----------------------------------------
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    for (const details of folded) details.open = true;
    state.paper = true;
    repaint();
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
    state.paper = false;
    repaint();
  });
  byId("charts")?.removeAttribute("hidden");
  document.documentElement.dataset.ready = "true";
})();
