"use strict";
// What the reader sees and does: filters, the list (only the rows in sight exist), and the sample that is open.

(() => {
  const ROW_HEIGHT = 58; // pixels, as in report.css
  const SPARE_ROWS = 6;
  const SEARCH_WAIT_MS = 120;
  const FOLDED = 160; // characters of template above which it is folded away

  const at = (id) => document.getElementById(id);
  const form = at("filters"), list = at("list"), spacer = at("spacer"), panel = at("sample"), browser = at("browser");
  let shown = []; // the samples that pass the filters
  let chosen = -1; // place in `shown`
  let typeset = true;

  function make(tag, className, ...children) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...children);
    return element;
  }

  // Filters

  function wanted() {
    return {
      query: at("query").value, dataset: at("dataset").value, run: at("run").value, sort: at("sort").value,
      verdict: form.elements.verdict.value, change: form.elements.change.value, truncated: form.elements.truncated.checked,
      unextracted: form.elements.unextracted.checked, failed: form.elements.failed.checked,
    };
  }

  // `keep`: the sample that is open stays chosen if it still passes; else the first is.
  function refresh(keep = false) {
    const before = keep ? shown[chosen] : null;
    const { shown: now, counts } = Samples.filter(wanted());
    shown = now;
    chosen = shown.indexOf(before);
    for (const input of form.querySelectorAll("input[type=radio], input[type=checkbox]")) {
      const count = input.type === "radio" ? counts[input.name][input.value] : counts[input.name];
      input.parentElement.querySelector("b").textContent = count.toLocaleString("en");
    }
    const loading = Samples.all.length < Samples.meta.samples ? ", loading…" : "";
    at("count").textContent =
      `${shown.length.toLocaleString("en")} of ${Samples.all.length.toLocaleString("en")} samples${loading}`;
    spacer.style.height = `${shown.length * ROW_HEIGHT}px`;
    draw(true);
    if (!shown.length) {
      opened = null;
      panel.replaceChildren(make("p", "empty", "No sample passes these filters."));
    } else if (chosen >= 0) open(shown[chosen]);
    else if (!(keep && location.hash)) choose(0, false);
  }

  let timer = 0;
  function changed(event) {
    clearTimeout(timer);
    if (event.target.id === "query") timer = setTimeout(anew, SEARCH_WAIT_MS); // there may be more to come
    else anew();
  }

  function anew() {
    list.scrollTop = 0;
    refresh();
  }

  // List

  const rows = new Map(); // place -> element

  function draw(all = false) {
    if (all) { for (const row of rows.values()) row.remove(); rows.clear(); }
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
    for (const [place, row] of rows) if (place < first || place >= last) { row.remove(); rows.delete(place); }
    for (let place = first; place < last; place++) if (!rows.has(place)) {
      const row = rowOf(shown[place], place);
      rows.set(place, row);
      spacer.append(row);
    }
    mark();
  }

  function readOf(sample) {
    return sample.unextracted ? "no answer" : `read ${brief(sample.extracted)}`;
  }

  function rowOf(sample, place) {
    const several = sample.problem.samples.length > 1;
    const question = sample.problem.parts[1].trim().slice(0, 160) || sample.problem.key;
    const notes = sample.problem.graded ? [`gold ${brief(sample.problem.gold)}`, readOf(sample)] : [];
    notes.push(`${sample.tokens.toLocaleString("en")} tokens`);
    if (several) notes.push(`#${sample.number}`);
    if (Samples.meta.runs.length > 1) notes.push(Samples.meta.runs[sample.run]);
    const row = make("div", "item", verdict(sample),
      make("div", "lines", make("div", "question", question), make("div", "notes", ...tags(sample), notes.join(" · "))));
    row.id = `row-${place}`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-setsize", shown.length);
    row.setAttribute("aria-posinset", place + 1);
    row.style.top = `${place * ROW_HEIGHT}px`;
    row.addEventListener("click", () => { choose(place); browser.classList.add("open"); });
    return row;
  }

  const brief = (text) => (text.length > 24 ? text.slice(0, 23) + "…" : text);

  function verdict(sample) {
    const mark = make("span", `verdict ${sample.correct ? "correct" : "wrong"}`, sample.correct ? "✓" : "✗");
    mark.setAttribute("aria-label", sample.correct ? "correct" : "wrong");
    mark.setAttribute("role", "img");
    return mark;
  }

  function tags(sample) {
    const made = [];
    if (sample.truncated) made.push(make("span", "tag cut", "truncated"));
    if (sample.failed) made.push(make("span", "tag failed", sample.error !== null ? "not generated" : sample.reason));
    return made;
  }

  function mark() {
    for (const [place, row] of rows) row.setAttribute("aria-selected", place === chosen);
    if (rows.has(chosen)) list.setAttribute("aria-activedescendant", `row-${chosen}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function choose(place, scroll = true) {
    if (!shown.length) return;
    chosen = Math.min(Math.max(place, 0), shown.length - 1);
    const top = chosen * ROW_HEIGHT;
    if (scroll && top < list.scrollTop) list.scrollTop = top;
    if (scroll && top + ROW_HEIGHT > list.scrollTop + list.clientHeight)
      list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    draw();
    if (scroll) history.replaceState(null, "", "#" + address(shown[chosen]));
    open(shown[chosen]);
  }

  const address = (sample) =>
    [sample.problem.dataset, sample.problem.key, sample.number, sample.run].map(encodeURIComponent).join("/");

  // Open the sample that the address names, as a link to it does.
  function follow() {
    const place = shown.findIndex((sample) => "#" + address(sample) === location.hash);
    if (place >= 0) choose(place);
    else if (chosen < 0) choose(0, false);
  }

  // The open sample

  let opened = null; // "id, query, typeset" of what the panel shows

  function open(sample) {
    const state = [sample.id, sample.problem.samples.length, at("query").value, typeset].join();
    if (state === opened) return;
    opened = state;
    panel.replaceChildren(
      head(sample), facts(sample), ...siblings(sample), block("Prompt", ...prompt(sample)),
      completion(sample), ...answerBefore(sample));
    panel.scrollTop = 0;
  }

  function head(sample) {
    const back = button("Back to the list", "plain back", () => { browser.classList.remove("open"); list.focus(); });
    const source = button(typeset ? "Show source" : "Show typeset", "plain", toggleSource);
    source.id = "source";
    const previous = button("Previous", "plain", () => choose(chosen - 1));
    const next = button("Next", "plain", () => choose(chosen + 1));
    previous.disabled = chosen === 0;
    next.disabled = chosen === shown.length - 1;
    const name = [sample.problem.dataset, Samples.meta.runs[sample.run], sample.problem.source || sample.problem.key];
    const heading = make("h3", "", verdict(sample), name.filter(Boolean).join(" · "), ...tags(sample));
    return make("div", "head", heading, make("div", "buttons", back, previous, next, source));
  }

  function button(label, className, action) {
    const made = make("button", className, label);
    made.type = "button";
    made.addEventListener("click", action);
    return made;
  }

  function toggleSource() {
    typeset = !typeset;
    if (shown[chosen]) open(shown[chosen]);
    at("source")?.focus();
  }

  function facts(sample) {
    const rows = [
      ...(sample.problem.graded ? [
        ["gold", answer(sample.problem.gold)],
        ["extracted", sample.unextracted ? make("em", "", "nothing") : answer(sample.extracted)],
      ] : []),
      ["verdict", make("span", "", sample.reason)],
      ["rules", make("span", "rules", ...Object.entries(sample.scores).map(rule))],
      ["length", make("span", "", `${sample.tokens.toLocaleString("en")} tokens, prompt ${sample.problem.tokens.toLocaleString("en")}`)],
      ["sample", make("span", "", `#${sample.number}, seed ${sample.seed}, ${sample.seconds} s in the engine`)],
    ];
    if (sample.changed) {
      const [there, here] = sample.changed.map((score) => `${+(100 * score).toFixed(1)} %`);
      rows.push(["compared", make("span", "", `${sample.change}: ${there} → ${here}`)]);
    }
    if (sample.error !== null) rows.push(["error", make("span", "", sample.error)]);
    return make("dl", "facts", ...rows.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
  }

  const answer = (text) => make("span", "answer", typeset ? Formulas.answer(text) : text);

  const rule = ([name, score]) =>
    make("span", `tag ${score === 1 ? "correct" : "wrong"}`, `${score === 1 ? "✓" : "✗"} ${name}`);

  // The other answers to the same problem, each a button that opens it.
  function siblings(sample) {
    const others = sample.problem.samples;
    if (others.length < 2) return [];
    const lines = Samples.meta.runs.map((name, run) => {
      const links = others.filter((other) => other.run === run).map((other) => sibling(other, other === sample));
      return make("div", "siblings", ...(name ? [make("span", "run", name)] : []), ...links);
    });
    const right = others.filter((other) => other.correct).length;
    return [block(`Answers to this problem: ${right} of ${others.length} correct`, ...lines)];
  }

  function sibling(sample, current) {
    const run = Samples.meta.runs[sample.run];
    const made = button(sample.correct ? "✓" : "✗", `sibling ${sample.correct ? "correct" : "wrong"}`, () => jump(sample));
    made.title = `${run ? run + " " : ""}#${sample.number}: ${sample.problem.graded ? readOf(sample) + ", " : ""}${sample.tokens} tokens`;
    made.setAttribute("aria-label", made.title);
    if (current) made.setAttribute("aria-current", "true");
    return made;
  }

  function jump(sample) {
    let place = shown.indexOf(sample);
    if (place < 0) {
      form.reset();
      clearTimeout(timer); // it would choose the first
      refresh();
      place = shown.indexOf(sample);
    }
    choose(place);
  }

  function block(name, ...children) {
    return make("section", "block", make("h4", "", name), ...children);
  }

  function prompt(sample) {
    const [before, question, after] = sample.problem.parts;
    return [template(before), make("div", "text question", ...body(question)), template(after)].filter(Boolean);
  }

  function template(text) {
    if (!text.trim()) return null;
    const whole = make("div", "text template", text);
    if (text.length <= FOLDED) return whole;
    return make("details", "", make("summary", "", `${text.length.toLocaleString("en")} characters, the same in all prompts`), whole);
  }

  function completion(sample) {
    const made = sample.turns ? conversation(sample.turns)
      : block("Completion", make("div", "text completion", ...body(sample.completion)));
    if (sample.truncated) made.append(make("p", "cut-here", `cut off after ${sample.tokens.toLocaleString("en")} tokens`));
    return made;
  }

  // What was said with an environment: [who, text] each. What tools answer is shown as it is, never typeset.
  function conversation(said) {
    return block("Conversation", ...said.map(([who, text]) => {
      const drawn = who === "assistant";
      const content = drawn ? body(text) : [marked(text)];
      return make("div", drawn || who === "call" ? "said" : "said observed",
        make("div", "who", who), make("div", drawn ? "text completion" : "text completion code", ...content));
    }));
  }

  // What the model that this one is compared with, here too, answered to a problem whose score changed.
  function answerBefore(sample) {
    const run = Samples.meta.before[sample.run];
    if (run === null || !sample.changed) return [];
    const theirs = sample.problem.samples.filter((other) => other.run === run);
    const before = theirs.find((other) => other.number === sample.number) ?? theirs[0];
    if (!before) return [];
    const made = block("", make("div", "text completion before", ...body(before.completion)));
    const read = before.problem.graded ? `, read ${before.unextracted ? "nothing" : brief(before.extracted)}` : "";
    made.firstChild.append(verdict(before), ` Before: ${Samples.meta.runs[run]} #${before.number}${read}`);
    return [made];
  }

  // Text as nodes: formulas typeset unless the source is wanted, what was searched for marked.
  function body(text) {
    if (!text) return [make("em", "", "empty")];
    return [typeset ? Formulas.fragment(text, marked) : marked(text)];
  }

  function marked(text) {
    const searched = Samples.pattern(at("query").value, "gi");
    if (!searched) return document.createTextNode(text);
    const made = document.createDocumentFragment();
    let done = 0;
    for (const match of text.matchAll(searched)) {
      made.append(text.slice(done, match.index), make("mark", "", match[0]));
      done = match.index + match[0].length;
    }
    made.append(text.slice(done));
    return made;
  }

  // Keys

  function keys(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape" && browser.classList.contains("open")) { browser.classList.remove("open"); list.focus(); }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { event.preventDefault(); at("query").focus(); }
    if (event.key === "s") toggleSource();
  }

  function listKeys(event) {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
    const places = {
      ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + page, PageUp: chosen - page,
      Home: 0, End: shown.length - 1,
    };
    if (event.key === "Enter") { browser.classList.add("open"); panel.focus(); }
    if (!(event.key in places)) return;
    event.preventDefault();
    choose(places[event.key]);
  }

  // Beginning

  function options(select, names, every) {
    const made = [["", every], ...names].map(([value, name]) => new Option(name, value));
    select.replaceChildren(...made);
    select.hidden = names.length < 2;
  }

  // From a number of a comparison to the samples that it counts.
  function show(event) {
    const { change, dataset, runIndex } = event.currentTarget.dataset;
    form.reset();
    form.elements.change.value = change;
    at("dataset").value = dataset;
    at("run").value = runIndex;
    at("samples-title").scrollIntoView();
  }

  function chooseFigures() {
    for (const group of document.querySelectorAll("[data-run]")) group.hidden = group.dataset.run !== this.value;
  }

  at("compared").hidden = !Samples.meta.compared;
  options(at("dataset"), Samples.meta.datasets.map((name) => [name, name]), "All datasets");
  options(at("run"), Samples.meta.runs.map((name, i) => [i, name]), `All ${Samples.meta.label}s`);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", changed);
  form.addEventListener("reset", () => { clearTimeout(timer); timer = setTimeout(anew); }); // they are empty after it
  list.addEventListener("scroll", () => draw());
  list.addEventListener("keydown", listKeys);
  document.addEventListener("keydown", keys);
  window.addEventListener("resize", () => draw());
  window.addEventListener("hashchange", follow);
  for (const jumper of document.querySelectorAll(".jump")) jumper.addEventListener("click", show);
  at("run-figures")?.addEventListener("change", chooseFigures);
  Samples.load(() => refresh(true)).then(follow, (error) => {
    at("count").textContent = `The samples cannot be read: ${error.message}`;
  });
})();
