// What every page shares: shortcuts, the help dialog, and a clear line when the server does not answer.

const dialog = document.getElementById("help");
const toggle = document.getElementById("shortcuts-on");

function storedOn() {
  try { return localStorage.getItem("shortcuts") !== "off"; } catch { return true; }
}

function isTyping(target) {
  return target.closest("input, select, textarea, [contenteditable]") !== null;
}

if (dialog && toggle) {
  toggle.checked = storedOn();
  toggle.addEventListener("change", () => {
    try { localStorage.setItem("shortcuts", toggle.checked ? "on" : "off"); } catch { /* private windows keep no setting */ }
  });
  document.querySelector("[data-open-help]").addEventListener("click", () => dialog.showModal());
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  document.addEventListener("keydown", (event) => {
    if (!toggle.checked || isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.key === "?") return dialog.showModal();
    const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (link) link.click();
  });
}

function report(text) {
  const line = document.getElementById("server-trouble");
  line.textContent = text;
  line.hidden = false;
}

document.body.addEventListener("htmx:sendError", () => {
  report(`The server has not answered since ${new Date().toLocaleTimeString("en-GB")}; what you typed is still here.`);
});
// what a page that says "not allowed" gives as the reason
function refusal(xhr) {
  const alert = new DOMParser().parseFromString(xhr.responseText, "text/html").querySelector("[role=alert].stack");
  return alert ? alert.textContent.replace(/\s+/g, " ").trim() : "";
}

document.body.addEventListener("htmx:responseError", (event) => {
  const reason = event.detail.xhr.status === 403 ? refusal(event.detail.xhr) : "";
  if (reason) return report(reason);
  report(`The server answered ${event.detail.xhr.status} to ${event.detail.pathInfo.requestPath}; reload the page to try again.`);
});
document.body.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) document.getElementById("server-trouble").hidden = true;
});

// a form that comes back with errors begins at the first field that has one
document.querySelector('main [aria-invalid="true"]')?.focus();

// one menu open at a time; Escape closes it and gives the focus back
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const menu of document.querySelectorAll("details.menu-of[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});
