// The charts of a page, each drawn when it can be seen: those in view at once and each in a task of its own, so that the page
// answers between them; the others the first time when the browser is idle, later when they come into view or are printed.

import { dropPicture, isLoaded, loaded } from "./plotly.js";

const MARGIN_PX = 100;

export class Board {
  #charts;
  #data = null;
  #stale = new Set();
  #drawn = new Set();
  #isBusy = false;

  // charts: [{ id, draw(element, data) -> its summary in words }], the most important one first
  constructor(charts) {
    this.#charts = charts;
    const watcher = new IntersectionObserver(() => this.#drawSeen(), { rootMargin: `${MARGIN_PX}px` });
    for (const { id } of charts) watcher.observe(document.getElementById(id));
    addEventListener("beforeprint", () => { for (const chart of charts.filter(hasRoom)) this.#draw(chart); });
    loaded.then(() => this.#drawSeen());
  }

  // Draws the first chart in view before it returns, where the chart program is there.
  show(data) {
    this.#data = data;
    for (const chart of this.#charts) this.#stale.add(chart);
    this.#drawSeen();
  }

  #drawSeen() {
    if (this.#isBusy || !isLoaded()) return;
    const next = this.#charts.find((chart) => this.#stale.has(chart) && isInView(chart));
    if (next) {
      this.#draw(next);
      return this.#goOn((again) => setTimeout(again));
    }
    const unseen = this.#charts.find((chart) => this.#stale.has(chart) && !this.#drawn.has(chart) && hasRoom(chart));
    if (!unseen) return;
    this.#goOn((again) => whenIdle(() => { this.#draw(unseen); again(); }));
  }

  #goOn(wait) {
    this.#isBusy = true;
    wait(() => { this.#isBusy = false; this.#drawSeen(); });
  }

  #draw(chart) {
    if (!isLoaded() || !this.#stale.delete(chart)) return;
    this.#drawn.add(chart);
    const element = document.getElementById(chart.id);
    element.setAttribute("aria-label", chart.draw(element, this.#data));
    dropPicture(element);
  }
}

// false within a panel that is hidden
function hasRoom({ id }) {
  return document.getElementById(id).offsetParent !== null;
}

function isInView({ id }) {
  const { top, bottom, width } = document.getElementById(id).getBoundingClientRect();
  return width > 0 && bottom > -MARGIN_PX && top < innerHeight + MARGIN_PX;
}

// Safari has no requestIdleCallback
function whenIdle(task) {
  if (window.requestIdleCallback) requestIdleCallback(task, { timeout: 2000 });
  else setTimeout(task, 200);
}
