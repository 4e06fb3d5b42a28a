"use strict";
// Charts of a report, without a library. plots.draw(plot, view) draws one; plots.state holds what the reader has chosen.
const plots = (() => {
  const METRICS = {}, AXES = {}; // name: [label, format] and name: [label, axis label, format], from the data's table of columns
  const FORMATS = { fraction: percent, bits, seconds: time, count: whole };
  const DASHES = ["", "8 3", "2 3", "9 3 2 3", "5 2"];
  const state = { data: { runs: [], target: null, columns: {} }, metric: null, axis: "round", window: 1, log: false, patterns: false, hidden: new Set(), zoom: {} };

  function percent(v) { return (100 * v).toFixed(1) + "%"; }
  function short(v) { return percent(v).replace(".0%", "%"); }
  function plain(v) { return v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(3)); }
  function whole(v) { return String(Math.round(v)); }
  function scaled(v, units) {
    let k = 0;
    while (v >= 1000 && k < units.length - 1) { v /= 1000; k += 1; }
    return +v.toPrecision(3) + " " + units[k];
  }
  function bits(v) { return scaled(v, ["bit", "kbit", "Mbit", "Gbit", "Tbit", "Pbit"]); }
  function time(s) {
    if (s === 0) return "0 s";
    return s < 1 ? +(1000 * s).toPrecision(3) + " ms" : s < 120 ? +s.toPrecision(3) + " s" : s < 7200 ? +(s / 60).toPrecision(3) + " min" : +(s / 3600).toPrecision(3) + " h";
  }

  // a column with equal steps is sent as its first value, its step and its length
  const unpacked = (column) => Array.isArray(column) ? column : Array.from({ length: column.count }, (_, i) => column.first + i * column.step);
  function load(data) {
    for (const run of data.runs) for (const part of run.seeds || [run])
      for (const name of Object.keys(part.series)) part.series[name] = unpacked(part.series[name]);
    for (const [name, { label, unit, axis }] of Object.entries(data.columns)) {
      const format = FORMATS[unit] || plain;
      if (axis) AXES[name] = [label, axis.replace(", seconds", ""), format]; // ticks have their units
      else METRICS[name] = [label, format];
    }
    state.data = data;
  }
  const parts = (run) => run.seeds || [run];
  const measured = (name) => state.data.runs.some((run) => parts(run).some((part) => (part.series[name] || []).some(Number.isFinite)));
  const dash = (index) => state.patterns ? DASHES[index % DASHES.length] : "";

  function ticks(low, high, count, base, integers) {
    const span = (high - low) / base || 1;
    const rough = span / count, power = Math.max(10 ** Math.floor(Math.log10(rough)), integers ? 1 : 0);
    const step = (integers ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((m) => m * power).find((s) => span / s <= count + 0.5) * base;
    const found = [];
    if (!(Math.abs(low / step) < 1e9)) return found; // steps below the rounding error would never end
    for (let t = Math.ceil(low / step - 1e-9); t * step <= high + step * 1e-9; t += 1) found.push(+(t * step).toPrecision(12));
    return found;
  }
  function timeBase(high) { return high >= 7200 ? 3600 : high >= 120 ? 60 : 1; }
  function logTicks(low, high) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const m of [1, 2, 5]) { const t = m * 10 ** e; if (t >= low * 0.999 && t <= high * 1.001) found.push(t); }
    return found.length > 9 ? found.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9) : found;
  }

  function smooth(points) { // the mean of the last `window` measurements, as in the table
    let sum = 0;
    return points.map((p, i) => {
      sum += p.y - (i >= state.window ? points[i - state.window].y : 0);
      return { ...p, y: state.window === 1 ? p.y : sum / Math.min(i + 1, state.window) };
    });
  }
  function curve(series, axis, metric) {
    const xs = series[axis] || [], ys = series[metric] || [];
    const raw = xs.map((x, i) => ({ x, y: ys[i], round: series.round[i] }))
      .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && (!state.log || p.y > 0));
    return { raw, points: smooth(raw) };
  }
  // over seeds: each curve is smoothed; then the mean and one standard deviation at every round that all seeds have
  function over(seeds) {
    const tables = seeds.map((points) => new Map(points.map((p) => [p.round, p])));
    const found = [];
    for (const p of seeds[0]) {
      const at = tables.map((table) => table.get(p.round));
      if (!at.every(Boolean)) continue;
      const x = at.reduce((sum, q) => sum + q.x, 0) / at.length, y = at.reduce((sum, q) => sum + q.y, 0) / at.length;
      const apart = Math.sqrt(at.reduce((sum, q) => sum + (q.y - y) ** 2, 0) / (at.length - 1));
      found.push({ x, y, round: p.round, low: state.log ? Math.max(y - apart, Math.min(...at.map((q) => q.y))) : y - apart, high: y + apart, apart });
    }
    return found;
  }
  function curves(axis, metric) {
    return state.data.runs.map((run, index) => {
      if (!run.seeds) return { run, index, ...curve(run.series, axis, metric) };
      const each = run.seeds.map((seed) => curve(seed.series, axis, metric));
      return { run, index, raw: over(each.map((c) => c.raw)), points: over(each.map((c) => c.points)), band: true };
    }).filter((curve) => curve.raw.length && !state.hidden.has(curve.index));
  }

  const NS = "http://www.w3.org/2000/svg";
  function add(parent, tag, attributes, text) {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== "") node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }
  const area = (points, X, Y) => // there along the upper edge, and back along the lower one
    path(points.map((p) => ({ x: p.x, y: p.high })), X, Y) + "L" + path([...points].reverse().map((p) => ({ x: p.x, y: p.low })), X, Y).slice(1) + "Z";
  const path = (points, X, Y) => points.map((p, i) => (i ? "L" : "M") + X(p.x).toFixed(1) + " " + Y(p.y).toFixed(1)).join("");
  const least = (list) => list.reduce((a, b) => Math.min(a, b), Infinity), most = (list) => list.reduce((a, b) => Math.max(a, b), -Infinity);

  // view: {axis, metric, tall, labels}
  function draw(plot, view) {
    const { axis, metric, tall } = view;
    const [, xLabel, xText] = AXES[axis], [yLabel, yText] = METRICS[metric];
    const drawn = curves(axis, metric);
    const width = Math.max(280, plot.clientWidth), height = tall ? Math.max(260, Math.min(430, width * 0.46)) : Math.min(300, Math.max(190, width * 0.6));
    const longest = most(state.data.runs.map((run) => run.name.length));
    const labels = view.labels && width > 520 && drawn.length <= 14;
    const m = { top: 22, right: labels ? Math.min(width * 0.26, 18 + 7.4 * longest) : 14, bottom: 42, left: 54 };
    plot.replaceChildren();
    const svg = add(plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": `${yLabel} against ${xLabel}. Use arrow keys to read values, plus and minus to zoom, Escape to show all.` });
    add(svg, "text", { x: m.left - 44, y: 11, style: "font-weight:600" }, yLabel);
    if (!drawn.length) { add(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no data"); return; }

    const all = drawn.flatMap((c) => c.points), zoom = state.zoom[axis];
    const [x0, x1] = zoom || [0, most(all.map((p) => p.x))];
    const seen = all.filter((p) => p.x >= x0 && p.x <= x1), raws = drawn.flatMap((c) => c.raw).filter((p) => p.x >= x0 && p.x <= x1);
    const values = (seen.length ? seen : all).flatMap((p) => (p.apart ? [p.low, p.y, p.high] : [p.y])).sort((a, b) => a - b);
    // the range leaves out the outermost 2%, so that an outlier does not flatten the rest
    const cut = raws.length > 30 ? 0.02 : 0, ranked = raws.map((p) => p.y).sort((a, b) => a - b);
    let y0 = Math.min(values[Math.floor(cut * values.length)], ranked[Math.floor(cut * ranked.length)] ?? Infinity);
    let y1 = Math.max(values[Math.ceil((1 - cut) * values.length) - 1], ranked[Math.ceil((1 - cut) * ranked.length) - 1] ?? -Infinity);
    if (y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1))) { y0 -= 0.05 * Math.abs(y0) + 1e-9; y1 += 0.05 * Math.abs(y1) + 1e-9; }
    if (state.log && y0 <= 0) y0 = y1 / 1000;
    const f = state.log ? Math.log10 : (v) => v, pad = 0.05 * (f(y1) - f(y0));
    let low = f(y0) - pad, high = f(y1) + pad;
    if (state.data.columns[metric].unit === "fraction" && !state.log) { low = Math.max(0, low); high = Math.min(1, high); }
    const right = width - m.right, bottom = height - m.bottom;
    const X = (v) => m.left + ((v - x0) / (x1 - x0 || 1)) * (right - m.left);
    const Y = (v) => bottom - ((f(v) - low) / (high - low)) * (bottom - m.top);

    for (const t of state.log ? logTicks(10 ** low, 10 ** high) : ticks(low, high, tall ? 6 : 4, 1)) {
      add(svg, "line", { class: "grid", x1: m.left, x2: right, y1: Y(t), y2: Y(t) });
      add(svg, "text", { x: m.left - 9, y: Y(t) + 4, "text-anchor": "end" }, yText === percent ? short(t) : yText(t));
    }
    const base = axis.endsWith("seconds") ? timeBase(x1) : 1;
    for (const t of ticks(x0, x1, Math.max(3, Math.min(10, Math.floor((right - m.left) / 85))), base, axis === "round"))
      add(svg, "text", { x: X(t), y: bottom + 19, "text-anchor": "middle" }, xText(t));
    add(svg, "line", { class: "axis", x1: m.left, x2: right, y1: bottom, y2: bottom });
    add(svg, "text", { x: (m.left + right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel);

    const clip = `clip-${plot.dataset.name}`;
    add(add(svg, "clipPath", { id: clip }), "rect", { x: m.left, y: m.top - 8, width: right - m.left + 2, height: bottom - m.top + 10 });
    const inside = add(svg, "g", { "clip-path": `url(#${clip})` }), target = state.data.target;
    if (target && metric === state.data.metric && f(target) < high && f(target) > low) {
      add(inside, "line", { class: "goal", x1: m.left, x2: right, y1: Y(target), y2: Y(target) });
      add(svg, "text", { x: m.left + 6, y: Y(target) - 5 }, "target " + (yText === percent ? short : yText)(target));
    }
    for (const c of drawn) if (c.band) add(inside, "path", { class: "band", fill: c.run.colour, d: area(c.points, X, Y) });
    if (state.window > 1 && tall) for (const c of drawn) if (!c.band) add(inside, "path", { class: "raw", stroke: c.run.colour, d: path(c.raw, X, Y) });
    for (const c of drawn) add(inside, "path", { class: "line", "data-run": c.index, stroke: c.run.colour, "stroke-dasharray": dash(c.index), d: path(c.points, X, Y) });
    for (const c of drawn) if (c.points.length === 1) add(inside, "circle", { cx: X(c.points[0].x), cy: Y(c.points[0].y), r: 3.4, fill: c.run.colour });
    if (labels) endLabels(svg, drawn, X, Y, x1, right, m.top, bottom);
    interact(plot, svg, { ...view, drawn, X, Y, x0, x1, right, bottom, m, width, xText, yText, xMost: most(all.map((p) => p.x)) });
  }

  function endLabels(svg, drawn, X, Y, x1, right, top, bottom) {
    const labels = drawn.map((c) => {
      const last = c.points.filter((p) => p.x <= x1 * (1 + 1e-9)).at(-1) || c.points[0];
      return { run: c.run, x: X(last.x), y: Y(last.y) };
    }).filter((l) => l.y >= top - 10 && l.y <= bottom + 10).sort((a, b) => a.y - b.y);
    labels.forEach((l) => add(svg, "circle", { cx: l.x, cy: l.y, r: 3.4, fill: l.run.colour }));
    labels.forEach((l, i) => { if (i) l.y = Math.max(l.y, labels[i - 1].y + 15); });
    for (let i = labels.length - 1; i >= 0; i -= 1) labels[i].y = Math.min(labels[i].y, (i + 1 < labels.length ? labels[i + 1].y : bottom + 12) - 15);
    labels.forEach((l) => {
      const name = l.run.name.length > 34 ? l.run.name.slice(0, 33) + "\u2026" : l.run.name;
      add(svg, "text", { class: "end", x: right + 9, y: l.y + 4, style: `fill:${l.run.colour}` }, name);
    });
  }

  function interact(plot, svg, view) {
    const { axis, drawn, X, Y, x0, x1, right, bottom, m, width, xText, yText, xMost } = view;
    const cross = add(svg, "line", { class: "cross", y1: m.top, y2: bottom, visibility: "hidden" });
    const band = add(svg, "rect", { y: m.top, height: bottom - m.top, width: 0, x: 0, fill: "currentColor", opacity: 0.08 });
    const dots = drawn.map((c) => add(svg, "circle", { r: 4, fill: c.run.colour, stroke: "var(--card)", "stroke-width": 1.5, visibility: "hidden" }));
    const tip = document.createElement("div");
    tip.className = "tip"; tip.hidden = true; tip.setAttribute("role", "status"); plot.append(tip);
    const spot = (event) => {
      const box = svg.getBoundingClientRect();
      return Math.min(right, Math.max(m.left, ((event.clientX - box.left) / box.width) * width));
    };
    const value = (px) => x0 + ((px - m.left) / (right - m.left)) * (x1 - x0);
    let from = null, at = null;
    function show(x) {
      at = x;
      const px = X(x);
      cross.setAttribute("x1", px); cross.setAttribute("x2", px); cross.setAttribute("visibility", "visible");
      const rows = drawn.map((c, i) => {
        const p = c.points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
        dots[i].setAttribute("cx", X(p.x)); dots[i].setAttribute("cy", Y(p.y));
        dots[i].setAttribute("visibility", p.x >= x0 && p.x <= x1 ? "visible" : "hidden");
        return { c, p };
      }).sort((a, b) => b.p.y - a.p.y);
      tip.replaceChildren();
      const when = document.createElement("div");
      when.className = "when"; when.textContent = axis === "round" ? "round " + rows[0].p.round : xText(x); tip.append(when);
      for (const { c, p } of rows) {
        const row = document.createElement("div"), name = document.createElement("span"), number = document.createElement("b"), box = document.createElement("i");
        row.className = "row"; box.className = "swatch"; box.style.setProperty("--c", c.run.colour);
        name.append(box, c.run.name); number.textContent = yText(p.y) + (c.band ? " \u00b1 " + yText(p.apart) : ""); row.append(name, number); tip.append(row);
      }
      tip.hidden = false;
      const scale = svg.getBoundingClientRect().width / width, left = px * scale, room = plot.clientWidth - tip.offsetWidth;
      tip.style.left = Math.max(-6, Math.min(room + 6, px > (m.left + right) / 2 ? left - tip.offsetWidth - 14 : left + 14)) + "px";
      tip.style.top = m.top * scale + "px";
    }
    function hide() {
      tip.hidden = true; from = at = null; band.setAttribute("width", 0);
      cross.setAttribute("visibility", "hidden"); dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
    }
    function zoom(range) {
      if (range && range[1] > range[0]) state.zoom[axis] = range; else delete state.zoom[axis];
      const focus = document.activeElement === svg;
      document.dispatchEvent(new CustomEvent("redraw"));
      if (focus) plot.querySelector("svg").focus();
    }
    svg.addEventListener("pointermove", (event) => {
      const px = spot(event);
      if (from !== null) { band.setAttribute("x", Math.min(from, px)); band.setAttribute("width", Math.abs(px - from)); }
      show(value(px));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("pointerdown", (event) => { from = spot(event); });
    svg.addEventListener("pointerup", (event) => {
      const to = spot(event), start = from;
      from = null; band.setAttribute("width", 0);
      if (start !== null && Math.abs(to - start) > 12) zoom([value(Math.min(start, to)), value(Math.max(start, to))]);
    });
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("keydown", (event) => {
      const xs = [...new Set(drawn[0].points.map((p) => p.x))].filter((x) => x >= x0 && x <= x1);
      const here = at === null ? -1 : xs.reduce((best, x, i) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best), 0);
      const step = Math.max(1, Math.round(xs.length / 60)), middle = at ?? (x0 + x1) / 2, span = x1 - x0;
      const moves = { ArrowRight: here + step, ArrowLeft: here < 0 ? xs.length - 1 : here - step, Home: 0, End: xs.length - 1 };
      if (event.key in moves && xs.length) show(xs[Math.max(0, Math.min(xs.length - 1, moves[event.key]))]);
      else if (event.key === "+" || event.key === "=") zoom([Math.max(0, middle - span / 4), Math.min(xMost, middle + span / 4)]);
      else if (event.key === "-") zoom(span * 2 >= xMost ? null : [Math.max(0, middle - span), Math.min(xMost, middle + span)]);
      else if (event.key === "Escape" || event.key === "0") { hide(); zoom(null); }
      else return;
      event.preventDefault();
    });
  }

  function standalone(plot) {
    const source = plot.querySelector("svg"), svg = source.cloneNode(true);
    const originals = source.querySelectorAll("*"), copies = svg.querySelectorAll("*");
    originals.forEach((node, i) => {
      const style = getComputedStyle(node);
      for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "visibility"])
        copies[i].style.setProperty(name, style.getPropertyValue(name));
    });
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    svg.setAttribute("xmlns", NS); svg.setAttribute("width", width); svg.setAttribute("height", height);
    return { text: new XMLSerializer().serializeToString(svg), width, height };
  }
  function swatch(index, colour) {
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", "0 0 26 10"); svg.setAttribute("aria-hidden", "true");
    add(svg, "line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash(index), "stroke-linecap": "butt" });
    return svg;
  }
  return { METRICS, AXES, state, load, parts, measured, draw, standalone, swatch };
})();
