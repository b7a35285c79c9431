// Sends one message to one model or to two side by side, and shows their answers as they come.

const form = document.getElementById("chat");

class Side {
  constructor(section) {
    this.select = section.querySelector("select");
    this.talk = section.querySelector("[data-talk]");
    this.state = section.querySelector("[data-state]");
    this.messages = [];
    this.select.addEventListener("change", () => this.begin());
  }

  begin() {
    this.messages = [];
    this.talk.replaceChildren();
    this.state.textContent = "";
  }

  say(role, text) {
    const line = document.createElement("div");
    line.className = `said ${role}`;
    line.textContent = text;
    this.talk.append(line);
    this.talk.scrollTop = this.talk.scrollHeight;
    return line;
  }

  async ask(question, settings, signal) {
    if (!this.select.value) return;
    const asked = [...this.messages, { role: "user", content: question }];
    this.say("user", question);
    const line = this.say("assistant", "");
    const begun = performance.now();
    this.state.textContent = "being asked";
    let numPieces = 0;
    try {
      for await (const event of answer({ model: this.select.value, messages: asked, stream: true, ...settings }, signal)) {
        if (event.waiting !== undefined) {
          if (!numPieces && event.waiting) this.state.textContent = `${event.waiting}, since ${Math.round((performance.now() - begun) / 1000)} s`;
          continue;
        }
        numPieces += 1;
        const isAtEnd = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 24;
        line.textContent += event.text;
        if (isAtEnd) this.talk.scrollTop = this.talk.scrollHeight;
        this.state.textContent = event.usage ? ended(event, performance.now() - begun) : "answering";
      }
      this.messages = [...asked, { role: "assistant", content: line.textContent }];
    } catch (error) {
      const wasStopped = error.name === "AbortError";
      this.state.textContent = wasStopped ? "stopped" : "";
      if (!line.textContent) line.remove();
      if (!wasStopped) this.say("trouble", `No answer: ${error.message}`);
    }
  }
}

function ended({ usage, reason }, tookMs) {
  const words = { length: ", cut at the limit", tool_calls: ", calls a tool" }[reason] || "";
  return `${usage.completion_tokens} tokens in ${(tookMs / 1000).toFixed(1)} s${words}`;
}

// Pieces of one answer: text, or what is being waited for; the last has the usage.
async function* answer(body, signal) {
  const response = await fetch("/api/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify({ ...body, stream_options: { include_usage: true } }),
    headers: { "Content-Type": "application/json", "X-CSRFToken": form.querySelector("[name=csrfmiddlewaretoken]").value },
  });
  if (!response.ok) {
    const problem = await response.json().catch(() => ({}));
    throw new Error(problem.detail || problem.error?.message || `the server answered ${response.status}`);
  }
  let reason = "";
  for await (const line of lines(response.body)) {
    if (line.startsWith(":")) yield { waiting: line.slice(1).trim() };
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new Error(chunk.error.message);
    const [choice] = chunk.choices;
    if (chunk.usage) yield { text: "", usage: chunk.usage, reason };
    if (!choice) continue;
    reason = choice.finish_reason || reason;
    const calls = (choice.delta.tool_calls || []).map((call) => `${call.function.name}(${call.function.arguments})`);
    const text = (choice.delta.content || "") + calls.join("\n");
    if (text) yield { text };
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n");
    held = parts.pop();
    yield* parts;
  }
}

if (form) {
  const sides = [...form.querySelectorAll("[data-side]")].map((section) => new Side(section));
  const question = form.querySelector("#question");
  const [send, stop, anew] = ["send", "stop", "anew"].map((id) => form.querySelector(`#${id}`));
  let asking = null;

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || asking) return;
    asking = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    question.value = "";
    const settings = { temperature: Number(form.querySelector("#temperature").value), max_tokens: Number(form.querySelector("#max-tokens").value) };
    await Promise.all(sides.map((side) => side.ask(text, settings, asking.signal)));
    asking = null;
    send.disabled = false;
    stop.disabled = true;
    question.focus();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stop.addEventListener("click", () => asking?.abort());
  anew.addEventListener("click", () => {
    asking?.abort();
    for (const side of sides) side.begin();
    question.focus();
  });
}
