// One event stream for the page. The browser resumes by itself with Last-Event-ID; where it gives up (an answer that is not a
// stream, as a restarting server gives), a new stream is opened, which begins with a full snapshot. What comes before anybody
// listens is kept, so that a page may open its stream before the rest of its scripts are there.

const EVENTS = ["snapshot", "sample", "state", "log", "checkpoint", "done", "gap", "reset"];
const REOPEN_AFTER_MS = 2000;

export function follow(url) {
  let source = null;
  let reopen = 0;
  let ended = false;
  let listener = null;
  const kept = [];

  // what: "onEvent" with type and data, or "onConnection" with the state and since when
  function tell(what, ...told) {
    if (listener) listener[what](...told);
    else kept.push([what, ...told]);
  }

  function open() {
    source = new EventSource(url);
    source.onopen = () => tell("onConnection", "live", new Date());
    source.onerror = () => {
      if (ended) return;
      tell("onConnection", "reconnecting", new Date());
      if (source.readyState === EventSource.CLOSED) reopen = setTimeout(open, REOPEN_AFTER_MS);
    };
    for (const type of EVENTS) {
      source.addEventListener(type, (event) => tell("onEvent", type, event.data ? JSON.parse(event.data) : null));
    }
  }

  function listen(handlers) {
    listener = handlers;
    for (const [what, ...told] of kept.splice(0)) listener[what](...told);
  }

  function close() {
    ended = true;
    clearTimeout(reopen);
    source.close();
    tell("onConnection", "ended", new Date());
  }

  open();
  return { listen, close };
}
