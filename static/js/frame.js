// The frame of every page: the search palette (Ctrl K), the theme, and menus that close when one looks elsewhere.

const palette = document.getElementById("palette");
const DELAY_MS = 120;

if (palette) {
  const query = document.getElementById("palette-query");
  const found = document.getElementById("palette-found");
  let timer = 0;
  let asked = 0;

  const options = () => [...found.querySelectorAll('[role="option"]')];
  const select = (option) => {
    for (const other of options()) other.setAttribute("aria-selected", String(other === option));
    if (!option) return query.removeAttribute("aria-activedescendant");
    query.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  };
  const selected = () => found.querySelector('[aria-selected="true"]');

  const ask = async () => {
    const mine = ++asked;
    const answer = await fetch(`${found.dataset.url}?q=${encodeURIComponent(query.value)}`, { headers: { "HX-Request": "true" } }).catch(() => null);
    if (mine !== asked) return;
    if (!answer?.ok) { found.textContent = answer ? "You were logged out; log in again to search." : "The server does not answer."; return; }
    found.innerHTML = await answer.text();
    select(options()[0] ?? null);
  };
  const open = () => {
    if (palette.open) return;
    palette.showModal();
    query.select();
    ask();
  };
  const go = (option) => { if (option) location.assign(option.dataset.href); };

  query.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, DELAY_MS); });
  query.addEventListener("keydown", (event) => {
    const all = options();
    const at = all.indexOf(selected());
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (all.length) select(all[(at + (event.key === "ArrowDown" ? 1 : -1) + all.length) % all.length]);
    } else if (event.key === "Enter") {
      event.preventDefault();
      go(selected());
    }
  });
  found.addEventListener("click", (event) => go(event.target.closest('[role="option"]')));
  palette.addEventListener("click", (event) => { if (event.target === palette) palette.close(); });
  document.querySelector("[data-open-palette]").addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    event.preventDefault();
    open();
  });
}

for (const form of document.querySelectorAll("[data-theme-form]")) {
  form.addEventListener("submit", (event) => {
    const theme = event.submitter?.value;
    if (!theme) return;
    event.preventDefault();
    const root = document.documentElement;
    if (theme === "system") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", theme);
    for (const button of document.querySelectorAll("[data-theme-form] button")) button.setAttribute("aria-pressed", String(button.value === theme));
    document.dispatchEvent(new Event("themechange"));
    const body = new FormData(form);
    body.set("theme", theme);
    // a theme that the server could not keep holds until the page is left
    fetch(form.action, { method: "POST", body, headers: { "HX-Request": "true" } }).catch(() => null);
  });
}

document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu-of[open]")) if (!menu.contains(event.target)) menu.open = false;
});
