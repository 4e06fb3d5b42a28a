"use strict";
// Curves of a report: no library, one state, redrawn whole. Data: {runs: [{name, colour, series: {metric: [..]}, seeds: [{seed, series}]}], target}.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const METRICS = {
    test_accuracy: ["accuracy", percent], test_loss: ["test loss", plain], global_loss: ["global loss", plain],
    local_mean_loss: ["loss at the local mean", plain], loss: ["loss", plain],
    train_loss: ["local loss", plain], diversity: ["diversity", plain], update_norm: ["update norm", plain], consensus: ["consensus", plain],
    sigma_g: ["\u03c3 between clients", plain],
  };
  const AXES = {
    round: ["communication rounds", whole], server_bits: ["bits to and from the server", bits],
    simulated_total_seconds: ["simulated time", time], wall_seconds: ["wall time", time],
  };
  const measured = (name) => data.runs.some((run) => (run.series[name] || []).some(Number.isFinite));
  const state = {
    metric: Object.keys(METRICS).find(measured), window: data.runs.some((run) => run.series.round.length > 15) ? 5 : 1,
    log: false, hidden: new Set(), at: null, zoom: {},
  };
  const plots = [...document.querySelectorAll(".plot")].filter((plot) => {
    const drawn = measured(plot.dataset.x) && !(plot.dataset.insteadOf && measured(plot.dataset.insteadOf));
    if (!drawn) plot.parentElement.remove();
    return drawn;
  });

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

  function ticks(low, high, count, base, integers) {
    const span = (high - low) / base || 1;
    const rough = span / count, power = Math.max(10 ** Math.floor(Math.log10(rough)), integers ? 1 : 0);
    const step = (integers ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((m) => m * power).find((s) => span / s <= count + 0.5) * base;
    const found = [];
    for (let t = Math.ceil(low / step - 1e-9); t * step <= high + step * 1e-9; t += 1) found.push(+(t * step).toPrecision(12));
    return found;
  }
  function timeBase(high) { return high >= 7200 ? 3600 : high >= 120 ? 60 : 1; }
  function logTicks(low, high) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const m of [1, 2, 5]) { const t = m * 10 ** e; if (t >= low * 0.999 && t <= high * 1.001) found.push(t); }
    return found;
  }

  function smooth(points) { // the mean of the last `window` measurements, as in the table
    return points.map((p, i) => {
      const part = points.slice(Math.max(0, i + 1 - state.window), i + 1);
      return { ...p, y: part.reduce((sum, q) => sum + q.y, 0) / part.length };
    });
  }
  function curve(series, axis) {
    const xs = series[axis] || [], ys = series[state.metric] || [];
    const raw = xs.map((x, i) => ({ x, y: ys[i], round: series.round[i] }))
      .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && (!state.log || p.y > 0));
    return { raw, points: smooth(raw) };
  }
  // over seeds: each is smoothed by itself, then at every round that all have the mean, and one standard deviation around it
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
  function curves(axis) {
    return data.runs.map((run, index) => {
      if (!run.seeds) return { run, index, ...curve(run.series, axis) };
      const each = run.seeds.map((seed) => curve(seed.series, axis));
      return { run, index, raw: over(each.map((c) => c.raw)), points: over(each.map((c) => c.points)), band: true };
    }).filter((curve) => curve.raw.length && !state.hidden.has(curve.index));
  }

  const NS = "http://www.w3.org/2000/svg";
  function add(parent, tag, attributes, text) {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }
  const area = (points, X, Y) => // there along the upper edge, and back along the lower one
    path(points.map((p) => ({ x: p.x, y: p.high })), X, Y) + "L" + path([...points].reverse().map((p) => ({ x: p.x, y: p.low })), X, Y).slice(1) + "Z";
  const path = (points, X, Y) => points.map((p, i) => (i ? "L" : "M") + X(p.x).toFixed(1) + " " + Y(p.y).toFixed(1)).join("");

  function draw(plot) {
    const axis = plot.dataset.x, tall = plot.dataset.tall === "1";
    const [xLabel, xText] = AXES[axis], [yLabel, yText] = METRICS[state.metric];
    const drawn = curves(axis);
    const width = Math.max(320, plot.clientWidth), height = tall ? Math.min(430, width * 0.46) : Math.min(300, width * 0.62);
    const longest = Math.max(...data.runs.map((run) => run.name.length));
    const m = { top: 22, right: Math.min(width * 0.3, 18 + 8 * longest), bottom: 42, left: 54 };
    plot.replaceChildren();
    const svg = add(plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yLabel} against ${xLabel}` });
    if (!drawn.length) { add(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to draw"); return; }

    const all = drawn.flatMap((c) => c.points), zoom = state.zoom[axis];
    const [x0, x1] = zoom || [0, Math.max(...all.map((p) => p.x))];
    const seen = all.filter((p) => p.x >= x0 && p.x <= x1), raws = drawn.flatMap((c) => c.raw).filter((p) => p.x >= x0 && p.x <= x1);
    const values = (seen.length ? seen : all).flatMap((p) => (p.apart ? [p.low, p.y, p.high] : [p.y])).sort((a, b) => a - b);
    // a wild first round must not squeeze all the rest: the drawn range forgets the outermost two in a hundred
    const cut = raws.length > 30 ? 0.02 : 0, ranked = raws.map((p) => p.y).sort((a, b) => a - b);
    let y0 = Math.min(values[Math.floor(cut * values.length)], ranked[Math.floor(cut * ranked.length)] ?? Infinity);
    let y1 = Math.max(values[values.length - 1], ranked[Math.ceil((1 - cut) * ranked.length) - 1] ?? -Infinity);
    if (y1 <= y0) { y0 -= 0.05 * Math.abs(y0) + 1e-9; y1 += 0.05 * Math.abs(y1) + 1e-9; }
    const f = state.log ? Math.log10 : (v) => v, pad = 0.05 * (f(y1) - f(y0));
    let low = f(y0) - pad, high = f(y1) + pad;
    if (state.metric === "test_accuracy" && !state.log) { low = Math.max(0, low); high = Math.min(1, high); }
    const right = width - m.right, bottom = height - m.bottom;
    const X = (v) => m.left + ((v - x0) / (x1 - x0 || 1)) * (right - m.left);
    const Y = (v) => bottom - ((f(v) - low) / (high - low)) * (bottom - m.top);

    for (const t of state.log ? logTicks(10 ** low, 10 ** high) : ticks(low, high, tall ? 6 : 5, 1)) {
      add(svg, "line", { class: "grid", x1: m.left, x2: right, y1: Y(t), y2: Y(t) });
      add(svg, "text", { x: m.left - 9, y: Y(t) + 4, "text-anchor": "end" }, yText === percent ? short(t) : yText(t));
    }
    const base = axis.endsWith("seconds") ? timeBase(x1) : 1;
    for (const t of ticks(x0, x1, tall ? 10 : 5, base, axis === "round"))
      add(svg, "text", { x: X(t), y: bottom + 19, "text-anchor": "middle" }, xText(t));
    add(svg, "line", { class: "axis", x1: m.left, x2: right, y1: bottom, y2: bottom });
    add(svg, "text", { x: (m.left + right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel);
    add(svg, "text", { x: m.left - 44, y: 11, style: "font-weight:600" }, yLabel);

    const clip = `clip-${axis}`;
    add(add(svg, "clipPath", { id: clip }), "rect", { x: m.left, y: m.top - 8, width: right - m.left + 2, height: bottom - m.top + 10 });
    const inside = add(svg, "g", { "clip-path": `url(#${clip})` });
    if (data.target && state.metric === "test_accuracy" && f(data.target) < high && f(data.target) > low) {
      add(inside, "line", { class: "goal", x1: m.left, x2: right, y1: Y(data.target), y2: Y(data.target) });
      add(svg, "text", { x: m.left + 6, y: Y(data.target) - 5 }, "target " + short(data.target));
    }
    for (const c of drawn) if (c.band) add(inside, "path", { class: "band", fill: c.run.colour, d: area(c.points, X, Y) });
    if (state.window > 1) for (const c of drawn) if (!c.band) add(inside, "path", { class: "raw", stroke: c.run.colour, d: path(c.raw, X, Y) });
    for (const c of drawn) add(inside, "path", { class: "line", stroke: c.run.colour, d: path(c.points, X, Y) });
    endLabels(svg, drawn, X, Y, x1, right, m.top, bottom);
    interact(plot, svg, { axis, drawn, X, Y, x0, x1, right, bottom, m, width, xText, yText });
  }

  function endLabels(svg, drawn, X, Y, x1, right, top, bottom) {
    const labels = drawn.map((c) => {
      const last = c.points.filter((p) => p.x <= x1 * (1 + 1e-9)).at(-1) || c.points[0];
      return { run: c.run, x: X(last.x), y: Y(last.y) };
    }).filter((l) => l.y >= top - 10 && l.y <= bottom + 10).sort((a, b) => a.y - b.y);
    labels.forEach((l) => add(svg, "circle", { cx: l.x, cy: l.y, r: 3.4, fill: l.run.colour }));
    labels.forEach((l, i) => { if (i) l.y = Math.max(l.y, labels[i - 1].y + 15); });
    for (let i = labels.length - 1; i >= 0; i -= 1) labels[i].y = Math.min(labels[i].y, (i + 1 < labels.length ? labels[i + 1].y : bottom + 12) - 15);
    labels.forEach((l) => add(svg, "text", { class: "end", x: right + 9, y: l.y + 4, style: `fill:${l.run.colour}` }, l.run.name));
  }

  function interact(plot, svg, view) {
    const { axis, drawn, X, Y, x0, x1, right, bottom, m, width, xText, yText } = view;
    const cross = add(svg, "line", { class: "cross", y1: m.top, y2: bottom, visibility: "hidden" });
    const band = add(svg, "rect", { y: m.top, height: bottom - m.top, width: 0, x: 0, fill: "currentColor", opacity: 0.08 });
    const dots = drawn.map((c) => add(svg, "circle", { r: 4, fill: c.run.colour, stroke: "var(--card)", "stroke-width": 1.5, visibility: "hidden" }));
    const tip = document.createElement("div");
    tip.className = "tip"; tip.hidden = true; plot.append(tip);
    const spot = (event) => {
      const box = svg.getBoundingClientRect();
      return Math.min(right, Math.max(m.left, ((event.clientX - box.left) / box.width) * width));
    };
    const value = (px) => x0 + ((px - m.left) / (right - m.left)) * (x1 - x0);
    let from = null;
    svg.addEventListener("pointermove", (event) => {
      const px = spot(event), x = value(px);
      if (from !== null) { band.setAttribute("x", Math.min(from, px)); band.setAttribute("width", Math.abs(px - from)); }
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
        name.append(box, c.run.name); number.textContent = yText(p.y) + (c.band ? " ± " + yText(p.apart) : ""); row.append(name, number); tip.append(row);
      }
      tip.hidden = false;
      const scale = svg.getBoundingClientRect().width / width, left = px * scale;
      tip.style.left = (px > (m.left + right) / 2 ? left - tip.offsetWidth - 14 : left + 14) + "px";
      tip.style.top = m.top * scale + "px";
    });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true; from = null; band.setAttribute("width", 0);
      cross.setAttribute("visibility", "hidden"); dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
    });
    svg.addEventListener("pointerdown", (event) => { from = spot(event); });
    svg.addEventListener("pointerup", (event) => {
      const to = spot(event), start = from;
      from = null; band.setAttribute("width", 0);
      if (start !== null && Math.abs(to - start) > 12) { state.zoom[axis] = [value(Math.min(start, to)), value(Math.max(start, to))]; draw(plot); }
    });
    svg.addEventListener("dblclick", () => { delete state.zoom[axis]; draw(plot); });
  }

  function redraw() {
    plots.forEach(draw);
    document.getElementById("hint").textContent =
      (state.window > 1 ? `Bold: mean of the last ${state.window} measurements; faint: each of them. ` : "") +
      (data.runs.some((run) => run.seeds) ? "Bands: one standard deviation over seeds. " : "") +
      "Drag to zoom, double-click to see all, click a row of the table to hide or show it.";
    document.querySelectorAll("tr[data-run]").forEach((row) => row.classList.toggle("off", state.hidden.has(+row.dataset.run)));
  }
  function segments(id, options, current, choose) {
    const box = document.getElementById(id);
    options.forEach(([value, label]) => {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = label; button.setAttribute("aria-pressed", value === current);
      button.addEventListener("click", () => {
        [...box.children].forEach((other) => other.setAttribute("aria-pressed", other === button));
        choose(value); redraw();
      });
      box.append(button);
    });
  }
  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob); link.download = name; link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function standalone() {
    const svg = plots[0].querySelector("svg").cloneNode(true), source = plots[0].querySelector("svg");
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
  document.getElementById("svg").addEventListener("click", () => save(new Blob([standalone().text], { type: "image/svg+xml" }), "curves.svg"));
  document.getElementById("png").addEventListener("click", () => {
    const { text, width, height } = standalone(), image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas"), scale = 3;
      canvas.width = scale * width; canvas.height = scale * height;
      const pen = canvas.getContext("2d");
      pen.fillStyle = getComputedStyle(document.querySelector(".card")).backgroundColor; pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(blob, "curves.png"));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  });
  document.getElementById("csv").addEventListener("click", () => {
    const rows = data.runs.flatMap((run) => (run.seeds || [{ seed: "", series: run.series }]).map((each) => ({ name: run.name, ...each })));
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row.series)))];
    const quote = (word) => '"' + String(word).replaceAll('"', '""') + '"';
    const lines = [["run", "seed", ...columns].join(",")];
    for (const { name, seed, series } of rows)
      series.round.forEach((_, i) => lines.push([quote(name), seed ?? "", ...columns.map((c) => (series[c] || [])[i] ?? "")].join(",")));
    save(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }), "curves.csv");
  });
  document.getElementById("log").addEventListener("click", (event) => {
    state.log = !state.log; event.target.setAttribute("aria-pressed", state.log); redraw();
  });
  document.querySelectorAll("tr[data-run]").forEach((row) => {
    const toggle = () => {
      const run = +row.dataset.run;
      if (state.hidden.has(run)) state.hidden.delete(run); else state.hidden.add(run);
      redraw();
    };
    row.tabIndex = 0;
    row.addEventListener("click", toggle);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
  });
  if (!state.metric) { document.getElementById("curves").remove(); return; }
  segments("metric", Object.keys(METRICS).filter(measured).map((name) => [name, METRICS[name][0]]), state.metric, (value) => { state.metric = value; });
  segments("smooth", [[1, "raw"], [5, "mean of 5"], [15, "of 15"]], state.window, (value) => { state.window = value; });
  redraw();
  new ResizeObserver(redraw).observe(document.getElementById("curves"));
})();
