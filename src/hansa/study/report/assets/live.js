// Polls the server of `hansa watch`, which answers when something has changed or after a few seconds.
(async () => {
  const live = document.getElementById("live"), pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const say = (text, lost) => { live.textContent = text; live.classList.toggle("lost", !!lost); };
  let version = live.dataset.version, failures = 0;
  const shown = {};
  for (;;) try {
    const answer = await fetch(`state?since=${encodeURIComponent(version)}`, { cache: "no-store" });
    if (answer.status === 403 || answer.status === 404) { say("this address is no longer valid: see the terminal for the new one", true); return; }
    if (!answer.ok) throw new Error(answer.status);
    const news = await answer.json();
    failures = 0; say(news.status, news.lost);
    if (news.version !== version) {
      for (const [name, html] of Object.entries(news.parts)) if (shown[name] !== html) {
        const part = document.querySelector(`[data-part="${name}"]`), open = [...part.querySelectorAll("details")].map((each) => each.open);
        part.innerHTML = shown[name] = html;
        part.querySelectorAll("details").forEach((each, i) => { if (i in open) each.open = open[i]; });
      }
      live.dataset.version = version = news.version;
      report.load(news.content);
    }
    await pause(100);
  } catch (error) {
    failures += 1;
    if (failures > 1) say("connection lost: retrying", true);
    await pause(Math.min(4000, 400 * failures));
  }
})();
