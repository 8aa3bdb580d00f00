// A page that is opened from the disk may start no worker. An unseen frame runs the same script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.started = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.onload = resolve;
        script.src = url;
        inside.document.body.append(script);
      });
      this.inside = inside;
      this.frame = frame;
    }
    postMessage(data) {
      const { MessageEvent: Event } = this.inside;
      this.started.then(() => this.inside.dispatchEvent(new Event("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
