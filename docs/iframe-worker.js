// Search runs in a worker, and browsers start none from file://. There it runs in a hidden frame, without the network.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve, reject) => {
        frame.onload = () => {
          frame.onload = null;
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          load(inside.document, url).then(() => resolve(inside), reject);
          inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(inside.document, next)), Promise.resolve());
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };

  const load = (document, url) => new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${url} does not load`));
    script.src = url;
    document.body.append(script);
  });
}
