// One event stream for the page. The browser resumes by itself with Last-Event-ID; where it gives up (an answer that is not a
// stream, as a restarting server gives), a new stream is opened, which begins with a full snapshot.

const EVENTS = ["snapshot", "sample", "state", "log", "checkpoint", "done", "gap", "reset"];
const REOPEN_AFTER_MS = 2000;

export function follow(url, { onEvent, onConnection }) {
  let source = null;
  let reopen = 0;
  let ended = false;
  let upSince = null;

  function open() {
    source = new EventSource(url);
    source.onopen = () => { upSince = new Date(); onConnection("live", upSince); };
    source.onerror = () => {
      if (ended) return;
      onConnection("reconnecting", new Date());
      if (source.readyState === EventSource.CLOSED) reopen = setTimeout(open, REOPEN_AFTER_MS);
    };
    for (const type of EVENTS) {
      source.addEventListener(type, (event) => onEvent(type, event.data ? JSON.parse(event.data) : null));
    }
  }

  function close() {
    ended = true;
    clearTimeout(reopen);
    source.close();
    onConnection("ended", new Date());
  }

  open();
  return { close };
}
