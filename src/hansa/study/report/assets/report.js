// The controls around the charts: choice of metric and axis, legend, downloads.
(() => {
  const { METRICS, AXES, state } = plots;
  const get = (id) => document.getElementById(id);
  const text = JSON.parse(get("data").textContent);
  let figures = [];

  function begin(data) {
    plots.load(data);
    const known = Object.keys(METRICS).filter((name) => plots.measured(name) && !(data.columns[name].hide_zero && constantZero(name))), longest = Math.max(0, ...data.runs.map((run) => plots.parts(run)[0].series.round.length));
    if (!known.includes(state.metric)) { state.metric = known.includes(data.metric) ? data.metric : known[0] || null; state.window = longest > 3 * data.window ? data.window : 1; state.patterns = data.runs.length > 10; }
    if (!plots.measured(state.axis)) state.axis = "round";
    const drawable = state.metric !== null;
    get("curves").hidden = !drawable;
    get("inside").hidden = true;
    if (!drawable) return;
    segments("metric", known.map((name) => [name, METRICS[name][0]]), "metric");
    segments("axis", Object.keys(AXES).filter(plots.measured).map((name) => [name, AXES[name][0]]), "axis");
    segments("smooth", [[1, "raw"], ...(data.window > 1 ? [[data.window, `mean of ${data.window}`], [3 * data.window, `of ${3 * data.window}`]] : [])], "window");
    legend();
    const time = plots.measured("simulated_total_seconds") ? "simulated_total_seconds" : "wall_seconds";
    const small = known.filter((name) => data.columns[name].detail && !constantZero(name));
    get("inside").hidden = !small.length;
    figures = [
      { plot: document.querySelector('[data-name="main"]'), view: () => ({ axis: state.axis, metric: state.metric, tall: true, labels: true }) },
      ...grid("costs", ["up_bits", time].filter(plots.measured), (axis) => ({ axis, metric: state.metric, labels: true })),
      ...grid("diagnostics", small, (metric) => ({ axis: state.axis, metric })),
    ];
    if (!figures[0].saved) saves(figures[0].plot);
    get("log").setAttribute("aria-pressed", state.log); get("patterns").setAttribute("aria-pressed", state.patterns);
    rows();
    redraw();
  }
  const constantZero = (name) => state.data.runs.every((run) => plots.parts(run).every((part) => (part.series[name] || []).every((v) => !v)));

  function grid(id, names, view) {
    const box = get(id);
    return names.map((name, place) => {
      let figure = box.children[place];
      if (!figure) {
        figure = document.createElement("figure");
        const plot = document.createElement("div");
        plot.className = "plot"; figure.append(plot); box.append(figure); saves(plot);
      }
      const plot = figure.querySelector(".plot");
      plot.dataset.name = `${id}-${name}`;
      return { plot, view: () => view(name) };
    });
  }
  function saves(plot) {
    if (plot.parentElement.querySelector(".saves")) return;
    const box = document.createElement("div");
    box.className = "saves";
    for (const [label, act] of [["SVG", saveSvg], ["PNG", savePng]]) {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = label; button.title = `save this figure as ${label}`;
      button.addEventListener("click", () => act(plot)); box.append(button);
    }
    plot.parentElement.append(box);
  }

  // tables that are wider than the screen say so
  function markWide() {
    document.querySelectorAll(".scroll").forEach((box) => {
      const mark = () => {
        box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
        box.classList.toggle("end", box.scrollLeft + box.clientWidth >= box.scrollWidth - 2);
      };
      box.onscroll = mark;
      mark();
    });
  }

  function redraw() {
    markWide();
    for (const { plot, view } of figures) plots.draw(plot, view());
    const stride = state.data.stride > 1 ? `The charts show every ${state.data.stride}th round; the tables use all rounds. ` : "";
    get("hint").textContent = stride +
      (state.window > 1 ? `Bold: mean of the last ${state.window} measurements; faint: single measurements. ` : "") +
      (state.data.runs.some((run) => run.seeds) ? "Bands: one standard deviation over seeds. " : "") +
      (Object.keys(state.zoom).length ? "Zoomed: double-click or press Escape to show all." : "Drag to zoom; use arrow keys to read values.");
    document.querySelectorAll("tr[data-run]").forEach((row) => row.classList.toggle("off", state.hidden.has(+row.dataset.run)));
    [...get("legend").children].forEach((button, i) => { if (i < state.data.runs.length) button.setAttribute("aria-pressed", !state.hidden.has(i)); });
  }
  document.addEventListener("redraw", redraw);
  document.addEventListener("toggle", markWide, true);

  function segments(id, options, key) {
    const box = get(id);
    box.replaceChildren(...options.map(([value, label]) => {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = label; button.setAttribute("aria-pressed", value === state[key]);
      button.addEventListener("click", () => {
        [...box.children].forEach((other) => other.setAttribute("aria-pressed", other === button));
        state[key] = value; redraw();
      });
      return button;
    }));
  }
  function toggle(run, alone) {
    if (alone) {
      const others = state.data.runs.map((_, i) => i).filter((i) => i !== run), only = !state.hidden.has(run) && others.every((i) => state.hidden.has(i));
      state.hidden = new Set(only ? [] : others);
    } else if (state.hidden.has(run)) state.hidden.delete(run); else state.hidden.add(run);
    redraw();
  }
  function legend() {
    get("legend").replaceChildren(...state.data.runs.map((run, index) => {
      const button = document.createElement("button"), name = document.createElement("span");
      name.textContent = run.name + (run.seeds ? ` (${run.seeds.length} seeds)` : "");
      button.type = "button"; button.append(plots.swatch(index, run.colour), name);
      button.title = "click to hide or show; Shift-click to show only this method";
      button.addEventListener("click", (event) => toggle(index, event.shiftKey));
      return button;
    }));
  }
  function rows() {
    document.querySelectorAll("tr[data-run]").forEach((row) => {
      row.tabIndex = 0;
      row.onclick = (event) => toggle(+row.dataset.run, event.shiftKey);
      row.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(+row.dataset.run, event.shiftKey); } };
    });
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob); link.download = name; link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function saveSvg(plot) { save(new Blob([plots.standalone(plot).text], { type: "image/svg+xml" }), `${plot.dataset.name}.svg`); }
  function savePng(plot) {
    const { text, width, height } = plots.standalone(plot), image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas"), scale = 3;
      canvas.width = scale * width; canvas.height = scale * height;
      const pen = canvas.getContext("2d");
      pen.fillStyle = getComputedStyle(document.querySelector(".card")).backgroundColor; pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(blob, `${plot.dataset.name}.png`));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  }
  get("csv").addEventListener("click", () => {
    const all = state.data.runs.flatMap((run) => (run.seeds || [{ seed: "", series: run.series }]).map((each) => ({ name: run.name, ...each })));
    const columns = [...new Set(all.flatMap((row) => Object.keys(row.series)))];
    const quote = (word) => '"' + String(word).replaceAll('"', '""') + '"';
    const lines = [["run", "seed", ...columns].join(",")];
    for (const { name, seed, series } of all)
      series.round.forEach((_, i) => lines.push([quote(name), seed ?? "", ...columns.map((c) => (series[c] || [])[i] ?? "")].join(",")));
    save(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }), "curves.csv");
  });
  for (const name of ["log", "patterns"]) get(name).addEventListener("click", (event) => {
    state[name] = !state[name]; event.target.setAttribute("aria-pressed", state[name]); legend(); redraw();
  });
  const THEMES = ["system", "light", "dark"];
  get("theme").addEventListener("click", (event) => {
    const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % 3];
    if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
    event.target.textContent = "theme: " + next; redraw();
  });

  begin(text);
  let width = 0;
  new ResizeObserver(() => { const now = get("curves").clientWidth; if (now !== width) { width = now; redraw(); } }).observe(get("curves"));
  document.addEventListener("news", (event) => begin(event.detail)); // from live.js
})();
