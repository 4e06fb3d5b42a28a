"use strict";
// The charts and controls of a report, drawn by uPlot. `report.state` is what the reader has chosen, `report.charts` the charts by name.
const report = (() => {
  const get = (id) => document.getElementById(id), style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const state = { metric: null, axis: "round", window: 1, log: false, patterns: false, hidden: new Set(), zoom: {} };
  const charts = new Map(), DASHES = [[], [8, 3], [2, 3], [9, 3, 2, 3], [5, 2]], FONT = "12px system-ui, sans-serif";
  let data = { runs: [], columns: {} };

  const short = (v, digits = 3) => String(+v.toPrecision(digits));
  function scaled(v, units) {
    let unit = 0;
    for (; v >= 1000 && unit < units.length - 1; unit += 1) v /= 1000;
    return `${short(v)} ${units[unit]}`;
  }
  const FORMATS = {
    fraction: (v) => (100 * v).toFixed(1).replace(/\.0$/, "") + "%", count: (v) => String(Math.round(v)),
    bits: (v) => scaled(v, ["bit", "kbit", "Mbit", "Gbit", "Tbit", "Pbit"]),
    seconds: (s) => s === 0 ? "0 s" : s < 1 ? `${short(1000 * s)} ms` : s < 120 ? `${short(s)} s` : s < 7200 ? `${short(s / 60)} min` : `${short(s / 3600)} h`,
  };
  const plain = (v) => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(1) : short(v);
  const format = (name) => FORMATS[data.columns[name].unit] || plain;
  const measured = (name) => data.runs.some((run) => run.series.some((table) => (table[name] || []).some(Number.isFinite)));
  const constantZero = (name) => data.runs.every((run) => run.series.every((table) => (table[name] || []).every((v) => !v)));
  const element = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text ?? "" });
  const range = (u, low, high) => low === null ? [0, 1] : low === high ? [low - (0.1 * Math.abs(low) || 0.5), high + (0.1 * Math.abs(high) || 0.5)] : [low - 0.05 * (high - low), high + 0.05 * (high - low)];

  // the mean of the last `window` measurements, as in the table; over seeds the mean and one standard deviation
  function curve(table, axis, metric, window) {
    const points = (table[axis] || []).map((x, i) => ({ x, y: (table[metric] || [])[i], round: table.round[i] }))
      .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && (!state.log || p.y > 0));
    return points.map((p, i) => {
      const last = points.slice(Math.max(0, i + 1 - window), i + 1);
      return { ...p, y: last.reduce((sum, q) => sum + q.y, 0) / last.length };
    });
  }
  function overSeeds(curves) {
    if (curves.length === 1) return curves[0];
    const byRound = curves.map((points) => new Map(points.map((p) => [p.round, p])));
    return curves[0].map((p) => byRound.map((seed) => seed.get(p.round))).filter((seeds) => seeds.every(Boolean)).map((seeds) => {
      const mean = (key) => seeds.reduce((sum, q) => sum + q[key], 0) / seeds.length, y = mean("y");
      const deviation = Math.sqrt(seeds.reduce((sum, q) => sum + (q.y - y) ** 2, 0) / (seeds.length - 1));
      return { x: mean("x"), y, deviation, round: seeds[0].round, low: state.log ? Math.max(y - deviation, Math.min(...seeds.map((q) => q.y))) : y - deviation, high: y + deviation };
    });
  }

  function axes(xText, yText, more = {}) {
    const common = { stroke: style("--soft"), font: FONT, grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false } };
    return [{ ...common, size: 26, label: more.label, labelSize: 18, labelFont: FONT, labelGap: 0, space: 70, values: (u, ticks) => ticks.map(xText) },
      { ...common, size: more.left || 58, space: 34, values: (u, ticks) => ticks.map((v) => v === null ? "" : yText(v)), splits: more.splits }];
  }
  // makes a chart in a box, with a tip beside the pointer, arrow keys, and the zoom of the last chart of this name
  function make(box, name, options, table, tip) {
    charts.get(name)?.destroy();
    const bubble = element("div", "tip"), u = new uPlot({
      width: Math.max(260, box.clientWidth), legend: { show: false }, padding: [10, 14, 0, 0], ...options,
      scales: { ...options.scales, x: { time: false, range: (_, low, high) => [low, high], ...options.scales?.x } },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false }, ...options.cursor },
      hooks: { draw: options.draw || [], setCursor: [(chart) => {
        const lines = chart.cursor.left < 0 ? [] : tip(chart);
        bubble.hidden = !lines.length;
        bubble.replaceChildren(...lines.map(([text, value, colour]) => {
          const row = element("div", value === undefined ? "when" : "row"), label = element("span", "", text);
          if (colour) { const mark = element("i", "swatch"); mark.style.setProperty("--c", colour); label.prepend(mark); }
          row.append(label, ...(value === undefined ? [] : [element("span", "", value)]));
          return row;
        }));
        const left = chart.cursor.left > chart.over.clientWidth / 2 ? chart.cursor.left - bubble.offsetWidth - 14 : chart.cursor.left + 14;
        bubble.style.transform = `translate(${Math.max(4 - chart.over.offsetLeft, left)}px, 8px)`;
      }], setScale: [(chart, key) => {
        const full = options.full, { min, max } = chart.scales.x;
        if (key === "x" && full) { if (min <= full[0] && max >= full[1]) delete state.zoom[name]; else state.zoom[name] = [min, max]; }
      }] },
    }, table, box);
    bubble.hidden = true; u.over.append(bubble); charts.set(name, u);
    if (state.zoom[name]) u.setScale("x", { min: state.zoom[name][0], max: state.zoom[name][1] });
    u.root.tabIndex = 0;
    u.root.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") { u.setCursor({ left: -10, top: -10 }); u.setScale("x", { min: options.full[0], max: options.full[1] }); }
      if (!step) return;
      event.preventDefault();
      const at = u.cursor.left < 0 ? (step > 0 ? 0 : table[0].length - 1) : Math.max(0, Math.min(table[0].length - 1, u.cursor.idx + step));
      u.setCursor({ left: u.valToPos(table[0][at], "x"), top: 20 });
    };
    return u;
  }

  function drawCurves(box, name, axis, metric, height, labelled) {
    const drawn = data.runs.map((run, index) => {
      const points = overSeeds(run.series.map((table) => curve(table, axis, metric, state.window)));
      const raw = state.window > 1 && run.series.length === 1 ? curve(run.series[0], axis, metric, 1) : null;
      return { run, index, points, raw };
    }).filter(({ index, points }) => points.length && !state.hidden.has(index));
    const figure = box.querySelector(".plot"), columns = (points, ...keys) => ["x", ...keys].map((key) => points.map((p) => p[key]));
    box.querySelector("figcaption").textContent = data.columns[metric].label;
    const tables = [], series = [{}], bands = [];
    for (const { run, index, points, raw } of drawn) {
      const line = { stroke: run.colour, width: 2.2, spanGaps: true, points: { show: points.length === 1, size: 7, fill: run.colour }, dash: state.patterns ? DASHES[index % 5] : [] };
      const thin = { stroke: run.colour, width: 0, spanGaps: true, points: { show: false } };
      tables.push(columns(points, "y")); series.push(line);
      if (raw) { tables.push(columns(raw, "y")); series.push({ ...thin, width: 1, alpha: 0.28 }); }
      if (run.series.length > 1) {
        tables.push(columns(points, "high", "low")); series.push(thin, thin);
        bands.push({ series: [series.length - 2, series.length - 1], fill: run.colour + "2b" });
      }
    }
    if (!drawn.length) { charts.get(name)?.destroy(); charts.delete(name); figure.textContent = "no data"; return; }
    if (figure.textContent === "no data") figure.textContent = "";
    const table = uPlot.join(tables), full = [table[0][0], table[0].at(-1)], named = labelled && figure.clientWidth > 520 && drawn.length <= 14;
    const room = named ? Math.min(190, 26 + 7 * Math.max(...drawn.map(({ run }) => run.name.length))) : 14, dpr = devicePixelRatio;
    const text = (pen, words, x, y, colour, bold) => { pen.font = `${bold ? 600 : 400} ${12 * dpr}px system-ui, sans-serif`; pen.fillStyle = colour; pen.fillText(words, x, y); };
    const marks = (u) => { // the target, and the names of the methods where their curves end
      const { left, top, width, height: tall } = u.bbox, pen = u.ctx;
      pen.save(); pen.textAlign = "left"; pen.textBaseline = "middle";
      const y = metric === data.metric && data.target !== null ? u.valToPos(data.target, "y", true) : NaN;
      if (y > top && y < top + tall) {
        pen.strokeStyle = style("--faint"); pen.setLineDash([6 * dpr, 4 * dpr]); pen.beginPath(); pen.moveTo(left, y); pen.lineTo(left + width, y); pen.stroke();
        if (labelled) text(pen, `target ${format(metric)(data.target)}`, left + 4 * dpr, y - 9 * dpr, style("--soft"));
      }
      const below = new Map(); // names of curves that end at one x move apart
      const ends = named ? drawn.map(({ run, points }) => ({ run, y: u.valToPos(points.at(-1).y, "y", true), x: u.valToPos(points.at(-1).x, "x", true) })) : [];
      for (const end of ends.sort((a, b) => a.y - b.y)) {
        if (!(end.y >= top && end.y <= top + tall && end.x <= left + width + 1)) continue;
        const column = Math.round(end.x), above = end.x > left + width - 2 ? 0 : 11 * dpr;
        const at = Math.max(end.y - above, (below.get(column) ?? -Infinity) + 15 * dpr);
        below.set(column, at);
        const words = end.run.name.length > 22 ? end.run.name.slice(0, 21) + "…" : end.run.name;
        text(pen, words, Math.min(end.x, left + width) + 8 * dpr, at, end.run.colour, true);
      }
      pen.restore();
    };
    const label = data.columns[axis].axis.replace(", seconds", "");
    make(figure, name, {
      height, series, bands, full, draw: [marks], axes: axes(format(axis), format(metric), { label }), padding: [10, room, 0, 0],
      scales: { y: state.log ? { distr: 3 } : { range } },
    }, table, (u) => {
      const x = u.posToVal(u.cursor.left, "x"), nearest = (points) => points.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);
      const rows = drawn.map(({ run, points }) => ({ run, point: nearest(points) }));
      const heading = axis === "round" ? `round ${rows[0].point.round}` : format(axis)(x);
      return [[heading], ...rows.map(({ run, point }) => [run.name, format(metric)(point.y) + (point.deviation === undefined ? "" : ` ± ${format(metric)(point.deviation)}`), run.colour])];
    });
  }

  // rows of rectangles [row, from, to, colour, opacity]: timelines and label distributions
  function drawCells(box, name, rows, width, rectangles, xText, tip, height, drag = true) {
    const every = Math.ceil(rows.length / (height / 16)), full = [0, width], left = Math.min(150, 22 + 7 * Math.max(...rows.map((row) => row.length)));
    const paint = (u) => {
      const pen = u.ctx, tall = u.bbox.height / rows.length, gap = tall > 6 ? devicePixelRatio : 0;
      pen.save(); pen.beginPath(); pen.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); pen.clip();
      for (const [row, from, to, colour, opacity] of rectangles) {
        if (to < u.scales.x.min || from > u.scales.x.max) continue;
        const a = u.valToPos(from, "x", true), b = u.valToPos(to, "x", true);
        pen.globalAlpha = opacity; pen.fillStyle = colour; pen.fillRect(a, u.bbox.top + row * tall, Math.max(b - a - gap * (b - a > 4), 0.6), tall - gap);
      }
      pen.restore();
    };
    const shown = axes(xText, (v) => rows[Math.floor(v)] ?? "", { left, splits: () => rows.map((_, i) => i + 0.5).filter((_, i) => i % every === 0) });
    shown[1].grid.show = false;
    make(box, name, { height, full, series: [{}, { show: false }], axes: shown, draw: [paint], cursor: { drag: { x: drag, y: false } },
      scales: { x: { range: (_, low, high) => low === null ? full : [Math.max(0, low), Math.min(width, high)] }, y: { dir: -1, range: () => [0, rows.length] } } },
    [full, full], (u) => tip(Math.floor(u.posToVal(u.cursor.top, "y")), u.posToVal(u.cursor.left, "x")));
  }
  function drawTimeline(box, index) {
    const { clients, jobs, seconds } = data.timelines[index], phase = { 2: style("--accent"), 3: style("--good"), refused: style("--bad") };
    const rectangles = jobs.flatMap(([row, start, computed, sent, end, refused]) => refused ? [[row, start, end, phase.refused, 1]]
      : [[row, start, computed, phase[2], 0.45], [row, computed, sent, phase[2], 1], [row, sent, end, phase[3], 1]]);
    drawCells(box, `timeline-${index}`, clients.map(String), seconds, rectangles, FORMATS.seconds, (row, time) => {
      const job = jobs.find(([at, start, , , end]) => at === row && time >= start && time <= end);
      return job ? [[`client ${clients[row]}`], ["round", String(job[6])], ["start", FORMATS.seconds(job[1])], ["compute", FORMATS.seconds(job[3] - job[2])], [job[5] ? "refused" : "arrival", FORMATS.seconds(job[4])]] : [];
    }, Math.min(420, 50 + 20 * Math.max(4, clients.length)));
  }
  function drawHeat(box, index) {
    const { labels, counts } = data.partitions[index], most = Math.max(1, ...counts.map((row) => Math.max(0, ...row)));
    const rectangles = counts.flatMap((row, client) => row.map((n, label) => [label, client, client + 1, style("--heat"), 0.12 + 0.88 * (n / most) ** 0.6]).filter((_, label) => row[label]));
    drawCells(box, `heat-${index}`, labels, counts.length, rectangles, (v) => Number.isInteger(v) && v < counts.length ? String(v) : "", (label, at) => {
      const client = Math.floor(at);
      return counts[client]?.[label] === undefined ? [] : [[`client ${client}`], [labels[label], `${counts[client][label]} samples`]];
    }, 46 + 19 * Math.max(3, labels.length));
  }
  function drawClients(box, index) {
    const { values, unit, name } = data.clients[index], worst = Math.ceil(values.length / 10), write = FORMATS[unit] || plain;
    const colour = getComputedStyle(box).getPropertyValue("--c").trim(), bars = { paths: uPlot.paths.bars({ size: [0.85] }), width: 0, points: { show: false } };
    make(box, `clients-${index}`, {
      height: 130, full: [-0.5, values.length - 0.5], axes: axes((v) => "", write), cursor: { drag: { x: false } },
      series: [{}, { ...bars, fill: colour }, { ...bars, fill: colour + "59" }],
      scales: { x: { range: () => [-0.5, values.length - 0.5] }, y: { range: (_, low, high) => [0, unit === "fraction" ? 1 : (high > 0 ? 1.05 * high : 1)] } },
    }, [values.map((_, i) => i), values.map((v, i) => i < worst ? v : null), values.map((v, i) => i < worst ? null : v)],
    (u) => values[u.cursor.idx] === undefined ? [] : [[name.replaceAll("_", " "), write(values[u.cursor.idx])]]);
  }

  function figures(id, names, draw) {
    const box = get(id);
    while (box.children.length > names.length) { charts.get(box.lastChild.dataset.name)?.destroy(); charts.delete(box.lastChild.dataset.name); box.lastChild.remove(); }
    names.forEach((name, place) => {
      let figure = box.children[place];
      if (!figure) {
        figure = element("figure", "");
        const save = element("button", "save", "PNG");
        save.type = "button"; save.title = "save this figure as PNG"; save.onclick = () => savePng(figure.dataset.name);
        figure.append(element("figcaption", ""), element("div", "plot"), save); box.append(figure);
      }
      figure.dataset.name = `${id}-${place}`;
      draw(figure, figure.dataset.name, name);
    });
  }
  function redraw() {
    const metrics = Object.keys(data.columns).filter((name) => !data.columns[name].axis && measured(name) && !(data.columns[name].hide_zero && constantZero(name)));
    if (!metrics.includes(state.metric)) state.metric = metrics.includes(data.metric) ? data.metric : metrics[0] ?? null;
    if (!measured(state.axis)) state.axis = "round";
    get("curves").hidden = state.metric === null;
    const time = measured("simulated_total_seconds") ? "simulated_total_seconds" : "wall_seconds";
    const details = state.metric === null ? [] : metrics.filter((name) => data.columns[name].charts.includes("detail") && !constantZero(name));
    get("inside").hidden = !details.length;
    document.querySelectorAll("[data-timeline], [data-heat], [data-clients]").forEach((box) => {
      if (!box.clientWidth) return; // in a closed <details>
      const kind = Object.keys(box.dataset).find((key) => ["timeline", "heat", "clients"].includes(key));
      ({ timeline: drawTimeline, heat: drawHeat, clients: drawClients })[kind](box, +box.dataset[kind]);
    });
    document.querySelectorAll(".scroll").forEach((box) => box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1));
    document.querySelectorAll("tr[data-run]").forEach((row) => {
      row.classList.toggle("off", state.hidden.has(+row.dataset.run)); row.tabIndex = 0;
      row.onclick = (event) => toggle(+row.dataset.run, event.shiftKey); row.onkeydown = (event) => { if (event.key === "Enter") row.onclick(event); };
    });
    if (state.metric === null) return;
    const choose = (id, key, options) => get(id).replaceChildren(...options.map(([value, label]) => {
      const button = element("button", "", label);
      button.type = "button"; button.ariaPressed = String(value === state[key]); button.onclick = () => { state[key] = value; redraw(); };
      return button;
    }));
    choose("metric", "metric", metrics.map((name) => [name, data.columns[name].label]));
    choose("axis", "axis", Object.keys(data.columns).filter((name) => data.columns[name].axis && measured(name)).map((name) => [name, data.columns[name].label]));
    choose("smooth", "window", [[1, "raw"], ...(data.window > 1 ? [[data.window, `mean of ${data.window}`], [3 * data.window, `of ${3 * data.window}`]] : [])]);
    get("legend").replaceChildren(...data.runs.map((run, index) => {
      const button = element("button", ""), mark = element("i", "swatch");
      mark.style.setProperty("--c", run.colour); button.append(mark, element("span", "", run.name + (run.series.length > 1 ? ` (${run.series.length} seeds)` : "")));
      button.type = "button"; button.ariaPressed = String(!state.hidden.has(index)); button.title = "click to hide or show; Shift-click to show only this method";
      button.onclick = (event) => toggle(index, event.shiftKey);
      return button;
    }));
    figures("main", [state.metric], (box, name, metric) => drawCurves(box, name, state.axis, metric, Math.max(280, Math.min(430, 0.46 * box.clientWidth)), true));
    figures("costs", ["up_bits", time].filter(measured), (box, name, axis) => drawCurves(box, name, axis, state.metric, 260, true));
    figures("diagnostics", details, (box, name, metric) => drawCurves(box, name, state.axis, metric, 200, false));
    for (const name of ["log", "patterns"]) get(name).ariaPressed = String(state[name]);
    get("hint").textContent = (data.stride > 1 ? `The charts show every ${data.stride}th round; the tables use all rounds. ` : "") +
      (state.window > 1 ? `Bold: mean of the last ${state.window} measurements; faint: single measurements. ` : "") +
      (data.runs.some((run) => run.series.length > 1) ? "Bands: one standard deviation over seeds. " : "") + "Drag to zoom, double-click to show all; arrow keys read values.";
  }
  function toggle(run, alone) {
    const others = data.runs.map((_, i) => i).filter((i) => i !== run);
    if (alone) state.hidden = new Set(!state.hidden.has(run) && others.every((i) => state.hidden.has(i)) ? [] : others);
    else if (!state.hidden.delete(run)) state.hidden.add(run);
    redraw();
  }
  function save(blob, name) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
    link.click(); setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function savePng(name) {
    const drawn = charts.get(name).ctx.canvas, copy = Object.assign(document.createElement("canvas"), { width: drawn.width, height: drawn.height }), pen = copy.getContext("2d");
    pen.fillStyle = style("--card"); pen.fillRect(0, 0, copy.width, copy.height); pen.drawImage(drawn, 0, 0);
    copy.toBlob((blob) => save(blob, `${name}.png`));
  }
  function csv() {
    const names = Object.keys(data.columns).filter(measured), quote = (text) => `"${String(text).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
    const rows = data.runs.flatMap((run) => run.series.flatMap((table, seed) => table.round.map((_, i) => [quote(run.name), run.seeds[seed] ?? "", ...names.map((name) => table[name]?.[i] ?? "")].join(","))));
    return [["run", "seed", ...names.map((name) => /^\w+$/.test(name) ? name : quote(name))].join(","), ...rows].join("\n") + "\n";
  }
  function load(content) {
    const first = !data.runs.length;
    data = content;
    if (first) { state.patterns = data.runs.length > 10; state.window = Math.max(0, ...data.runs.map((run) => run.series[0].round.length)) > 3 * data.window ? data.window : 1; }
    redraw();
  }

  get("csv").onclick = () => save(new Blob([csv()], { type: "text/csv" }), "curves.csv");
  for (const name of ["log", "patterns"]) get(name).onclick = () => { state[name] = !state[name]; redraw(); };
  get("theme").onclick = (event) => {
    const themes = ["system", "light", "dark"], root = document.documentElement, next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % 3];
    if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
    event.target.textContent = "theme: " + next; redraw();
  };
  document.addEventListener("toggle", redraw, true);
  matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
  let width = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); } }).observe(document.body);
  load(JSON.parse(get("data").textContent));
  return { state, charts, load, csv };
})();
