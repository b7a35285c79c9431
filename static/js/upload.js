// Sends a model's folder in pieces, chosen or dropped: shows how far it is, goes on after a cut, and after a reload of the page too.

const PLAIN = new Set([
  "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
  "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
]);
const INDEX = "model.safetensors.index.json";
const TEMPLATE = /^additional_chat_templates\/[A-Za-z_]\w*\.jinja$/;
const LONGEST_PAUSE_MS = 30_000;

const place = document.getElementById("folder-upload");

class Refused extends Error {}

async function ask(method, path, options = {}) {
  const answer = await fetch(`/api/v1/${path}`, {
    method, ...options, headers: { "X-CSRFToken": place.querySelector("[name=csrfmiddlewaretoken]").value, ...options.headers },
  });
  if (answer.ok) return answer.json();
  const problem = await answer.json().catch(() => ({}));
  const error = new (answer.status < 500 && ![408, 409, 429].includes(answer.status) || answer.status === 507 ? Refused : Error)(
    [problem.detail || `the server answered ${answer.status}`, problem.hint].filter(Boolean).join(". "),
  );
  throw error;
}

// Names inside the folder, without the folder's own.
function inside(path) {
  return path.split("/").slice(1).join("/");
}

async function filesOf(entry, before = "") {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ path: `${before}${entry.name}`, file }];
  }
  if (before.split("/").length > 2) return [];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const batch = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!batch.length) return found;
    for (const child of batch) found.push(...await filesOf(child, `${before}${entry.name}/`));
  }
}

// What belongs to the model: with an index the shards that it names, else every safetensors file, else a GGUF file.
async function chooseFiles(found) {
  const named = new Map(found.map(({ path, file }) => [inside(path) || path, file]));
  const index = named.get(INDEX);
  let weights = [...named.keys()].filter((name) => name.endsWith(".safetensors") && !name.includes("/"));
  if (index) {
    const map = JSON.parse(await index.text()).weight_map || {};
    weights = [...new Set(Object.values(map))].filter((name) => named.has(name)).concat(INDEX);
  } else if (named.has("model.safetensors")) {
    weights = ["model.safetensors"];
  } else if (!weights.length) {
    weights = [...named.keys()].filter((name) => name.endsWith(".gguf") && !name.includes("/"));
  }
  const others = [...named.keys()].filter((name) => PLAIN.has(name) || TEMPLATE.test(name));
  return [...others, ...weights.sort()].map((name) => ({ name, file: named.get(name) }));
}

function announce({ name, file }) {
  return { name, num_bytes: file.size, sha256: "", mark: String(file.lastModified) };
}

// One that was begun before the page was left, with the same files in the same state.
async function findBegun(files) {
  const { results } = await ask("GET", "uploads?page_size=100");
  const wanted = JSON.stringify(files.map((file) => [file.name, file.num_bytes, file.mark]));
  return results.find((upload) => upload.kind === "model"
    && JSON.stringify(upload.files.map((file) => [file.name, file.num_bytes, file.mark || ""])) === wanted);
}

async function digest(piece) {
  if (!crypto.subtle) return {};  // an address that is neither secure nor this machine
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", await piece.arrayBuffer()));
  return { "X-Piece-SHA256": [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("") };
}

async function sendFile(upload, number, file, report) {
  let here = upload.files[number].received_bytes;
  let failures = 0;
  while (here < file.size) {
    report(here);
    const piece = file.slice(here, here + upload.piece_bytes);
    try {
      const headers = { "Content-Type": "application/octet-stream", ...await digest(piece) };
      here = (await ask("PUT", `uploads/${upload.id}/files/${number}?offset=${here}`, { body: piece, headers })).received_bytes;
      failures = 0;
    } catch (error) {
      if (error instanceof Refused || error.name === "NotReadableError") throw error;
      failures += 1;
      report(here, `The line was cut; trying again (${failures}).`);
      await new Promise((resolve) => setTimeout(resolve, Math.min(LONGEST_PAUSE_MS, 500 * 2 ** failures)));
      here = await ask("GET", `uploads/${upload.id}`).then((now) => now.files[number].received_bytes, () => here);
    }
  }
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

async function send(found) {
  const status = place.querySelector("[role=status]");
  const bar = place.querySelector("progress");
  const chosen = await chooseFiles(found);
  const files = chosen.map(announce);
  const total = files.reduce((sum, file) => sum + file.num_bytes, 0);
  if (!chosen.length) throw new Refused("The folder holds no config.json and no weights.");
  const name = place.querySelector("[name=folder_name]").value.trim() || found[0].path.split("/")[0].replace(/\.gguf$/, "");
  let upload = await findBegun(files);
  upload ||= await ask("POST", "uploads", {
    body: JSON.stringify({ kind: "model", name, purpose: "text", files }), headers: { "Content-Type": "application/json" },
  });
  let done = 0;
  bar.hidden = false;
  bar.max = total || 1;
  for (const [number, { file }] of chosen.entries()) {
    await sendFile(upload, number, file, (here, trouble) => {
      bar.value = done + here;
      status.textContent = trouble || `${size(done + here)} of ${size(total)} sent`;
    });
    done += file.size;
  }
  bar.value = total;
  status.textContent = "Everything is here; the files are being checked.";
  const made = await ask("POST", `uploads/${upload.id}/finish`);
  isSending = false;
  window.location.assign(`/models/${made.id}/`);
}

let isSending = false;

async function begin(gather) {
  if (isSending) return;
  isSending = true;
  try {
    await send(await gather());
  } catch (error) {
    place.querySelector("[role=status]").textContent = `Not added: ${error.message}`;
  } finally {
    isSending = false;
  }
}

if (place) {
  place.hidden = false;
  const picker = place.querySelector("input[type=file]");
  picker.addEventListener("change", () => {
    const found = [...picker.files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));
    if (found.length) begin(() => Promise.resolve(found));
  });
  place.addEventListener("dragover", (event) => {
    event.preventDefault();
    place.classList.add("dropping");
  });
  place.addEventListener("dragleave", () => place.classList.remove("dropping"));
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    place.classList.remove("dropping");
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
    begin(async () => (await Promise.all(entries.map((entry) => filesOf(entry)))).flat());
  });
  window.addEventListener("beforeunload", (event) => { if (isSending) event.preventDefault(); });
}
