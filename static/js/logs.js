// The log that follows its end: htmx brings new lines, this keeps the end in view while that is asked for.

let follows = true;

function attach() {
  const log = document.getElementById("log");
  const box = document.getElementById("log-follow-box");
  if (box) box.hidden = !log;
  if (!log || log.dataset.followed) return;
  log.dataset.followed = "yes";
  const toggle = document.getElementById("log-follow");
  toggle.checked = follows;
  const toEnd = () => { if (follows) log.scrollTop = log.scrollHeight; };
  toggle.addEventListener("change", () => { follows = toggle.checked; toEnd(); });
  new MutationObserver(toEnd).observe(log, { childList: true });
  toEnd();
}

document.body.addEventListener("htmx:afterSettle", attach);
attach();
