// Polls the server of `hansa watch`, which answers when something has changed or after a few seconds.
(() => {
  const live = document.getElementById("live");
  let version = live.dataset.version, failures = 0;
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const say = (words, lost) => { live.textContent = words; live.classList.toggle("lost", !!lost); };
  const put = (parts) => {
    for (const [name, html] of Object.entries(parts)) {
      const place = document.querySelector(`[data-part="${name}"]`);
      if (place && place.dataset.shown !== html) { place.innerHTML = html; place.dataset.shown = html; }
    }
  };
  (async () => {
    for (;;) {
      try {
        const answer = await fetch(`state?since=${encodeURIComponent(version)}`, { cache: "no-store" });
        if (answer.status === 403 || answer.status === 404) { say("this address is no longer valid: see the terminal for the new one", true); return; }
        if (!answer.ok) throw new Error(answer.status);
        const news = await answer.json();
        failures = 0;
        say(news.status);
        if (news.version !== version) {
          version = news.version;
          put(news.parts);
          document.dispatchEvent(new CustomEvent("news", { detail: news.content }));
          live.dataset.version = version;
        }
        await pause(100);
      } catch (error) {
        failures += 1;
        if (failures > 1) say("connection lost: retrying", true);
        await pause(Math.min(4000, 400 * failures));
      }
    }
  })();
})();
