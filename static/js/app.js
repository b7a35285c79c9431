// What every page shares: shortcuts, the help dialog, and a clear line when the server does not answer.

const dialog = document.getElementById("help");
const toggle = document.getElementById("shortcuts-on");

function storedOn() {
  try { return localStorage.getItem("shortcuts") !== "off"; } catch { return true; }
}

function isTyping(target) {
  return target.closest("input:not([type=checkbox], [type=radio]), select, textarea, [contenteditable]") !== null;
}

if (dialog && toggle) {
  toggle.checked = storedOn();
  toggle.addEventListener("change", () => {
    try { localStorage.setItem("shortcuts", toggle.checked ? "on" : "off"); } catch { /* private windows keep no setting */ }
  });
  document.querySelector("[data-open-help]").addEventListener("click", () => dialog.showModal());
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  document.addEventListener("keydown", (event) => {
    if (!toggle.checked || isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "?") return dialog.showModal();
    const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (!link) return;
    event.preventDefault();
    link.click();
  });
}

// A request that a newer one replaces is no error, though htmx would write each to the console. Of a server that is away
// htmx:sendError says so itself.
htmx.logger = (element, name, detail) => {
  if (["htmx:afterRequest", "htmx:sendAbort"].includes(name)) delete detail.error;
};

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

// A session that has ended: the page stays as it is, and goes on when its reader comes back from logging in.
let isLoggedOut = false;

function reportLogout() {
  isLoggedOut = true;
  report("You were logged out; what you typed is still here. ");
  const link = document.createElement("a");
  link.href = `/login/?next=${encodeURIComponent(location.pathname)}`;
  link.target = "_blank";
  link.textContent = "Log in again in a new tab, then come back";
  document.getElementById("server-trouble").append(link);
}

// a login changes the token that every form sends
async function takeUpLogin() {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const headers = new DOMParser().parseFromString(await answer.text(), "text/html").body.getAttribute("hx-headers");
  document.body.setAttribute("hx-headers", headers);
  const token = JSON.parse(headers)["X-CSRFToken"];
  for (const input of document.querySelectorAll('input[name="csrfmiddlewaretoken"]')) input.value = token;
  isLoggedOut = false;
  document.getElementById("server-trouble").hidden = true;
  for (const form of document.querySelectorAll("#job-form")) htmx.trigger(form, "reprice");
}

// A press while the server is away would end on the browser's own error page; so it is asked first whether it answers.
const ANSWERS_WITHIN_MS = 5000;
const asking = new WeakSet();
const answered = new WeakSet();

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (event.defaultPrevented || form.method !== "post" || answered.has(form)) return;
  event.preventDefault();
  if (asking.has(form)) return;
  asking.add(form);
  const answer = await fetch("/healthz", { cache: "no-store", signal: AbortSignal.timeout(ANSWERS_WITHIN_MS) }).catch(() => null);
  asking.delete(form);
  if (!answer) return report("The server is away, so nothing was done and what you typed is still here; press again once it answers.");
  answered.add(form);
  form.requestSubmit(event.submitter);
  answered.delete(form);
});

addEventListener("focus", () => { if (isLoggedOut) takeUpLogin(); });
document.addEventListener("visibilitychange", () => { if (isLoggedOut && !document.hidden) takeUpLogin(); });
document.addEventListener("submit", (event) => { if (isLoggedOut) event.preventDefault(); }, true);

document.body.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status === 401) return reportLogout();
  // sent between a login in another tab and its taking up here
  if (event.detail.xhr.getResponseHeader("X-Login-Changed")) return takeUpLogin();
  const reason = event.detail.xhr.status === 403 ? refusal(event.detail.xhr) : "";
  if (reason) return report(reason);
  report(`The server answered ${event.detail.xhr.status} to ${event.detail.pathInfo.requestPath}; reload the page to try again.`);
});
document.body.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful && !isLoggedOut) document.getElementById("server-trouble").hidden = true;
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
