/* Shows the data of a report, which stands as JSON in <script id="data">. No framework, no network.
 *
 * Text of programs is only ever put on the page as text, never as HTML. What may be long is built when it
 * is asked for: the rows of the tree that are in sight, the first rows of a table, the source of a kernel
 * that is opened.
 */
"use strict";

const ROW_HEIGHT = 24; // --row in page.css
const ROWS_AROUND = 10; // built above and below what is in sight
const FIRST_ROWS = 200; // of a table
const FIRST_READERS = 3; // of a collective

const programs = JSON.parse(document.getElementById("data").textContent);

// ---------------------------------------------------------------------------------------------- elements

/** A new element; `on…` attributes are listeners, null and false ones are left out. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null));
  return made;
}

const code = (text) => element("code", {}, text);

const faint = (text) => element("p", { class: "faint" }, text);

function section(id, title, ...children) {
  return element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), children);
}

// ----------------------------------------------------------------------------------------------- numbers

const count = (number) => number.toLocaleString("en-US");

const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return unit === 0 ? `${number} B` : `${number.toFixed(1)} ${units[unit]}`;
}

const seconds = (number) => (number < 1 ? `${(number * 1000).toFixed(0)} ms` : `${number.toFixed(2)} s`);

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// ------------------------------------------------------------------------------------------------ tables

/** A table whose columns sort it: `title`, `value` of a row, and if need be how to `show` it, whether it is a
 * `number`, code (`mono`), or must stay on one line (`whole`). */
function table(caption, columns, rows) {
  let shown = rows;
  let limit = FIRST_ROWS;
  const body = element("tbody");
  const more = element("button", { type: "button", onclick: () => ((limit = Infinity), fill()) });
  const classes = (column) => [column.number && "number", column.mono && "mono", column.whole && "whole"].filter(Boolean).join(" ") || null;

  function fill() {
    const cells = (row) => columns.map((column) => element("td", { class: classes(column) }, (column.show ?? column.value)(row)));
    body.replaceChildren(...shown.slice(0, limit).map((row) => element("tr", {}, cells(row))));
    more.hidden = shown.length <= limit;
    more.textContent = `Show all ${count(rows.length)}`;
  }

  function sort(column, heading) {
    const down = heading.getAttribute("aria-sort") === (column.number ? null : "ascending");
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const compare = (a, b) => (column.number ? a - b : String(a).localeCompare(String(b)));
    shown = rows.toSorted((a, b) => compare(column.value(a), column.value(b)) * (down ? -1 : 1));
    fill();
  }

  const headings = columns.map((column) => {
    const button = element("button", { type: "button", onclick: () => sort(column, heading) }, column.title);
    const heading = element("th", { scope: "col", class: column.number ? "number" : null }, button);
    return heading;
  });
  fill();
  const whole = element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, headings)), body);
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, whole, more);
}

const lines = (texts) => element("ul", {}, texts.map((text) => element("li", {}, text)));

// -------------------------------------------------------------------------------------------- the graph

/** The nodes of a graph as a tree of modules, in the order of the graph. */
function moduleTree(nodes) {
  const root = { name: "", path: "", children: [], groups: new Map(), nodes: 0, saved: 0, collectives: 0, open: true };

  function group(parent, name) {
    if (!parent.groups.has(name)) {
      const path = parent === root ? name : `${parent.path}.${name}`;
      const made = { name, path, parent, children: [], groups: new Map(), nodes: 0, saved: 0, collectives: 0, open: false };
      parent.groups.set(name, made);
      parent.children.push(made);
    }
    return parent.groups.get(name);
  }

  for (const node of nodes) {
    const names = node.kind === "input" ? ["inputs"] : node.module ? node.module.split(".") : [];
    const home = names.reduce(group, root);
    const leaf = { node, parent: home };
    home.children.push(leaf);
    node.leaf = leaf;
    for (let above = home; above; above = above.parent) {
      above.nodes += 1;
      above.saved += node.is_saved ? 1 : 0;
      above.collectives += node.kind === "collective" ? 1 : 0;
    }
  }
  return root;
}

