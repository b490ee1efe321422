// Search runs in a worker, and browsers start none from a page that was opened from a disk (file://). There, a hidden
// frame takes its place: it loads the same script and gets the same messages. mkdocs-material's search script asks
// whether its parent has an `IFrameWorker`, and finds its language files beside itself then.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = (...urls) => Promise.all(urls.map(one => this.run(one)))
      this.ready = this.run(url)
    }

    run(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.scope.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.scope.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
