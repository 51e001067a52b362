"use strict";
// The samples: unpacked piece by piece, filtered, searched, sorted. Nothing here touches what the reader sees.

const Samples = (() => {
  const meta = JSON.parse(document.getElementById("meta").textContent);
  const problems = new Map(meta.datasets.map((name) => [name, []])); // dataset -> problems
  const all = []; // every sample, in order of problems

  // Unpack every piece; `onPiece()` after each, so that the page can show what is there already.
  async function load(onPiece) {
    for (const element of document.querySelectorAll("script.piece")) {
      const piece = JSON.parse(await inflate(element.textContent));
      element.remove();
      if (piece.problems) addProblems(piece.problems);
      else addSamples(piece.samples);
      onPiece();
    }
  }

  async function inflate(base64) {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  function addProblems(columns) {
    const { head, tail } = columns;
    const list = problems.get(columns.dataset);
    columns.key.forEach((key, i) => {
      const prompt = columns.prompt[i];
      const end = prompt.length - tail;
      list.push({
        key, prompt, dataset: columns.dataset, number: list.length, samples: [],
        gold: columns.gold[i], source: columns.source[i], task: columns.task[i], tokens: columns.prompt_tokens[i],
        graded: Boolean(columns.gold[i] && columns.task[i]), // else by an environment, which reads no answer
        // The template is the same in all prompts; what lies between is the question.
        parts: end > head ? [prompt.slice(0, head), prompt.slice(head, end), prompt.slice(end)] : ["", prompt, ""],
      });
    });
  }

  function addSamples(columns) {
    const list = problems.get(columns.dataset);
    columns.problem.forEach((number, i) => {
      const sample = {
        id: all.length, run: columns.run, problem: list[number], number: columns.sample[i],
        completion: columns.completion[i], turns: columns.turns[i], score: columns.score[i], scores: columns.scores[i],
        extracted: columns.extracted[i], reason: columns.reason[i], tokens: columns.tokens[i],
        error: columns.error[i], seconds: columns.time[i], seed: columns.seed[i],
        correct: columns.score[i] === 1,
        truncated: columns.finish_reason[i] === "length",
        unextracted: list[number].graded && columns.extracted[i] === null,
        changed: columns.changed?.[i] ?? null, // [there, here]: the problem's mean score in the comparison
        failed: columns.error[i] !== null || columns.reason[i] === "timeout" || columns.reason[i] === "error",
      };
      sample.change = sample.changed && (sample.changed[1] > sample.changed[0] ? "better" : "worse");
      sample.problem.samples.push(sample);
      all.push(sample);
    });
  }

  const FLAGS = ["truncated", "unextracted", "failed"];

  // {shown: [sample], counts: {verdict: {all, correct, wrong}, change: {all, better, worse}, truncated, …}}: a count is
  // what choosing that filter would show.
  function filter(wanted) {
    const found = finder(wanted.query);
    const shown = [];
    const counts = {
      verdict: { all: 0, correct: 0, wrong: 0 }, change: { all: 0, better: 0, worse: 0 },
      truncated: 0, unextracted: 0, failed: 0,
    };
    for (const sample of all) {
      if (wanted.dataset && sample.problem.dataset !== wanted.dataset) continue;
      if (wanted.run !== "" && sample.run !== Number(wanted.run)) continue;
      if (!FLAGS.every((flag) => !wanted[flag] || sample[flag])) continue;
      if (!found(sample)) continue;
      const verdict = wanted.verdict === "all" || sample.correct === (wanted.verdict === "correct");
      const change = wanted.change === "all" || sample.change === wanted.change;
      if (change) {
        counts.verdict.all++;
        counts.verdict[sample.correct ? "correct" : "wrong"]++;
      }
      if (verdict) {
        counts.change.all++;
        if (sample.change) counts.change[sample.change]++;
      }
      if (!verdict || !change) continue;
      for (const flag of FLAGS) if (sample[flag]) counts[flag]++;
      shown.push(sample);
    }
    if (wanted.sort === "short") shown.sort((a, b) => a.tokens - b.tokens || a.id - b.id);
    if (wanted.sort === "long") shown.sort((a, b) => b.tokens - a.tokens || a.id - b.id);
    return { shown, counts };
  }

  // The query as an expression that ignores case, or null for none.
  function pattern(query, flags = "i") {
    return query.trim() ? new RegExp(query.trim().replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), flags) : null;
  }

  // Whether a sample, or the problem that it answers, holds the query. A problem is looked through once.
  function finder(query) {
    const wanted = pattern(query);
    if (!wanted) return () => true;
    const inProblem = new Map();
    const problemHas = (problem) => {
      if (!inProblem.has(problem))
        inProblem.set(problem, [problem.parts[1], problem.gold, problem.source, problem.key].some((t) => wanted.test(t)));
      return inProblem.get(problem);
    };
    return (sample) =>
      wanted.test(sample.completion) || (sample.turns ?? []).some(([, text]) => wanted.test(text)) || wanted.test(sample.extracted ?? "") || wanted.test(sample.error ?? "") ||
      problemHas(sample.problem);
  }

  return { meta, all, load, filter, pattern };
})();
