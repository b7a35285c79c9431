// The chart program comes after everything else of a page: pictures that the server drew stand in for it meanwhile.

const script = document.getElementById("plotly");

// Whether it is there; what needs it asks again when it has loaded.
export function isLoaded() { return Boolean(window.Plotly); }

export const loaded = isLoaded() ? Promise.resolve() : new Promise((resolve) => { script?.addEventListener("load", () => resolve()); });

// Called after a chart was drawn in the place of its picture, in the same task, so that no empty box is painted between them.
export function dropPicture(element) {
  element.querySelector(":scope > .picture")?.remove();
}