/** A graph read once: who reads a node, and which nodes belong together in forward and backward. */
function prepared(graph) {
  if (graph.tree) return graph;
  const bySequence = new Map();
  graph.named = new Map(graph.nodes.map((node) => [node.name, node]));
  for (const node of graph.nodes) {
    node.readers = [];
    node.words = [node.name, node.operator, node.module, node.phase, node.kind, node.source, ...node.results, node.is_saved ? "saved" : ""]
      .join(" ").toLowerCase();
    if (node.sequence !== null) {
      if (!bySequence.has(node.sequence)) bySequence.set(node.sequence, []);
      bySequence.get(node.sequence).push(node);
    }
  }
  for (const node of graph.nodes) {
    node.inputs = node.reads.map((position) => graph.nodes[position]);
    for (const read of node.inputs) read.readers.push(node);
    const same = bySequence.get(node.sequence) ?? [];
    node.partners = same.filter((other) => other.phase !== node.phase);
  }
  graph.tree = moduleTree(graph.nodes);
  return graph;
}

/** How large a graph is: operations, as every report counts them, and inputs. */
const size = (graph) => `${plural(graph.num_operations, "operation")}, ${plural(graph.nodes.length - graph.num_operations, "input")}`;

/** Open all that an item of a tree is in. */
function openAround(item) {
  for (let above = item.parent; above; above = above.parent) above.open = true;
}

