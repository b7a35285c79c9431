// One event stream for the page. The browser resumes by itself with Last-Event-ID; where it gives up (an answer that is not a
// stream, as a restarting server gives), a new stream is opened, which begins with a full snapshot. What comes before anybody
// listens is kept, so that a page may open its stream before the rest of its scripts are there.

const EVENTS = ["snapshot", "sample", "state", "log", "checkpoint", "done", "gap", "reset"];
const REOPEN_AFTER_MS = 2000;

export function follow(url) {
  let source = null;
  let reopen = 0;
  let ended = false;
  let lostAt = null;
  let listener = null;
  const kept = [];

  // what: "onEvent" with type and data, or "onConnection" with the state and since when
  function send(what, ...args) {
    if (listener) listener[what](...args);
    else kept.push([what, ...args]);
  }

  function open() {
    source = new EventSource(url);
    source.onopen = () => {
      lostAt = null;
      send("onConnection", "live", new Date());
    };
    source.onerror = () => {
      if (ended) return;
      // since it was first lost: each further try ends here too
      lostAt ??= new Date();
      send("onConnection", "reconnecting", lostAt);
      if (source.readyState === EventSource.CLOSED) reopen = setTimeout(open, REOPEN_AFTER_MS);
    };
    for (const type of EVENTS) {
      source.addEventListener(type, (event) => send("onEvent", type, event.data ? JSON.parse(event.data) : null));
    }
  }

  function listen(handlers) {
    listener = handlers;
    for (const [what, ...args] of kept.splice(0)) listener[what](...args);
  }

  function close() {
    ended = true;
    clearTimeout(reopen);
    source.close();
    send("onConnection", "ended", new Date());
  }

  open();
  return { listen, close };
}
