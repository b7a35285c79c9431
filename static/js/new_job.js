// Prices the form again after each edit. Only the verdict pane is swapped, so nothing that was typed is touched.

const REPRICE_AFTER_MS = 400;
const form = document.getElementById("job-form");
let timer = 0;

function repriceSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => htmx.trigger(form, "reprice"), REPRICE_AFTER_MS);
}

document.addEventListener("input", (event) => {
  if (event.target.form !== form || event.target.name === "plan_id") return;
  repriceSoon();
});

// a model or dataset that was just uploaded is now selected in the form
document.body.addEventListener("uploaded", repriceSoon);

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-set-budget]");
  if (!button) return;
  const field = document.getElementById("id_device_budget");
  field.value = button.dataset.setBudget;
  field.focus();
  repriceSoon();
});

document.addEventListener("change", (event) => {
  if (event.target.name !== "plan_id") return;
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
    } else {
      field.removeAttribute("aria-invalid");
      field.removeAttribute("aria-errormessage");
    }
  }
}

document.body.addEventListener("htmx:oobAfterSwap", markInvalidFields);

htmx.onLoad(() => {
  const picked = document.querySelector('.plans input[name="plan_id"]:checked');
  picked?.closest("tr")?.classList.add("picked");
});

repriceSoon();