/** The tree on the page. It holds the focus itself and says which row is meant (`aria-activedescendant`). */
class TreeView {
  constructor(choose) {
    this.choose = choose;
    this.rows = [];
    this.active = 0;
    this.all = element("div", { class: "all", role: "none" });
    this.element = element(
      "div",
      {
        class: "tree", role: "tree", tabindex: "0", "aria-label": "Nodes by module",
        onkeydown: (event) => this.key(event), onclick: (event) => this.click(event),
        onscroll: () => this.draw(), onfocus: () => this.draw(),
      },
      this.all,
    );
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(graph) {
    this.graph = graph;
    this.words = [];
    this.list();
    this.go(0);
  }

  /** Show only nodes that hold every one of these words; returns how many do. */
  search(words) {
    const before = this.rows[this.active]?.item;
    this.words = words;
    if (!words.length && before?.node) openAround(before); // what was found stays in sight
    const matches = this.list();
    this.go(Math.max(0, this.rows.findIndex((row) => row.item === before)));
    return matches;
  }

  /** Make the list of rows anew: what is open, or leads to a match. Returns how many nodes match. */
  list() {
    const rows = [];
    const matches = (node) => this.words.every((word) => node.words.includes(word));
    let found = 0;

    const add = (children, level) => {
      let position = 0;
      const siblings = [];
      for (const item of children) {
        const at = rows.length;
        if (item.node) {
          if (!matches(item.node)) continue;
          found += 1;
          rows.push({ item, level });
        } else {
          const row = { item, level };
          const foundBefore = found;
          rows.push(row);
          row.open = item.open || this.words.length > 0;
          if (row.open) add(item.children, level + 1);
          if (this.words.length && found === foundBefore) {
            rows.length = at; // nothing in it matches
            continue;
          }
        }
        rows[at].position = ++position;
        siblings.push(rows[at]);
      }
      for (const row of siblings) row.siblings = position;
    };

    add(this.graph.tree.children, 1);
    this.rows = rows;
    this.all.style.height = `${rows.length * ROW_HEIGHT}px`;
    this.drawn = null;
    return found;
  }

  /** Build the rows that are in sight, and the active one, which a screen reader must find. */
  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_HEIGHT) - ROWS_AROUND);
    const last = Math.min(this.rows.length, first + Math.ceil(this.element.clientHeight / ROW_HEIGHT) + 2 * ROWS_AROUND);
    const sight = `${first} ${last} ${this.active}`;
    if (sight === this.drawn) return;
    this.drawn = sight;
    const built = [];
    for (let at = first; at < last; at++) built.push(this.row(at));
    if (this.rows.length && (this.active < first || this.active >= last)) built.push(this.row(this.active));
    this.all.replaceChildren(...built);
    if (this.rows.length) this.element.setAttribute("aria-activedescendant", `row-${this.active}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  row(at) {
    const { item, level, open, position, siblings } = this.rows[at];
    const attributes = {
      class: "row", role: "treeitem", id: `row-${at}`, "data-at": at, "aria-level": level, "aria-posinset": position,
      "aria-setsize": siblings, "aria-selected": String(at === this.active),
      "aria-expanded": item.node ? null : String(open),
      style: `top: ${at * ROW_HEIGHT}px; padding-left: ${(level - 1) * 18 + 6}px`,
    };
    return element("div", attributes, item.node ? nodeCells(item.node) : groupCells(item, open));
  }

  /** Make a row the active one and bring it into sight. */
  go(at) {
    this.active = Math.max(0, Math.min(at, this.rows.length - 1));
    const top = this.active * ROW_HEIGHT;
    const view = this.element;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + ROW_HEIGHT > view.scrollTop + view.clientHeight) view.scrollTop = top + ROW_HEIGHT - view.clientHeight;
    this.draw();
    this.choose(this.rows[this.active]?.item ?? null);
  }

  toggle(at) {
    const { item } = this.rows[at];
    if (item.node) return;
    item.open = !this.rows[at].open;
    this.list();
    this.go(at);
  }

  openAll(open) {
    const set = (group) => {
      for (const inner of group.groups.values()) (inner.open = open), set(inner);
    };
    set(this.graph.tree);
    const item = this.rows[this.active]?.item;
    this.list();
    this.go(Math.max(0, this.rows.findIndex((row) => row.item === item)));
  }

  /** Open what a node is in, and go there. */
  reveal(node) {
    openAround(node.leaf);
    this.list();
    this.go(this.rows.findIndex((row) => row.item === node.leaf));
    this.element.focus();
  }

  click(event) {
    const row = event.target.closest(".row");
    if (!row) return;
    const at = Number(row.dataset.at);
    this.go(at);
    this.toggle(at);
  }

  /** The keys of the tree pattern of the ARIA Authoring Practices. */
  key(event) {
    if (!this.rows.length || event.ctrlKey || event.altKey || event.metaKey) return;
    const { item, open, level } = this.rows[this.active];
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW_HEIGHT) - 1);
    const above = () => {
      let at = this.active;
      while (at > 0 && this.rows[at].level >= level) at--;
      return at;
    };
    const keys = {
      ArrowDown: () => this.go(this.active + 1),
      ArrowUp: () => this.go(this.active - 1),
      PageDown: () => this.go(this.active + page),
      PageUp: () => this.go(this.active - page),
      Home: () => this.go(0),
      End: () => this.go(this.rows.length - 1),
      ArrowRight: () => (item.node ? null : open ? this.go(this.active + 1) : this.toggle(this.active)),
      ArrowLeft: () => (!item.node && open ? this.toggle(this.active) : this.go(above())),
      Enter: () => this.toggle(this.active),
      " ": () => this.toggle(this.active),
      "*": () => this.openAll(true),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

function groupCells(group, open) {
  const facts = [plural(group.nodes, "node")];
  if (group.saved) facts.push(`${count(group.saved)} saved`);
  if (group.collectives) facts.push(plural(group.collectives, "collective"));
  return [
    element("span", { class: "twist", "aria-hidden": "true" }, open ? "▾" : "▸"),
    element("span", { class: "name group" }, group.name),
    element("span", { class: "count" }, facts.join(", ")),
  ];
}

function nodeCells(node) {
  const badges = [node.is_saved && "saved", node.kind === "collective" && "collective", node.kind === "wait" && "wait"].filter(Boolean);
  return [
    element("span", { class: "twist" }),
    element("span", { class: `name ${node.phase}` }, node.name),
    badges.map((badge) => element("span", { class: `badge ${badge}` }, badge)),
    element("span", { class: "type" }, node.type),
  ];
}

/** What is known of the chosen node, with ways to the nodes around it. */
function nodeFacts(node, go) {
  const links = (nodes) => nodes.slice(0, FIRST_ROWS).map((other) => element("button", { type: "button", class: "link", onclick: () => go(other) }, other.name));
  const facts = [
    ["operator", code(node.operator)],
    ["phase", element("span", { class: node.phase }, node.phase)],
    ["result", node.type && `${node.type}${node.bytes ? `, ${bytes(node.bytes)}` : ""}`],
    ["module", node.module && code(node.module)],
    ["line", node.source && code(node.source)],
    ["saved", node.is_saved && "kept for the backward"],
    ["is", node.results.length > 0 && lines(node.results)],
    [node.phase === "forward" ? "its backward" : "its forward", node.partners.length > 0 && links(node.partners)],
    ["reads", node.inputs.length > 0 && links(node.inputs)],
    ["read by", node.readers.length > 0 && links(node.readers)],
  ];
  const shown = facts.filter(([, value]) => value).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  return [element("h3", {}, node.name), element("dl", {}, shown)];
}

function groupFacts(group) {
  return [element("h3", {}, group.path), faint(`${plural(group.nodes, "node")}, of which ${count(group.saved)} are saved and ${count(group.collectives)} start a collective.`)];
}

/** The section of the graphs; `reveal(graph, node)` on what it returns goes to a node by name. */
function graphSection(program) {
  const facts = element("div", { class: "facts", role: "region", "aria-label": "The chosen node", tabindex: "0" });
  const tree = new TreeView((item) => {
    const shown = item === null ? [faint("No node matches.")] : item.node ? nodeFacts(item.node, (node) => reveal(null, node.name)) : groupFacts(item);
    facts.replaceChildren(...shown);
  });
  const status = element("span", { role: "status", class: "faint" });
  const box = element("input", {
    id: "search", type: "search", placeholder: "Search names, operators, modules, lines  ( / )", "aria-label": "Search nodes",
    "aria-keyshortcuts": "/", autocomplete: "off", spellcheck: "false", oninput: search, onkeydown: leave,
  });
  const choice = element("select", { "aria-label": "Graph", onchange: () => show(choice.value) }, program.graphs.map((graph) => element("option", {}, graph.name)));
  let graph = null;

  function show(name) {
    graph = prepared(program.graphs.find((each) => each.name === name));
    choice.value = name;
    box.value = "";
    tree.show(graph);
    status.textContent = size(graph);
  }

  function search() {
    const found = tree.search(box.value.toLowerCase().split(/\s+/).filter(Boolean));
    status.textContent = box.value.trim() ? `${count(found)} of ${plural(graph.nodes.length, "node")}` : size(graph);
  }

  function leave(event) {
    if (event.key === "Escape" && box.value) (box.value = ""), search();
    else if (event.key === "Escape" || event.key === "ArrowDown") tree.element.focus();
    else if (event.key === "Enter") (tree.element.focus(), tree.go(Math.max(0, tree.rows.findIndex((row) => row.item.node))));
    else return;
    event.preventDefault();
  }

  function reveal(graphName, nodeName) {
    if (graphName !== null && graph.name !== graphName) show(graphName);
    if (box.value) (box.value = ""), search();
    tree.reveal(graph.named.get(nodeName));
    section_.scrollIntoView({ block: "nearest" });
  }

  const all = (open, text) => element("button", { type: "button", onclick: () => tree.openAll(open) }, text);
  const tools = element("div", { class: "tools" }, choice, box, status, all(true, "Open all"), all(false, "Close all"));
  const section_ = section("graph", "Graph", tools, element("div", { class: "graph" }, tree.element, facts));
  show(program.graphs[0].name);
  return { section: section_, reveal };
}

// ---------------------------------------------------------------------------------------- other sections

const HUES = [212, 152, 32, 282, 350, 92, 182, 252];

const hue = (position) => `hsl(${HUES[position % HUES.length]} 55% 50%)`;

const savedBytes = (program) => (program.facts.find(([name]) => name === "saved for backward") ?? [])[1];

function figures(program) {
  const kernels = program.kernels.length, saved = savedBytes(program);
  const facts = {
    program: `${program.kind}, ${program.backend}`,
    ...Object.fromEntries(program.graphs.map((graph) => [`${graph.name} graph`, plural(graph.num_operations, "operation")])),
    ...(saved ? { "saved for backward": saved } : {}),
    ...(program.collectives.length ? { collectives: `${count(program.collectives.length)}, ${bytes(sum(program.collectives.map((each) => each.bytes)))}` } : {}),
    ...(kernels ? { kernels: count(kernels) } : {}),
    compiled: `in ${seconds(sum(Object.values(program.seconds)))}`,
  };
  return element("dl", { class: "figures" }, Object.entries(facts).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function stagesSection(program) {
  const ran = Object.entries(program.seconds).map(([name, seconds]) => ({ name, seconds }));
  const total = sum(Object.values(program.seconds)) || 1;
  const share = (stage) => `${((100 * stage.seconds) / total).toFixed(1)}%`;
  const bar = ran.map((stage, at) => element("span", { title: `${stage.name}: ${seconds(stage.seconds)}`, style: `width: ${share(stage)}; background: ${hue(at)}` }));
  const swatch = (stage) => [element("span", { class: "swatch", style: `background: ${hue(ran.indexOf(stage))}`, "aria-hidden": "true" }), stage.name];
  const stages = table("Compiling, stage by stage", [
    { title: "stage", value: (stage) => stage.name, show: swatch },
    { title: "time", value: (stage) => stage.seconds, show: (stage) => seconds(stage.seconds), number: true },
    { title: "share", value: (stage) => stage.seconds, show: share, number: true },
  ], ran);
  const passes = table("Graph passes", [
    { title: "graph", value: (pass) => pass.stage },
    { title: "pass", value: (pass) => pass.name, mono: true },
    { title: "nodes before", value: (pass) => pass.nodes_before, show: (pass) => count(pass.nodes_before), number: true },
    { title: "after", value: (pass) => pass.nodes_after, show: (pass) => count(pass.nodes_after), number: true },
    { title: "time", value: (pass) => pass.seconds, show: (pass) => seconds(pass.seconds), number: true },
  ], program.passes);
  return section("stages", "Stages", element("div", { class: "bar", "aria-hidden": "true" }, bar), element("div", { class: "beside" }, stages, passes));
}

function factsSection(program) {
  if (!program.facts.length) return null;
  const columns = [
    { title: "what", value: ([name]) => name, whole: true },
    { title: "", value: ([, text]) => text },
  ];
  return section("facts", "Facts", table("What else there is to say", columns, program.facts));
}

function tensorsSection(program) {
  const columns = [
    { title: "name", value: (tensor) => tensor.name, mono: true, whole: true },
    { title: "type", value: (tensor) => tensor.type, mono: true },
    { title: "what happens to it", value: (tensor) => tensor.facts.join(" "), show: (tensor) => lines(tensor.facts) },
  ];
  const tables = [
    table(plural(program.inputs.length, "input"), columns, program.inputs),
    table(plural(program.outputs.length, "output"), columns, program.outputs),
  ];
  return section("tensors", "Inputs and outputs", tables);
}

function link(text, graph, node, reveal) {
  return element("button", { type: "button", class: "link", onclick: () => reveal(graph, node) }, text);
}

function savedSection(program, reveal) {
  if (program.kind !== "training") return null;
  const name = (saved) => (saved.node === null ? code(saved.name) : link(saved.name, "joint", saved.node, reveal));
  const columns = [
    { title: "tensor", value: (saved) => saved.name, show: name, mono: true },
    { title: "type", value: (saved) => saved.type, mono: true, whole: true },
    { title: "bytes", value: (saved) => saved.bytes, show: (saved) => bytes(saved.bytes), number: true },
    { title: "module", value: (saved) => saved.module, mono: true },
    { title: "note", value: (saved) => saved.note },
  ];
  const caption = `${plural(program.saved.length, "tensor")}; ${savedBytes(program) ?? "none"} are kept for the backward alone`;
  return section("saved", "Saved for the backward", table(caption, columns, program.saved));
}

function collectivesSection(program, reveal) {
  if (!program.collectives.length) return section("collectives", "Collectives", faint("There are none."));
  const readers = (each) => {
    const first = each.readers.slice(0, FIRST_READERS).map((reader) => [link(reader, each.graph, reader, reveal), " "]);
    const more = each.readers.length - first.length;
    return element("span", {}, first.length ? first : "the caller", more > 0 ? `and ${count(more)} more` : "");
  };
  const columns = [
    { title: "graph", value: (each) => each.graph },
    { title: "collective", value: (each) => each.operator, show: (each) => link(each.operator, each.graph, each.node, reveal), mono: true },
    { title: "group", value: (each) => each.group },
    { title: "bytes", value: (each) => each.bytes, show: (each) => bytes(each.bytes), number: true },
    { title: "serves", value: (each) => each.unit, mono: true },
    { title: "runs beside", value: (each) => each.beside, show: (each) => plural(each.beside, "operator"), number: true },
    { title: "who waits for it", value: (each) => each.readers.join(" "), show: readers, mono: true },
  ];
  return section("collectives", "Collectives", table("In the order in which they start", columns, program.collectives));
}

/** Source that is put on the page when it is opened. */
function source(summary, text) {
  const whole = element("details", { ontoggle: () => whole.open && whole.children.length === 1 && whole.append(sourceText(text)) }, element("summary", {}, summary));
  return whole;
}

const sourceText = (text) => element("pre", { tabindex: "0", role: "region", "aria-label": "Source" }, text);

function kernelsSection(program) {
  if (!program.kernels.length) return null;
  const summary = (kernel) => [code(kernel.name), ` ${kernel.graph}, ${bytes(kernel.bytes)}, `, element("span", { class: "faint" }, kernel.operators.join(", "))];
  return section("kernels", "Kernels", program.kernels.map((kernel) => source(summary(kernel), kernel.text)));
}

function wrapperSection(program) {
  const graphs = program.graphs.filter((graph) => graph.source).map((graph) => source(`what runs the ${graph.name} graph`, graph.source));
  return section("wrapper", "What runs", faint("Printed for this signature: what a call goes through."), sourceText(program.wrapper), graphs);
}

function ranksSection(program) {
  const { others, missing } = program.ranks;
  const differences = Object.entries(program.ranks.differences).map(([what, values]) => ({ what, values }));
  if (!others.length && !missing.length) return null;
  const told = others.length ? faint(`Rank 0 beside ${others.map((rank) => `rank ${rank}`).join(", ")}.`) : null;
  const absent = missing.length ? faint(`Not told by ${missing.map((rank) => `rank ${rank}`).join(", ")}: call explain there too.`) : null;
  const columns = [
    { title: "what", value: (each) => each.what, mono: true },
    ...["0", ...others.map(String)].map((rank) => ({ title: `rank ${rank}`, value: (each) => each.values[rank] ?? "", mono: true })),
  ];
  const same = others.length && !differences.length ? faint("They compiled the same.") : null;
  return section("ranks", "Ranks", told, absent, same, differences.length ? table("What differs", columns, differences) : null);
}

// -------------------------------------------------------------------------------------------- the page

function show(program) {
  const graph = graphSection(program);
  const sections = [
    stagesSection(program), factsSection(program), tensorsSection(program), graph.section, savedSection(program, graph.reveal),
    collectivesSection(program, graph.reveal), kernelsSection(program), wrapperSection(program), ranksSection(program),
  ].filter(Boolean);
  document.querySelector("main").replaceChildren(figures(program), ...sections);
  const links = sections.map((each) => element("a", { href: `#${each.id}` }, each.id));
  document.querySelector("header nav").replaceChildren(...links);
}

const programChoice = document.getElementById("program");
programChoice.append(...programs.map((program, at) => element("option", { value: at }, `${program.name} (${program.kind})`)));
programChoice.addEventListener("change", () => show(programs[programChoice.value]));

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, select")) return;
  event.preventDefault();
  document.getElementById("search").focus();
});

const schemeButton = document.getElementById("scheme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (prefersDark.matches ? "dark" : "light")) === "dark";
const nameScheme = () => (schemeButton.textContent = isDark() ? "Light" : "Dark");
schemeButton.addEventListener("click", () => {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  nameScheme();
});
prefersDark.addEventListener("change", nameScheme);
nameScheme();

if (programs.length) show(programs[0]);
else document.querySelector("main").append(faint("Nothing is compiled yet: call the model once."));
