// Search on pages that are opened from disk: browsers start no worker there, so its script runs in a hidden frame.
// The theme's plugin `offline` knows such a stand-in by the name of this file, and would fetch another one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.ready = new Promise((resolve) => {
        this.frame = document.createElement("iframe");
        this.frame.hidden = true;
        this.frame.addEventListener("load", () => resolve(this.start(url)), { once: true });
        document.body.append(this.frame);
      });
    }

    // What a worker's script finds around it.
    start(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      return this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.contentDocument.body.append(script);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    }
  };
}
