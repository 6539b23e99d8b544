// Browsers start no Worker from a file of the disk. This one runs the script of the search in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>
        window.postMessage = message => parent.dispatchEvent(new CustomEvent("worker", { detail: message }));
      </script><script src="${url}"></script>`;
      this.ready = new Promise(resolve => (this.frame.onload = resolve));
      document.body.append(this.frame);
      window.addEventListener("worker", event => {
        const message = new MessageEvent("message", { data: structuredClone(event.detail) });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
    }
    postMessage(value) {
      const data = structuredClone(value);
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
