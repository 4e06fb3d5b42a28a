// Timelines on canvases: one row for each client, or for each quarter of the clients by speed.
(() => {
  const TICKS = 1e6, HEIGHT = 420, LEFT = 64, BOTTOM = 26, TIERS = ["fastest", "fast", "slow", "slowest"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clock = (seconds) => seconds < 120 ? `${+seconds.toPrecision(4)} s` : seconds < 7200 ? `${+(seconds / 60).toPrecision(4)} min` : `${+(seconds / 3600).toPrecision(4)} h`;

  function begin(box) {
    const canvas = box.querySelector("canvas"), said = box.querySelector("output");
    const data = JSON.parse(box.querySelector("script").textContent);
    const view = { from: 0, to: TICKS, rows: "client", drag: null };
    const tier = (row) => Math.min(3, Math.floor(4 * row / data.clients.length));
    const count = () => view.rows === "client" ? data.clients.length : 4;
    const place = (row) => view.rows === "client" ? row : tier(row);
    const name = (row) => view.rows === "client" ? `client ${data.clients[row]}` : TIERS[row];

    function draw() {
      const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
      if (!width) return;
      canvas.width = width * scale; canvas.height = HEIGHT * scale;
      const pen = canvas.getContext("2d"), high = (HEIGHT - BOTTOM) / count(), span = view.to - view.from;
      const x = (tick) => LEFT + (tick - view.from) / span * (width - LEFT);
      const colours = { download: css("--accent"), compute: css("--accent"), upload: css("--good"), refused: css("--bad") };
      pen.scale(scale, scale); pen.clearRect(0, 0, width, HEIGHT);
      pen.font = "11px system-ui, sans-serif"; pen.fillStyle = css("--soft"); pen.textBaseline = "middle"; pen.textAlign = "right";
      const every = Math.max(1, Math.ceil(14 / high));
      for (let row = 0; row < count(); row += every) pen.fillText(view.rows === "client" ? data.clients[row] : TIERS[row], LEFT - 6, (row + .5) * high);
      pen.textAlign = "center"; pen.strokeStyle = css("--grid");
      for (let mark = 0; mark <= 6; mark += 1) {
        const tick = view.from + span * mark / 6, at = x(tick);
        pen.beginPath(); pen.moveTo(at, 0); pen.lineTo(at, HEIGHT - BOTTOM); pen.stroke();
        pen.fillText(clock(tick / TICKS * data.seconds), Math.min(width - 26, Math.max(LEFT + 20, at)), HEIGHT - 10);
      }
      pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT, HEIGHT - BOTTOM); pen.clip();
      const gap = high > 6 ? 1 : 0, faint = view.rows === "client" ? 1 : Math.max(.04, 4 / Math.max(4, data.clients.length));
      for (const [row, start, down, work, up, refused] of data.jobs) {
        if (start > view.to || start + down + work + up < view.from) continue;
        const top = place(row) * high + gap / 2, tall = Math.max(high - gap, .6);
        let at = start;
        for (const [phase, length] of [["download", down], ["compute", work], ["upload", up]]) {
          pen.globalAlpha = faint * (phase === "download" ? .45 : 1);
          pen.fillStyle = refused ? colours.refused : colours[phase];
          if (length) pen.fillRect(x(at), top, Math.max(x(at + length) - x(at), .4), tall);
          at += length;
        }
      }
      pen.restore();
      if (view.drag) { pen.fillStyle = css("--accent"); pen.globalAlpha = .15; pen.fillRect(Math.min(view.drag[0], view.drag[1]), 0, Math.abs(view.drag[1] - view.drag[0]), HEIGHT - BOTTOM); pen.globalAlpha = 1; }
    }
    const tickAt = (px) => view.from + (Math.max(LEFT, px) - LEFT) / (canvas.clientWidth - LEFT) * (view.to - view.from);
    function zoom(from, to) {
      const least = TICKS / 1e4, middle = (from + to) / 2, half = Math.max(least, to - from) / 2;
      view.from = Math.max(0, middle - half); view.to = Math.min(TICKS, Math.max(middle + half, view.from + least)); draw();
    }
    function point(event) {
      const tick = tickAt(event.offsetX), row = Math.floor(event.offsetY / ((HEIGHT - BOTTOM) / count()));
      if (row < 0 || row >= count() || event.offsetX < LEFT) { said.textContent = ""; return; }
      const job = data.jobs.find(([r, start, down, work, up]) => place(r) === row && tick >= start && tick <= start + down + work + up);
      const time = clock(tick / TICKS * data.seconds);
      if (!job) { said.textContent = `${name(row)} at ${time}: idle`; return; }
      const [r, start, down, work, up, refused, round, age] = job, at = tick - start, part = at <= down ? "downloads" : at <= down + work ? "computes" : "uploads";
      said.textContent = `client ${data.clients[r]} at ${time}: ${part}; job of ${clock((down + work + up) / TICKS * data.seconds)} that ${refused ? "was refused" : "counted"} in step ${round}, staleness ${age}`;
    }
    canvas.addEventListener("pointerdown", (event) => { view.drag = [event.offsetX, event.offsetX]; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => { if (view.drag) { view.drag[1] = event.offsetX; draw(); } else point(event); });
    canvas.addEventListener("pointerup", () => {
      const drag = view.drag; view.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > 4) zoom(tickAt(Math.min(...drag)), tickAt(Math.max(...drag))); else draw();
    });
    canvas.addEventListener("dblclick", () => zoom(0, TICKS));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = tickAt(event.offsetX), factor = event.deltaY > 0 ? 1.25 : .8;
      zoom(at - (at - view.from) * factor, at + (view.to - at) * factor);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const step = (view.to - view.from) / 8;
      if (event.key === "Escape") zoom(0, TICKS);
      else if (event.key === "+") zoom(view.from + step, view.to - step);
      else if (event.key === "-") zoom(view.from - step, view.to + step);
      else if (event.key === "ArrowRight" && view.to + step <= TICKS) zoom(view.from + step, view.to + step);
      else if (event.key === "ArrowLeft" && view.from - step >= 0) zoom(view.from - step, view.to - step);
      else return;
      event.preventDefault();
    });
    box.querySelectorAll("[data-rows]").forEach((button) => button.addEventListener("click", () => {
      view.rows = button.dataset.rows;
      box.querySelectorAll("[data-rows]").forEach((other) => other.setAttribute("aria-pressed", other === button));
      draw();
    }));
    box.addEventListener("toggle", draw);
    new ResizeObserver(draw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    box.timeline = view;
    draw();
  }
  const scan = () => document.querySelectorAll("#timeline details").forEach((box) => { if (!box.timeline) begin(box); });
  document.addEventListener("news", () => setTimeout(scan));
  scan();
})();
