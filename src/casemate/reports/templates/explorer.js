// Filters, searches and renders the attack sessions of a report. The data are in #explorer-data; every text is set with
// textContent, so no part of it is read as markup. Details are built when a session is opened.
"use strict";
(() => {
  const PAGE = 50;
  const SIDES = [["off", "Guard off"], ["on", "Guard on"]];
  const root = document.getElementById("explorer");
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const form = document.getElementById("explorer-form");
  const list = document.getElementById("explorer-list");
  const status = document.getElementById("explorer-status");
  const more = document.getElementById("explorer-more");
  let found = data.sessions;
  let terms = [];
  let shown = 0;

  const make = (tag, kind = "", text = null, children = []) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    if (text !== null) node.textContent = text;
    node.append(...children);
    return node;
  };

  // A text with redacted blocks set apart and search terms marked.
  const rich = (text) => {
    const nodes = [];
    for (const part of text.split(/(▇×\d+)/)) {
      if (/^▇×\d+$/.test(part)) nodes.push(make("span", "block", part));
      else nodes.push(...marked(part));
    }
    return nodes;
  };
  const marked = (text) => {
    const lower = text.toLowerCase();
    const term = terms.find((t) => lower.includes(t));
    if (!term || lower.length !== text.length) return text ? [document.createTextNode(text)] : [];
    const at = lower.indexOf(term), end = at + term.length;
    return [...marked(text.slice(0, at)), make("mark", "", text.slice(at, end)), ...marked(text.slice(end))];
  };

  const searchText = (session) => {
    if (session.text === undefined) {
      const parts = [session.attack, session.candidate, data.outcomes[session.outcome]];
      for (const exchange of session.exchanges)
        for (const side of Object.values(exchange)) parts.push(side.question, side.reply, ...side.hidden, ...side.reasons, ...side.recovered, ...side.context);
      session.text = parts.join("\n").toLowerCase();
    }
    return session.text;
  };

  const GUARD = {
    "": () => true,
    withheld: (s) => s.sides.on && s.sides.on.flagged > 0,
    nothing: (s) => s.sides.on && s.sides.on.flagged === 0,
    failed: (s) => s.exchanges.some((e) => Object.values(e).some((side) => side.failed)),
  };
  const ORDER = {
    worst: null,
    attack: (a, b) => a.attack.localeCompare(b.attack) || a.rank - b.rank,
    candidate: (a, b) => a.candidate.localeCompare(b.candidate, "en", { numeric: true }) || a.rank - b.rank,
  };

  const select = () => {
    const want = Object.fromEntries(new FormData(form));
    terms = want.search.toLowerCase().split(/\s+/).filter(Boolean);
    found = data.sessions.filter((s) =>
      (!want.attack || s.attack === want.attack) &&
      (!want.outcome || s.outcome === want.outcome) &&
      (!want.kind || s.member === (want.kind === "member")) &&
      GUARD[want.guard](s) && terms.every((term) => searchText(s).includes(term)));
    if (ORDER[want.order]) found = [...found].sort(ORDER[want.order]);
    list.replaceChildren();
    shown = 0;
    grow();
  };

  const grow = () => {
    const next = found.slice(shown, shown + PAGE);
    list.append(...next.map(row));
    shown += next.length;
    more.hidden = shown >= found.length;
    more.textContent = `Show ${Math.min(PAGE, found.length - shown)} more`;
    const all = data.sessions.length.toLocaleString("en-US");
    status.textContent = found.length
      ? `${found.length.toLocaleString("en-US")} of ${all} sessions match; ${shown.toLocaleString("en-US")} are shown.`
      : `No session matches. Clear a filter to see more of the ${all} sessions.`;
    return next.length;
  };

  const guesses = (session) => SIDES.filter(([key]) => session.sides[key]).map(([key, name]) => {
    const guess = session.sides[key].guess;
    const [yes, no] = session.member === null ? ["recovered new text", "nothing new"] : ["guess: member", "guess: non-member"];
    return make("span", "guess", null, [make("span", `side ${key}`, name), ` ${guess === null ? "undecided" : guess ? yes : no}`]);
  });

  const row = (session) => {
    const side = session.sides.on;
    const summary = make("summary", "", null, [
      make("span", `chip ${data.tones[session.outcome]}`, data.outcomes[session.outcome]),
      make("span", "where", null, [make("b", "", session.attack), make("code", "", null, marked(session.candidate))]),
      make("span", "meta guesses", null, guesses(session)),
      make("span", "meta count", !side ? "" : session.member !== null ? `withheld in ${side.flagged} of ${side.questions} questions`
        : side.flagged ? "something withheld" : "nothing withheld"),
    ]);
    const details = make("details", "session", null, [summary]);
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(body(session));
    });
    return make("li", "", null, [details]);
  };

  const body = (session) => {
    const turns = session.exchanges.map((exchange, i) => turn(exchange, session.member === null ? `Q${session.candidate.slice(1)}` : `Question ${i + 1}`));
    if (!turns.length) turns.push(make("p", "meta", "The questions of this session were left out to limit the size of the report."));
    return make("div", "turns", null, turns);
  };

  const turn = (exchange, title) => {
    const sides = SIDES.filter(([key]) => exchange[key]);
    const question = exchange[sides[0][0]].question;
    return make("section", "turn", null, [
      make("h3", "", title),
      make("p", "text", null, rich(question)),
      make("div", "sides", null, sides.map(([key, name]) => answer(exchange[key], key, name, question))),
    ]);
  };

  const listed = (names) => names.flatMap((name, i) => [i ? ", " : "", make("code", "", null, marked(name))]);

  const answer = (side, key, name, question) => {
    const state = side.refused ? "rejected by the target" : side.answered ? "answered" : "no answer";
    const parts = [make("h4", `side ${key}`, `${name}: ${state}`)];
    if (side.question !== question) parts.push(make("p", "meta", "asked:"), make("p", "text", null, rich(side.question)));
    parts.push(make("p", "text", null, side.reply ? rich(side.reply) : ["(empty reply)"]));
    if (side.in_context !== null) parts.push(make("p", "meta", side.in_context ? "Candidate in the context." : "Candidate not in the context."));
    if (side.recovered_count) {
      const chunks = `${side.recovered_count} chunk${side.recovered_count === 1 ? "" : "s"}`;
      parts.push(make("p", "meta recovered", null, [`Recovered ${chunks}: `, ...listed(side.recovered)]));
    }
    if (side.context.length) parts.push(make("p", "meta", null, ["In the context: ", ...listed(side.context)]));
    if (side.hidden_count) {
      const rest = side.hidden_count - side.hidden.length;
      parts.push(make("p", "meta", null, ["Withheld: ", ...listed(side.hidden), rest ? ` and ${rest} more` : ""]));
    }
    for (const reason of side.reasons) parts.push(make("p", "meta", null, ["Reason: ", ...marked(reason)]));
    if (side.failed) parts.push(make("p", "meta", "A defense failed in this question."));
    return make("div", `answer ${key}`, null, parts);
  };

  data.sessions.forEach((session, rank) => { session.rank = rank; });
  let timer = 0;
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(select, 120); });
  form.addEventListener("submit", (event) => { event.preventDefault(); select(); });
  form.addEventListener("reset", () => setTimeout(select));
  more.addEventListener("click", () => {
    const first = list.children.length;
    if (grow()) list.children[first].querySelector("summary").focus();
  });
  // The address may set filters: #attack=mba&outcome=identified
  const preset = () => {
    const given = [...new URLSearchParams(location.hash.slice(1))].filter(([name]) => form.elements[name]);
    for (const [name, value] of given) form.elements[name].value = value;
    select();
    if (given.length) root.scrollIntoView();
  };
  window.addEventListener("hashchange", preset);
  form.hidden = false;
  root.classList.add("ready");
  preset();
})();
