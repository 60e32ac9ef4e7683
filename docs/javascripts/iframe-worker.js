/* The search runs in a web worker, which browsers refuse to a page that was opened from the disk. There a hidden frame
   takes the worker's place: the same script, the same messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...addresses) =>
        Promise.all(addresses.map((one) => load(inside, new URL(one, address).href)));
      this.inside = inside;
      this.ready = load(inside, new URL(address, location).href);
    }
    postMessage(data) {
      // one task each, as a worker has it: what a message began is done before the next one comes
      this.ready.then(() => setTimeout(() => this.inside.dispatchEvent(new MessageEvent("message", { data }))));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
  const load = (inside, address) =>
    new Promise((done, failed) => {
      const script = inside.document.createElement("script");
      Object.assign(script, { src: address, onload: done, onerror: failed });
      inside.document.head.append(script);
    });
}
