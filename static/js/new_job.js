// Prices the form again after each edit. Only the verdict pane is swapped, so nothing that was typed is touched.

const REPRICE_AFTER_MS = 250;
const GLANCE_MS = 400;
const form = document.getElementById("job-form");
let timer = 0;

function repriceSoon() {
  clearTimeout(timer);
  markPlansOld();
  timer = setTimeout(() => htmx.trigger(form, "reprice"), REPRICE_AFTER_MS);
}

document.addEventListener("input", (event) => {
  if (event.target.form !== form || event.target.name === "plan_id") return;
  repriceSoon();
});

// a model or dataset that was just uploaded is now selected in the form
document.body.addEventListener("uploaded", repriceSoon);

// what is filled or wrong is in sight
function openAround(field) {
  for (let closed = field.closest("details:not([open])"); closed; closed = closed.parentElement.closest("details:not([open])")) closed.open = true;
}

// a button that asks for something else fills its fields; without this script it is a link to the filled form
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-fill]");
  if (!link) return;
  event.preventDefault();
  const fields = Object.entries(JSON.parse(link.dataset.fill)).map(([name, text]) => [form.elements[name], text]);
  for (const [field, text] of fields) {
    const boxes = Array.isArray(text) ? [...(field.length === undefined ? [field] : field)] : [];
    for (const box of boxes) box.checked = text.includes(box.value);
    if (!boxes.length && field.type === "checkbox") field.checked = text === "on";
    else if (!boxes.length) field.value = text;
    if (!link.dataset.intent) openAround(boxes[0] ?? field);
  }
  for (const intent of document.querySelectorAll("[data-intent]")) intent.toggleAttribute("aria-current", false);
  if (link.dataset.intent) link.setAttribute("aria-current", "true");
  else {
    const first = fields[0][0];
    (first.length === undefined || first.options ? first : first[0]).focus();
  }
  repriceSoon();
});

// The table of plans is the last answer's until the search's new one: none can be taken from it meanwhile, since a plan that was
// priced for other words would be refused. The answer brings a table of its own.
const plansSince = document.getElementById("plans-since");

function markPlansOld() {
  const plans = document.getElementById("plans");
  if (plans.inert || !plans.querySelector("input")) return;
  plans.inert = true;
  document.getElementById("all-plans").inert = true;
  plansSince.textContent = "Being priced again; below are the plans of the last answer, which can be taken once the new prices are there.";
}

function markPlansNew() {
  if (!document.getElementById("plans").inert) plansSince.textContent = "";
}

// who starts the job before the answer is there and held to Headroom's choice is given its choice for what stands in the form now
form.addEventListener("submit", () => {
  const taken = document.querySelector('[inert] input[name="plan_id"]:checked');
  if (taken && "chosen" in taken.dataset) taken.disabled = true;
});

// what is being waited for, and since when, where it takes longer than a glance
const since = document.getElementById("pricing-since");
let glance = 0;

form.addEventListener("htmx:beforeRequest", () => {
  const began = new Date().toLocaleTimeString("en-GB");
  clearTimeout(glance);
  glance = setTimeout(() => { since.textContent = `Looking for the best plan since ${began}; below is the last answer.`; }, GLANCE_MS);
});

form.addEventListener("htmx:afterRequest", () => {
  clearTimeout(glance);
  since.textContent = "";
});

// prices that were asked for before a plan was taken must not take it back
let taken = "";

document.addEventListener("change", (event) => {
  if (event.target.name !== "plan_id") return;
  taken = event.target.getAttribute("aria-label");
  sayTaken(event.target);
  for (const row of document.querySelectorAll(".plans tbody tr")) {
    row.classList.toggle("picked", row.contains(event.target));
  }
});

// errors arrive beside their fields; the field itself must say so too, and is never replaced
function markInvalidFields() {
  for (const list of document.querySelectorAll("ul.errors[data-for]")) {
    const field = document.getElementById(list.dataset.for);
    if (!field) continue;
    if (list.children.length) {
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-errormessage", list.id);
      openAround(field);
    } else {
      field.removeAttribute("aria-invalid");
      field.removeAttribute("aria-errormessage");
    }
  }
}

function keepTaken() {
  const again = [...document.querySelectorAll('input[name="plan_id"]')].find((radio) => radio.getAttribute("aria-label") === taken);
  if (!again) return;
  again.checked = true;
  sayTaken(again);
}

// beside the button that starts the job stands the verdict on what it would start
function sayTaken(radio) {
  const [verdict, words] = document.querySelectorAll("#start-verdict > span");
  if (!words || !radio.dataset.verdict) return;
  verdict.className = `verdict verdict-${radio.dataset.verdict}`;
  verdict.textContent = radio.dataset.verdict.replaceAll("_", " ");
  words.textContent = radio.dataset.words;
}

// an answer has many parts, and each is announced once for every other: what follows is done once for all of them
let isAnswerNew = false;

document.body.addEventListener("htmx:oobAfterSwap", () => {
  if (isAnswerNew) return;
  isAnswerNew = true;
  queueMicrotask(() => {
    isAnswerNew = false;
    markInvalidFields();
    markPlansNew();
    keepTaken();
  });
});

htmx.onLoad(() => {
  const picked = document.querySelector('input[name="plan_id"]:checked');
  picked?.closest("tr")?.classList.add("picked");
  if (picked && !("chosen" in picked.dataset)) sayTaken(picked);
});

repriceSoon();
