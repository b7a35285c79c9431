// Buttons that copy a text of the page; they are shown only where the browser can do that (a secure address or this machine).

if (navigator.clipboard) {
  for (const button of document.querySelectorAll("[data-copy]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser refused; mark the text";
  }
  setTimeout(() => { button.textContent = before; }, 2000);
});
