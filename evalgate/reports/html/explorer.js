// The explorer: rows of the worst positions, filtered, sorted, and linked to. Every text goes in as a text node.
(() => {
  "use strict";
  const source = document.getElementById("explorer-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const box = document.getElementById("explorer");
  const form = box.querySelector("form");
  const list = document.getElementById("tokens-list");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const PAGE = 25, LEVELS = 6, LEAST = -60; // tints: one for each half decade from 20 log10 = -60, which is 0.001
  const fields = ["candidate", "sort", "domain", "class", "document", "only"];
  let rows = [], shown = 0, open = null;

  const el = (tag, name, ...inside) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...inside);
    return made;
  };
  const show = (value) => {
    if (value === undefined || value === null) return "unknown";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 0.001 || size >= 1e5) return value.toExponential(1).replace("-", "−");
    return value.toFixed(size >= 100 ? 1 : size >= 1 ? 3 : 4).replace("-", "−");
  };
  const percent = (logprob) => {
    const p = Math.min(1, Math.exp(logprob)) * 100;
    if (p >= 0.01 || p === 0) return `${p === 0 ? 0 : p.toFixed(p >= 10 ? 1 : 2)} %`;
    return `${p >= 1e-6 ? p.toFixed(-Math.floor(Math.log10(p))) : p.toExponential(0).replace("-", "−")} %`;
  };
  const signed = (value) => (value > 0 ? "+" : "") + show(value);

  // A token's text, with everything that could not be seen made visible.
  const SPECIAL = /^<[^\s<>]{1,60}>$|^\[[A-Z_]{2,20}\]$/;
  // What has no width, breaks lines unseen or turns the direction; the joiners that scripts and emoji need stay.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]|[\u{e0000}-\u{e007f}]/u;
  const SPACES = /[\s\u00a0]/u;
  const escaped = (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0");
  const sign = (text) => el("span", "sign", text);
  const visible = (text, flowing) => {
    const parts = [];
    let run = "";
    const flush = () => { if (run) parts.push(run); run = ""; };
    for (const c of text) {
      if (c === " ") { flush(); parts.push(sign("·")); if (flowing) parts.push(el("wbr")); }
      else if (c === "\n") { flush(); parts.push(sign("↵")); if (flowing) parts.push("\n"); }
      else if (c === "\t") { flush(); parts.push(sign("⇥")); }
      else if (HIDDEN.test(c)) { flush(); parts.push(el("span", "chip", escaped(c))); }
      else if (SPACES.test(c)) { flush(); parts.push(el("span", "chip", escaped(c))); }
      else run += c;
    }
    flush();
    return parts;
  };
  const tokenParts = (index, flowing, control) => {
    const text = data.tokens[index];
    if (text === null) return [el("span", "chip", `id ${data.ids[index]}`)];
    if (text === "") return [el("span", "chip", `empty, id ${data.ids[index]}`)];
    return control || SPECIAL.test(text) ? [el("span", "chip", ...visible(text, false))] : visible(text, flowing);
  };
  const token = (index) => {
    const made = el("bdi", "tok", ...tokenParts(index, false, false));
    made.dir = "auto";
    return made;
  };
  const level = (heat) => Math.max(0, Math.min(LEVELS, Math.floor((heat - LEAST) / 10) + 1));

  // The rows of one candidate.
  const build = (place) => {
    const c = data.candidates[place];
    const at = (name, i) => (c.numbers[name] ? c.numbers[name][i] : undefined);
    return c.rows.map(([span, offset], i) => {
      const s = c.spans[span];
      const ref = at("ref_nll", i), cand = at("cand_nll", i);
      let position = s.p + offset;
      for (const [from, missing] of s.g ?? []) if (offset >= from) position += missing;
      return {
        candidate: place, i, span: s, offset, position, bad: c.bad[i], type: c.class[i], ref, cand,
        refTop: c.tops.ref?.[i], candTop: c.tops.cand?.[i], lists: c.lists[i],
        step: ref === undefined || cand === undefined ? undefined : cand - ref,
        change: ref === undefined || cand === undefined ? undefined : Math.exp(-cand) - Math.exp(-ref),
        regret: at("regret", i), refEntropy: at("ref_entropy", i), candEntropy: at("cand_entropy", i), tv: at("tv", i),
        refRank: c.ranks.ref_rank?.[i], candRank: c.ranks.cand_rank?.[i],
      };
    });
  };
  const cache = new Map();
  const rowsOf = (place) => { if (!cache.has(place)) cache.set(place, build(place)); return cache.get(place); };
  const largest = (key) => (a, b) => (b[key] ?? -Infinity) - (a[key] ?? -Infinity);
  const size = (key) => (a, b) => Math.abs(b[key] ?? 0) - Math.abs(a[key] ?? 0);
  const SORTS = {
    bad: [data.bad.label, largest("bad")],
    step: ["loss of log-probability", largest("step")],
    change: ["change of probability", size("change")],
    regret: ["regret", largest("regret")],
    entropy: ["the reference's entropy", largest("refEntropy")],
    text: ["place in the text", (a, b) => a.span.w - b.span.w || a.position - b.position],
  };
  const has = {
    bad: () => true, text: () => true,
    step: () => data.bad.key !== "step" && rowsOf(0).some((r) => r.step !== undefined),
    change: () => rowsOf(0).some((r) => r.change !== undefined),
    regret: () => data.bad.key !== "regret" && rowsOf(0).some((r) => r.regret !== undefined),
    entropy: () => rowsOf(0).some((r) => r.refEntropy !== undefined),
  };

  // Controls
  const fill = (name, options) => {
    const select = form.elements[name];
    select.replaceChildren(...options.map(([value, text]) => {
      const option = el("option", "", text);
      option.value = value;
      return option;
    }));
  };
  const plain = (text) => { const found = []; for (const part of visible(text, false)) found.push(part.textContent ?? part); return found.join("").replaceAll("·", " "); };
  const byName = (a, b) => a[1].localeCompare(b[1], undefined, { numeric: true });
  const choices = () => {
    const found = rowsOf(Number(form.elements.candidate.value || 0));
    const counted = (key, name) => {
      const counts = new Map();
      for (const row of found) { const k = key(row); if (k >= 0) counts.set(k, (counts.get(k) ?? 0) + 1); }
      const options = [...counts].map(([k, n]) => [String(k), `${name(k)} (${n})`]);
      return [["", "all"], ...options.sort(byName)];
    };
    for (const [field, options] of [
      ["domain", counted((r) => r.span.m, (k) => plain(data.names[k]))],
      ["class", counted((r) => r.type, (k) => data.classes[k])],
      ["document", counted((r) => r.span.d, (k) => plain(data.names[k]))],
    ]) {
      const before = form.elements[field].value;
      fill(field, options);
      form.elements[field].value = options.some(([value]) => value === before) ? before : "";
      form.elements[field].closest("label").hidden = options.length < 2;
    }
    form.elements.only.closest("label").hidden = !found.some((r) => r.refTop !== undefined);
  };

  // The address: #p=CANDIDATE:WINDOW:POSITION with the filters that are set; by name, so that a link outlives an order.
  const named = { domain: (v) => data.names[v], document: (v) => data.names[v], class: (v) => data.classes[v], sort: (v) => v, only: (v) => v };
  const address = (row) => {
    const query = new URLSearchParams();
    if (row) query.set("p", `${row.candidate}:${row.span.w}:${row.position}`);
    else if (Number(form.elements.candidate.value)) query.set("candidate", form.elements.candidate.value);
    for (const field of fields.slice(1)) {
      const value = form.elements[field].value;
      if (value && !(field === "sort" && value === "bad")) query.set(field, named[field](value));
    }
    return `#${query}`;
  };
  const restore = () => {
    const query = new URLSearchParams(location.hash.slice(1));
    const place = /^(\d+):(\d+):(\d+)$/.exec(query.get("p") ?? "");
    const known = place || fields.some((field) => query.has(field));
    if (!known) return false;
    const candidate = Number(place ? place[1] : query.get("candidate") ?? 0);
    for (const field of fields) form.elements[field].selectedIndex = 0; // form.reset() would tell the listener of the button
    form.elements.candidate.value = String(candidate < data.candidates.length ? candidate : 0);
    choices();
    for (const field of fields.slice(1)) {
      const wanted = query.get(field);
      const found = wanted === null ? undefined : [...form.elements[field].options].find((o) => o.value !== "" && named[field](o.value) === wanted);
      if (found) form.elements[field].value = found.value;
    }
    update(false);
    if (!place) return true;
    const at = (r) => r.span.w === Number(place[2]) && r.position === Number(place[3]);
    let index = rows.findIndex(at);
    if (index < 0 && rowsOf(Number(form.elements.candidate.value)).some(at)) { // a filter hides it: the link wins
      for (const field of ["domain", "class", "document", "only"]) form.elements[field].value = "";
      update(false);
      index = rows.findIndex(at);
    }
    if (index < 0) { count.textContent += ` The linked position ${place[2]}:${place[3]} is not among them.`; return true; }
    while (shown <= index) page();
    const item = list.children[index];
    item.classList.add("linked");
    item.querySelector("details").open = true;
    item.scrollIntoView({ block: "center" });
    item.querySelector("summary").focus({ preventScroll: true });
    return true;
  };

  // One row
  const context = (row) => {
    const [before, after] = data.around, s = row.span;
    const first = Math.max(0, row.offset - before), last = Math.min(s.t.length, row.offset + after + 1);
    const gaps = new Map(s.g ?? []), control = new Set(s.c ?? []);
    const text = el("p", "text");
    text.dir = "auto";
    if (first > 0 || s.p > 1) text.append(el("span", "gap", "…"));
    for (let i = first; i < last; i++) {
      if (gaps.has(i) && i > first) text.append(el("span", "gap", `[${gaps.get(i)} not scored]`));
      const tint = level(s.h[i]);
      const made = el("span", `t k${tint}${i === row.offset ? " here" : ""}`, ...tokenParts(s.t[i], true, control.has(i)));
      const value = s.h[i] <= -120 ? "at most 0.000001" : show(10 ** (s.h[i] / 20));
      made.title = `${data.bad.label} ${value}, id ${data.ids[s.t[i]]}`;
      if (i === row.offset) made.setAttribute("aria-current", "true");
      text.append(made);
    }
    text.append(el("span", "gap", "…"));
    return text;
  };
  const SVG = "http://www.w3.org/2000/svg";
  const bar = (share) => {
    const made = document.createElementNS(SVG, "svg"), rect = document.createElementNS(SVG, "rect");
    for (const [name, value] of [["viewBox", "0 0 100 8"], ["width", "100%"], ["height", "8"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"], ["class", "bar"]]) made.setAttribute(name, value);
    rect.setAttribute("width", String(Math.max(share * 100, share > 0 ? 0.6 : 0)));
    rect.setAttribute("height", "8");
    made.append(rect);
    return made;
  };
  const likeliest = (caption, ids, logprobs, actual, kind) => {
    const table = el("table", kind, el("caption", "", caption));
    const heading = (text, name) => { const made = el("th", name, text); made.scope = "col"; return made; };
    table.append(el("thead", "", el("tr", "", heading("token", ""), heading("probability", "n p"), el("td", "b"))));
    const body = el("tbody");
    ids.forEach((id, k) => {
      const name = el("th", "", token(id));
      name.scope = "row";
      if (id === actual) name.append(el("span", "unseen", " (the actual token)"));
      body.append(el("tr", id === actual ? "actual" : "", name, el("td", "n p", percent(logprobs[k])), el("td", "b", bar(Math.min(1, Math.exp(logprobs[k]))))));
    });
    table.append(body);
    return table;
  };
  const fact = (name, ...value) => el("div", "", el("dt", "", name), el("dd", "", ...value));
  const detail = (row) => {
    const actual = row.span.t[row.offset];
    const inside = [];
    if (row.lists) {
      const [refIds, ref, candIds, cand] = row.lists;
      const sides = el("div", "lists");
      if (refIds.length) sides.append(likeliest("Reference", refIds, ref, actual, "ref"));
      if (candIds.length) sides.append(likeliest(data.candidates[row.candidate].name, candIds, cand, actual, "cand"));
      inside.push(sides);
    } else if (row.refTop !== undefined) inside.push(el("p", "numbers", "Only each side's first choice is known here."));
    const numbers = el("dl", "choices numbers");
    const pair = (name, a, b, write) => { if (a !== undefined || b !== undefined) numbers.append(fact(name, `${write(a)} → ${write(b)}`)); };
    pair("probability of the actual token", row.ref, row.cand, (v) => (v === undefined ? "–" : percent(-v)));
    pair("its rank", row.refRank, row.candRank, (v) => v?.toLocaleString("en") ?? "–");
    pair("NLL", row.ref, row.cand, (v) => (v === undefined ? "–" : show(v)));
    pair("entropy", row.refEntropy, row.candEntropy, (v) => (v === undefined ? "–" : show(v)));
    if (row.regret !== undefined) numbers.append(fact("regret", show(row.regret)));
    if (row.tv !== undefined) numbers.append(fact("TV", show(row.tv)));
    numbers.append(fact("token id", String(data.ids[actual])));
    inside.push(numbers);
    return inside;
  };
  const item = (row) => {
    const bad = el("span", "bad", el("small", "", `${data.bad.label} `), show(row.bad));
    const where = el("bdi", "where", `${plain(data.names[row.span.m])} / ${plain(data.names[row.span.d])}, window ${row.span.w}, position ${row.position}`);
    const link = el("a", "", "link");
    link.href = address(row);
    link.setAttribute("aria-label", `Link to window ${row.span.w}, position ${row.position}`);
    const head = el("div", "head", bad, where);
    if (row.step !== undefined) head.append(el("span", "", `Δ log p ${signed(-row.step)}`));
    head.append(link);
    const brief = el("dl", "choices");
    if (row.refTop !== undefined) brief.append(fact("reference picks", token(row.refTop)));
    if (row.candTop !== undefined) brief.append(fact(row.refTop === undefined ? "picks" : "candidate picks", token(row.candTop)));
    brief.append(fact("actual", token(row.span.t[row.offset])));
    const details = el("details", "more", el("summary", "", row.lists ? "Both sides' likeliest tokens" : "All numbers"));
    details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(...detail(row)); });
    const made = el("li", "", head, context(row), brief, details);
    made.dataset.place = `${row.candidate}:${row.span.w}:${row.position}`;
    return made;
  };

  const page = () => {
    list.append(...rows.slice(shown, shown + PAGE).map(item));
    shown = Math.min(rows.length, shown + PAGE);
    more.hidden = shown >= rows.length;
    more.textContent = `Show ${Math.min(PAGE, rows.length - shown)} more of ${(rows.length - shown).toLocaleString("en")}`;
  };
  const update = (say = true) => {
    const value = (name) => form.elements[name].value;
    const all = rowsOf(Number(value("candidate") || 0));
    rows = all.filter((r) =>
      (value("domain") === "" || r.span.m === Number(value("domain"))) &&
      (value("class") === "" || r.type === Number(value("class"))) &&
      (value("document") === "" || r.span.d === Number(value("document"))) &&
      (value("only") === "" || (r.refTop === r.candTop) === (value("only") === "same")));
    rows.sort(SORTS[value("sort") || "bad"][1]);
    list.replaceChildren();
    shown = 0;
    page();
    const kept = all.length.toLocaleString("en"), total = data.candidates[Number(value("candidate") || 0)].positions.toLocaleString("en");
    count.textContent = rows.length === all.length ? `${kept} of ${total} positions are kept here.` : `${rows.length.toLocaleString("en")} of the ${kept} positions that are kept here match.`;
    if (say) try { history.replaceState(null, "", address(null) === "#" ? location.pathname + location.search : address(null)); } catch { /* the address cannot be set here */ }
  };

  // The start
  fill("candidate", data.candidates.map((c, i) => [String(i), plain(c.name)]));
  document.getElementById("by-candidate").hidden = data.candidates.length < 2;
  fill("sort", Object.keys(SORTS).filter((key) => has[key]()).map((key) => [key, SORTS[key][0]]));
  document.getElementById("scale-label").textContent = `${data.bad.label} `;
  for (let k = 1; k <= LEVELS; k++) {
    const from = Number((10 ** ((LEAST + 10 * (k - 1)) / 20)).toPrecision(1));
    document.getElementById("scale").append(el("i", `k${k}`, k === LEVELS ? `${from}+` : String(from)));
  }
  form.addEventListener("change", (event) => { if (event.target.name === "candidate") choices(); update(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { choices(); update(); }));
  more.addEventListener("click", () => { const from = shown; page(); list.children[from]?.querySelector("summary").focus({ preventScroll: true }); });
  list.addEventListener("keydown", (event) => { // up and down go from row to row
    const here = event.target.closest("summary")?.closest("li");
    const next = here && { ArrowDown: here.nextElementSibling, ArrowUp: here.previousElementSibling }[event.key];
    if (next) { event.preventDefault(); next.querySelector("summary").focus(); }
  });
  addEventListener("hashchange", restore);
  box.hidden = false;
  choices();
  if (!restore()) update(false);
})();
