"use strict";
// Text with formulas to DOM nodes. All text goes in by textContent. A formula is put in as its source and typeset
// afterwards, a few milliseconds at a time; one that Temml cannot read stays as its source.

const Formulas = (() => {
  const LONGEST = 4000; // characters; what is longer is a runaway, not a formula
  const SLICE_MS = 8;
  const ENVIRONMENTS = "align|aligned|alignat|array|cases|equation|flalign|gather|multline|[bpvV]?matrix|split";
  const OPENER = new RegExp(
    String.raw`(?<!\\)(?:\$\$?|\[asy\]|\\[\[(]|\\boxed\s*\{|\\begin\{(?:${ENVIRONMENTS})\*?\})`, "g");

  // [{text} | {source, tex, display}] in order; the texts and sources together are the text again.
  function split(text) {
    const parts = [];
    const ends = new Map(); // closing mark -> its next place, so that unclosed openers cost one search in all
    let done = 0;
    OPENER.lastIndex = 0;
    for (let match; (match = OPENER.exec(text)); ) {
      if (match[0] === "[asy]") { // a drawing's program, with dollars of its own
        OPENER.lastIndex = Math.max(text.indexOf("[/asy]", match.index), OPENER.lastIndex);
        continue;
      }
      const found = formulaAt(text, match.index, match[0], ends);
      if (!found) continue;
      if (match.index > done) parts.push({ text: text.slice(done, match.index) });
      parts.push({ source: text.slice(match.index, found.end), tex: found.tex, display: found.display });
      done = OPENER.lastIndex = found.end;
    }
    if (done < text.length) parts.push({ text: text.slice(done) });
    return parts;
  }

  function formulaAt(text, start, opener, ends) {
    const inner = start + opener.length;
    if (opener === "$") return inline(text, inner);
    if (opener.startsWith("\\boxed")) {
      const end = closingBrace(text, inner);
      if (/<[\w ]+>/.test(text.slice(inner, end))) return null; // "\boxed{<final_answer>}" of a prompt
      return end && { end, tex: text.slice(start, end), display: false };
    }
    const closer = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" }[opener] ?? opener.replace("\\begin", "\\end");
    let at = ends.get(closer) ?? -2;
    if (at !== -1 && at < inner) ends.set(closer, (at = text.indexOf(closer, inner)));
    if (at === -1 || at === inner || at - inner > LONGEST) return null;
    const end = at + closer.length;
    const whole = opener.startsWith("\\begin");
    return { end, tex: text.slice(whole ? start : inner, whole ? end : at), display: opener !== "\\(" };
  }

  // $…$ on one line. Dollars of money are no formula: "$5 and $10", "$20*.2=$<<20*.2=4>>4".
  function inline(text, inner) {
    let at = inner;
    while (at < text.length && text[at] !== "$" && text[at] !== "\n") at += text[at] === "\\" ? 2 : 1;
    if (text[at] !== "$" || at === inner || at - inner > LONGEST) return null;
    const tex = text.slice(inner, at);
    if (/^<<|=\s*$/.test(tex) || /^(?:\d|<<)/.test(text.slice(at + 1, at + 3))) return null;
    const spaces = /^\s/.test(tex) + /\s$/.test(tex);
    const symbols = /[=<>^_]/.test(tex) || (/[A-Za-z]/.test(tex) && !/[a-z]{2}/.test(tex));
    if (spaces && !/\\[a-zA-Z]/.test(tex) && !(spaces === 2 && symbols)) return null;
    const bare = tex.replace(/\\[a-zA-Z]+\s*\{[^{}]*\}|\\[a-zA-Z]+/g, "|");
    return /[A-Za-z]{2,}\s+[A-Za-z]{2,}/.test(bare) ? null : { end: at + 1, tex, display: false }; // prose
  }

  function closingBrace(text, from) {
    for (let at = from, depth = 1; at < text.length && at - from < LONGEST; at++) {
      if (text[at] === "\\") at++;
      else if (text[at] === "{") depth++;
      else if (text[at] === "}" && --depth === 0) return at + 1;
    }
    return null;
  }

  // What Temml does not know and what only moves columns or rules in a table: @{…} and \cline.
  function simplify(tex) {
    const braces = String.raw`\{(?:[^{}]|\{[^{}]*\})*\}`;
    const columns = new RegExp(String.raw`(\\begin\{array\})\{((?:[^{}]|${braces})*)\}`, "g");
    return tex
      .replace(columns, (_, begin, spec) => `${begin}{${spec.replace(new RegExp("@" + braces, "g"), "")}}`)
      .replace(/\\cline\s*\{[^{}]*\}/g, "\\hline");
  }

  // The <math> element of a formula; throws where Temml cannot read it. Nothing is trusted: no links, no images.
  function math(tex, display) {
    const holder = document.createElement("span");
    temml.render(simplify(tex), holder, {
      displayMode: display, throwOnError: true, trust: false, maxSize: [20, 60], maxExpand: 500,
      macros: { "\\mbox": "\\text{#1}", "\\vspace": "{}" },
    });
    return holder.firstChild;
  }

  function placeholder(source, tex, display) {
    const span = document.createElement("span");
    span.className = display ? "formula display" : "formula";
    span.textContent = source;
    span.title = source;
    waiting.push({ span, tex, display });
    return span;
  }

  // Text to a fragment. `plain(text)` makes the node of what is no formula.
  function fragment(text, plain = (piece) => document.createTextNode(piece)) {
    const made = document.createDocumentFragment();
    for (const part of split(text))
      made.append(part.tex === undefined ? plain(part.text) : placeholder(part.source, part.tex, part.display));
    schedule();
    return made;
  }

  // An answer as a rule read it: "\frac{7}{2}" is a formula without delimiters, "18" and "(C)" are text.
  function answer(text) {
    if (!/[\\^_]/.test(text) || text.length > LONGEST || /\$|\\[[(]/.test(text)) return fragment(text);
    const made = placeholder(text, text, false);
    schedule();
    return made;
  }

  let waiting = [];
  let scheduled = false;

  function schedule() {
    if (scheduled || !waiting.length) return;
    scheduled = true;
    requestAnimationFrame(slice);
  }

  function slice() {
    const until = performance.now() + SLICE_MS;
    scheduled = false;
    let next = 0;
    for (; next < waiting.length && performance.now() < until; next++) {
      const { span, tex, display } = waiting[next];
      if (!span.isConnected) continue; // another sample is shown by now
      try {
        span.replaceChildren(math(tex, display));
      } catch {
        span.classList.add("broken");
      }
    }
    waiting = waiting.slice(next);
    schedule();
  }

  return { split, simplify, fragment, answer };
})();
