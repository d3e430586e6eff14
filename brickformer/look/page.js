"use strict";
// The page of `brick look`. Data comes from the script element "data"; texts reach the document as text, never as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const WORDS = {
  en: {
    attention: "Attention", steps: "Writing", heads: "Heads", layers: "Layers", light: "Light", dark: "Dark", other: "中文",
    heat: "Heat map", lines: "Lines", head: "head", layer: "layer", table: "As a table", keys: "Keys",
    looks: "looks at", row: "Token", elsewhere: "not shown", nothing: "nothing", of: "of",
    entropy: "entropy", distance: "distance", first: "first token", previous: "previous", same_token: "same token",
    diagonal: "diagonal", anti: "mirrored", removed: "when removed", nats: "nats", step_axis: "step",
    dead: "Removed alone, these change next to nothing", live: "Removed alone, all but these change next to nothing", alike: "look at the same", colon: ": ", source: "source", target: "text",
    written: "written", cache: "Cache", slots: "slots", candidates: "What was probable", step: "Step",
    bytes: "bytes", given: "given", kl: "to go (nats)",
    lens: "What each layer would answer, were it the last. The stronger the colour, the surer.",
    embedding: "embedding", idle: "removed alone, it changes next to nothing", marked: "a dot marks heads that change next to nothing when removed alone",
    acts: "removed alone, it changes the answer", marked_live: "a dot marks the heads that change something when removed alone; all others change next to nothing",
    what_attention: "attention weights", what_hidden: "hidden attention of a recurrence", what_gradient: "influence of each input",
    note_hidden: "No attention here: shown is how much each earlier token counts in the sum (arXiv 2403.01590).",
    note_gradient: "No attention here: shown is how strongly each input moves each output.",
    help: "on the map: arrows choose a row and a key, Home and End the first and last row, [ and ] the head, { and } the layer, v the view; among the small maps: arrows",
    thin: "lines below 4 % are not drawn",
    self: "self-attention", cross: "cross-attention", mixer: "mixer", encoder: "Encoder", decoder: "Decoder",
    heads_about: "Means over the tokens shown. Click a row to see the map, a heading to sort.",
    loss: "Loss", exact: "Exact match", lr: "Learning rate", grad_norm: "Gradient norm", update: "Update to weight, by group",
    att_entropy: "Attention entropy, by layer", speed: "Tokens a second", train: "training", val: "validation",
    stopped: "no longer refreshed: the server or the run is gone", empty: "No numbers yet.",
    missing: "Not recorded by this run:",
  },
  zh: {
    attention: "注意力", steps: "逐步生成", heads: "注意力头", layers: "各层预测", light: "浅色", dark: "深色", other: "English",
    heat: "热力图", lines: "连线图", head: "头", layer: "层", table: "以表格查看", keys: "快捷键",
    looks: "关注", row: "词元", elsewhere: "未显示部分", nothing: "无", of: "/",
    entropy: "熵", distance: "距离", first: "首词元", previous: "前一词元", same_token: "相同词元",
    diagonal: "对角线", anti: "反对角线", removed: "移除后影响", nats: "奈特", step_axis: "步",
    dead: "单独移除后几乎没有影响的头", live: "单独移除后，只有这些头会有影响", alike: "关注相同位置", colon: "：", source: "源端", target: "文本",
    written: "已生成", cache: "缓存", slots: "槽位", candidates: "当时的概率", step: "第",
    bytes: "字节", given: "给定", kl: "差距（奈特）",
    lens: "假如该层就是最后一层，它会回答什么。颜色越浓越有把握。",
    embedding: "嵌入", idle: "单独移除后几乎没有影响", marked: "圆点表示单独移除后几乎没有影响的头",
    acts: "单独移除后会改变回答", marked_live: "圆点表示单独移除后会有影响的头；其余的头几乎没有影响",
    what_attention: "注意力权重", what_hidden: "循环的隐式注意力", what_gradient: "各输入的影响",
    note_hidden: "此层没有注意力：显示每个更早词元在求和中的分量（arXiv 2403.01590）。",
    note_gradient: "此层没有注意力：显示每个输入对每个输出的影响强度。",
    help: "在图上：方向键选行与列，Home 和 End 到首行与末行，[ 和 ] 换头，{ 和 } 换层，v 切换视图；在小图间：方向键",
    thin: "低于 4 % 的连线未画出",
    self: "自注意力", cross: "交叉注意力", mixer: "混合层", encoder: "编码器", decoder: "解码器",
    heads_about: "对所示词元取平均。点击行查看图，点击表头排序。",
    loss: "损失", exact: "完全匹配", lr: "学习率", grad_norm: "梯度范数", update: "更新量与权重之比（按组）",
    att_entropy: "各层注意力熵", speed: "每秒词元数", train: "训练", val: "验证",
    stopped: "已停止刷新：服务或运行已不在", empty: "还没有数据。",
    missing: "此次运行未记录：",
  },
};
const STATS = ["entropy", "distance", "first", "previous", "same_token", "diagonal", "anti", "removed"];
const state = { tab: "", map: 0, head: 0, row: 0, key: -1, view: "heat", step: 0, lang: "en", theme: "", sort: "", down: true, table: false, lost: false };
const t = (key) => WORDS[state.lang][key] ?? key;
const root = document.documentElement, main = document.getElementById("main");

function made(node, attributes = {}, ...children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null));
  return node;
}
const el = (tag, ...rest) => made(document.createElement(tag), ...rest);
const svg = (tag, ...rest) => made(document.createElementNS("http://www.w3.org/2000/svg", tag), ...rest);
const bdi = (text, attributes = {}) => el("bdi", attributes, text);
const percent = (w) => w > 0 && w < 0.0005 ? "< 0.1 %" : (w >= 0.0995 || w === 0 ? Math.round(100 * w) : (100 * w).toFixed(1)) + " %";
const dark = () => root.dataset.theme === "dark";
function say(text) { document.getElementById("reading").textContent = text; }

// ---- maps

function unpack(map) {
  if (map.w) return map.w;
  const text = atob(map.data), n = map.heads.length * map.T * map.S, w = new Float32Array(n);
  if (map.bits === 16) for (let i = 0; i < n; i++) w[i] = (text.charCodeAt(2 * i) + 256 * text.charCodeAt(2 * i + 1)) / 65535;
  else for (let i = 0; i < n; i++) w[i] = (text.charCodeAt(i) / 255) ** 2;
  return (map.w = w);
}
const weight = (map, head, i, j) => unpack(map)[(head * map.T + i) * map.S + j];
const texts = (side) => (side === "source" ? DATA.source : DATA.labels);
const rowText = (map, i) => texts(map.side)[map.row0 + i] ?? String(map.row0 + i);
const keyText = (map, j) => texts(map.key_side)[map.key0 + j] ?? String(map.key0 + j);
function title(map) {
  const layer = /layers\.(\d+)/.exec(map.name);
  const where = map.name.startsWith("encoder.") ? t("encoder") + " · " : map.name.startsWith("decoder.") ? t("decoder") + " · " : "";
  if (!layer || DATA.foreign) return map.name;
  const turn = / \((\d+) of/.exec(map.name);
  const inner = map.what === "attention" ? t(map.kind) : t("mixer");
  return where + t("layer") + " " + (Number(layer[1]) + 1) + (turn ? " (" + turn[1] + ")" : "") + " · " + inner;
}
function tone(w) { return Math.pow(Math.min(1, Math.max(0, w)), 0.7); }
function full(map, head) {
  // The weight with the full colour. Where many keys share a row all would be pale: one and a half times the middle row's largest.
  if (map.S <= 60) return 1;
  map.full ??= [];
  if (map.full[head]) return map.full[head];
  const w = unpack(map), most = [];
  for (let i = 0; i < map.T; i++) {
    let top = 0;
    for (let j = 0, at = (head * map.T + i) * map.S; j < map.S; j++) top = Math.max(top, w[at + j]);
    most.push(top);
  }
  return (map.full[head] = Math.min(1, Math.max(0.01, 1.5 * most.sort((x, y) => x - y)[map.T >> 1])));
}
function paint(canvas, map, head, side = 1e9) {
  // side: pixels at most; the largest weight of those that share one is shown, not whichever is nearest
  const step = Math.ceil(Math.max(map.T, map.S) / side), most = full(map, head), w = unpack(map), [r, g, b] = dark() ? [127, 178, 234] : [31, 95, 168];
  canvas.width = Math.ceil(map.S / step); canvas.height = Math.ceil(map.T / step);
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let i = 0, from = head * map.T * map.S; i < map.T; i++) for (let j = 0; j < map.S; j++, from++) {
    const at = 4 * (Math.floor(i / step) * canvas.width + Math.floor(j / step));
    image.data[at] = r; image.data[at + 1] = g; image.data[at + 2] = b;
    image.data[at + 3] = Math.max(image.data[at + 3], Math.round(255 * tone(w[from] / most)));
  }
  context.putImageData(image, 0, 0);
}

function attentionPanel() {
  const picker = el("aside", { class: "picker", id: "picker", "aria-label": t("heads"), onkeydown: onPick });
  DATA.maps.forEach((map, m) => {
    const thumbs = el("div", { class: "thumbs" });
    map.heads.forEach((label, h) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      paint(canvas, map, h, 96);
      const marked = DATA.marked.some(([a, b]) => a === m && b === h);
      const said = [title(map), t("head") + " " + label, ...(marked ? [t(DATA.idle ? "idle" : "acts")] : [])];
      thumbs.append(el("button", {
        type: "button", class: "thumb" + (marked ? DATA.idle ? " dead" : " live" : ""), title: said.join(" · "), "aria-label": said.join(", "),
        onclick: () => choose({ map: m, head: h }), "data-place": m + "." + h,
      }, canvas));
    });
    picker.append(el("div", { class: "layer" }, el("h3", {}, title(map)), thumbs));
  });
  if (DATA.marked.length) picker.append(el("p", { class: "quiet small" }, t(DATA.idle ? "marked" : "marked_live")));
  const stage = el("div", { id: "stage" });
  return el("div", { class: "columns" }, picker, stage);
}
function markThumb() {
  for (const b of document.querySelectorAll(".thumb")) {
    const on = b.dataset.place === state.map + "." + state.head;
    b.setAttribute("aria-pressed", String(on));
    b.tabIndex = on ? 0 : -1;  // one stop for the tab key, arrows among them
    if (!on) continue;
    const picker = document.getElementById("picker"), box = picker.getBoundingClientRect(), own = b.getBoundingClientRect();
    if (own.top < box.top || own.bottom > box.bottom) picker.scrollTop += own.top - box.top - (box.height - own.height) / 2;
  }
}
function onPick(event) {
  const turn = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!turn) return;
  let map = state.map + turn[0], head = state.head + turn[1];
  if (DATA.maps[map] && !turn[0] && (head < 0 || head >= DATA.maps[map].heads.length)) {
    map += turn[1];
    head = turn[1] > 0 ? 0 : 1e9;
  }
  event.preventDefault();
  if (!DATA.maps[map]) return;
  choose({ map, head: Math.min(head, DATA.maps[map].heads.length - 1) });
  document.querySelector('.thumb[aria-pressed="true"]')?.focus();
}
function drawStage() {
  const stage = document.getElementById("stage");
  if (!stage) return;
  markThumb();
  const map = DATA.maps[state.map];
  state.row = Math.min(Math.max(0, state.row), map.T - 1);
  const views = el("div", { class: "segments", role: "group", "aria-label": t("heat") + " / " + t("lines") });
  for (const view of ["heat", "lines"])
    views.append(el("button", {
      type: "button", "data-view": view, "aria-pressed": String(state.view === view),
      onclick: () => { choose({ view }); document.querySelector(`[data-view="${view}"]`).focus(); },
    }, t(view)));
  const figure = state.view === "heat" ? heat(map) : lines(map);
  const box = el("div", { class: "pair" }, el("div", { class: "scroll" }, figure), el("div", { id: "rowcard", class: "row" }));
  const card = el("section", { class: "card" },
    el("div", { class: "head" }, el("h2", { id: "maptitle" }, title(map) + " · " + t("head") + " " + map.heads[state.head]), views),
    el("p", { class: "quiet" }, map.what === "attention" ? verdict(map) : t("note_" + map.what)), box,
    el("div", { class: "legend" }, el("span", {}, "0"), el("span", { class: "ramp" }), el("span", {}, (full(map, state.head) < 1 ? "≥ " : "") + percent(full(map, state.head))), el("span", {}, "· " + t("what_" + map.what) + (state.view === "lines" ? " · " + t("thin") : ""))),
    asTable(map));
  const facts = el("dl", { class: "facts" });
  for (const name of STATS) {
    const value = map.stats[state.head][name];
    if (value !== null) facts.append(el("div", {}, el("dt", {}, headed(name)), el("dd", {}, shown(name, value))));
  }
  const help = el("details", {}, el("summary", {}, t("keys")), el("p", { class: "quiet", id: "help" }, t("help")));
  stage.replaceChildren(card, el("section", { class: "card" }, facts, help));
  drawRow();
  const inner = figure.parentElement, line = figure.querySelector(`[data-row="${state.row}"]`) ?? document.getElementById("frame");
  if (inner.scrollHeight > inner.clientHeight) inner.scrollTop += line.getBoundingClientRect().top - inner.getBoundingClientRect().top - 0.7 * inner.clientHeight;
}
const headed = (name) => t(name) + (name === "removed" && DATA.logits ? " (" + t("nats") + ")" : "");
function shown(name, value) {
  if (name === "entropy") return value.toFixed(2);
  if (name === "distance") return value.toFixed(1);
  if (name === "removed") return value < 1e-6 ? "0" : value < 0.001 ? value.toExponential(0).replace("e-", " · 10⁻").replace(/\d$/, (d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]) : value.toPrecision(2);
  return percent(value);
}
function verdict(map) {
  const stats = map.stats[state.head];
  const best = ["first", "previous", "same_token", "diagonal", "anti"].filter((n) => stats[n] !== null).sort((a, b) => stats[b] - stats[a])[0];
  return best ? t(best) + " " + percent(stats[best]) + " · " + t("entropy") + " " + stats.entropy.toFixed(2) : "";
}
const wide = (text) => [...text].reduce((n, c) => n + (c > "\u2e80" ? 1.7 : 1), 0);  // in letters: Chinese takes more
function room() { return Math.max(240, (document.getElementById("stage")?.clientWidth ?? 800) - 50); }

function heat(map) {
  const widest = (n, text) => Math.max(...Array.from({ length: Math.min(n, 400) }, (_, i) => Math.min(14, wide(text(map, i)))), 1);
  const left = Math.round(18 + 7.7 * widest(map.T, rowText)), above = Math.round(16 + 6.6 * widest(map.S, keyText)), right = Math.round(above * 0.6);
  const cell = Math.max(map.S > 60 ? 5 : 13, Math.min(44, Math.floor((room() - left - right) / map.S)));
  const every = Math.ceil(14 / cell);
  const figure = el("div", {
    class: "figure", id: "figure", tabindex: "0", role: "application", "aria-roledescription": t("heat"),
    "aria-label": title(map) + ", " + t("head") + " " + map.heads[state.head], "aria-describedby": "help", onkeydown: onKey,
  });
  figure.style.width = left + cell * map.S + right + "px"; figure.style.height = above + cell * map.T + 2 + "px";
  const canvas = el("canvas", { "aria-hidden": "true" });
  paint(canvas, map, state.head);
  Object.assign(canvas.style, { left: left + "px", top: above + "px", width: cell * map.S + "px", height: cell * map.T + "px", background: "var(--faint)" });
  const tops = el("div", { class: "tops" }), lefts = el("div", { class: "lefts" });  // they stay where the map is scrolled
  tops.style.height = above + "px"; lefts.style.height = cell * map.T + "px"; lefts.style.width = left - 4 + "px";
  figure.append(canvas, tops, lefts);
  for (let i = 0; i < map.T; i += every) {
    const label = bdi(rowText(map, i), { class: "label", "data-row": i, title: rowText(map, i) });
    Object.assign(label.style, { left: "0", width: left - 8 + "px", top: cell * (i + 0.5) - 6 + "px", textAlign: "right" });
    lefts.append(label);
  }
  for (let j = 0; j < map.S; j += every) {
    const label = bdi(keyText(map, j), { class: "label top-label", "data-key": j, title: keyText(map, j) });
    Object.assign(label.style, { left: left + cell * (j + 0.5) + 4 + "px", bottom: "4px" });
    tops.append(label);
  }
  const turns = dark() ? 0.6 : 0.8;  // where light digits read better than dark ones
  if (cell >= 30) for (let i = 0; i < map.T; i++) for (let j = 0; j < map.S; j++) {
    const w = weight(map, state.head, i, j);
    if (w < 0.005) continue;
    const number = el("span", { class: "number", "aria-hidden": "true" }, String(Math.round(100 * w)));
    Object.assign(number.style, { left: left + cell * j + "px", top: above + cell * (i + 0.5) - 5.5 + "px", width: cell + "px", color: tone(w) > turns ? "var(--on-accent)" : "var(--ink)" });
    figure.append(number);
  }
  const frame = el("div", { class: "frame", id: "frame" });
  figure.append(frame);
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [Math.floor((event.clientY - box.top) / cell), Math.floor((event.clientX - box.left) / cell)];
  };
  const point = (event) => {
    const [i, j] = at(event);
    if (i >= 0 && i < map.T && (i !== state.row || j !== state.key)) { state.row = i; state.key = j >= 0 && j < map.S ? j : -1; drawRow(); }
  };
  for (const kind of ["pointermove", "pointerdown"]) figure.addEventListener(kind, point);  // a finger only taps
  figure.geometry = { left, above, cell };
  return figure;
}

function lines(map) {
  const step = 24, height = step * Math.max(map.T, map.S) + 12, width = Math.min(room(), 620), most = width < 500 ? 9 : 14;
  const clip = (text) => ([...text].length > most ? [...text].slice(0, most - 1).join("") + "…" : text);
  const side = (n, text) => 16 + 8 * Math.max(1, ...Array.from({ length: n }, (_, i) => wide(clip(text(map, i)))));
  const a = side(map.T, rowText), b = width - side(map.S, keyText), bend = Math.max(10, 0.4 * (b - a));
  const drawing = svg("svg", {
    class: "lines", id: "figure", width, height, tabindex: "0", role: "application", "aria-roledescription": t("lines"),
    "aria-label": title(map) + ", " + t("head") + " " + map.heads[state.head], "aria-describedby": "help",
  });
  drawing.addEventListener("keydown", onKey);
  const y = (i) => step * i + 18;
  const paths = svg("g", {}), words = svg("g", {});
  for (let i = 0; i < map.T; i++) for (let j = 0; j < map.S; j++) {
    const w = weight(map, state.head, i, j);
    if (w < 0.04) continue;
    const line = svg("path", { d: `M${a},${y(i)} C${a + bend},${y(i)} ${b - bend},${y(j)} ${b},${y(j)}`, "stroke-width": (0.6 + 4.4 * w).toFixed(2), "data-row": i });
    line.style.opacity = 0.15 + 0.6 * w;
    line.weight = w;
    paths.append(line);
  }
  for (let i = 0; i < map.T; i++) {
    const word = svg("text", { x: a - 10, y: y(i) + 4, "text-anchor": "end", "data-row": i }, clip(rowText(map, i)));
    word.addEventListener("pointerenter", () => { state.row = i; state.key = -1; drawRow(); });
    words.append(word);
  }
  for (let j = 0; j < map.S; j++) words.append(svg("text", { x: b + 10, y: y(j) + 4, "data-key": j }, clip(keyText(map, j))));
  drawing.append(paths, words);
  const point = (event) => {
    const box = drawing.getBoundingClientRect(), i = Math.round((event.clientY - box.top - 18) / step);
    if (event.clientX - box.left < a + 20 && i >= 0 && i < map.T && i !== state.row) { state.row = i; state.key = -1; drawRow(); }
  };
  for (const kind of ["pointermove", "pointerdown"]) drawing.addEventListener(kind, point);
  return drawing;
}

function drawRow() {
  const map = DATA.maps[state.map], card = document.getElementById("rowcard"), figure = document.getElementById("figure");
  if (!card || !figure) return;
  const row = Array.from({ length: map.S }, (_, j) => [weight(map, state.head, state.row, j), j]);
  const best = row.filter(([w]) => w >= 0.001).sort((x, y) => y[0] - x[0]).slice(0, 8);
  const rest = Math.max(0, 1 - row.reduce((sum, [w]) => sum + w, 0));
  const bars = el("div", { class: "bars" });
  const bar = (name, w) => {
    const fill = el("i");
    fill.style.width = 100 * Math.min(1, w) + "%";
    bars.append(name, el("span", { class: "bar" }, fill), el("span", { class: "value" }, percent(w)));
  };
  for (const [w, j] of best) bar(bdi(keyText(map, j), { class: "token", title: "#" + (map.key0 + j) }), w);
  if (rest > 0.01 && map.what === "attention") bar(el("span", { class: "quiet" }, t("elsewhere")), rest);
  const place = map.row0 + state.row;
  card.replaceChildren(el("div", { class: "head" }, el("h2", {}, bdi(rowText(map, state.row), { class: "mono" }), " " + t("looks")),
    el("span", { class: "quiet" }, "#" + (place + 1) + " " + (DATA.written !== null && map.side === "target" ? (place >= DATA.written ? t("written") : t("given")) : ""))), bars);
  for (const node of figure.querySelectorAll("[data-row], [data-key]")) {
    const on = node.dataset.row !== undefined ? Number(node.dataset.row) === state.row : Number(node.dataset.key) === state.key || best.some(([w, j]) => w > 0.2 && j === Number(node.dataset.key));
    node.classList.toggle("on", on);
    if (node.tagName === "path") node.style.opacity = Number(node.dataset.row) === state.row ? Math.min(1, 0.35 + node.weight) : 0.1 + 0.25 * node.weight;
  }
  const frame = document.getElementById("frame");
  if (frame) {
    const { left, above, cell } = figure.geometry;
    const one = state.key >= 0;
    Object.assign(frame.style, { left: left + (one ? cell * state.key : 0) - 1.5 + "px", top: above + cell * state.row - 1.5 + "px", width: (one ? cell : cell * map.S) + 3 + "px", height: cell + 3 + "px" });
  }
  const heard = state.key >= 0 ? keyText(map, state.key) + " " + percent(weight(map, state.head, state.row, state.key)) : best.slice(0, 3).map(([w, j]) => keyText(map, j) + " " + percent(w)).join(", ") || t("nothing");
  say(title(map) + ", " + t("head") + " " + map.heads[state.head] + ". " + t("row") + " " + (place + 1) + " " + rowText(map, state.row) + " " + t("looks") + ": " + heard);
}

function asTable(map) {
  if (map.T * map.S > 2500) return null;
  const details = el("details", { open: state.table }, el("summary", {}, t("table")));
  details.addEventListener("toggle", () => {
    state.table = details.open;
    if (!details.open || details.querySelector("table")) return;
    const headRow = el("tr", {}, el("th", {}));
    for (let j = 0; j < map.S; j++) headRow.append(el("th", { class: "token", scope: "col" }, bdi(keyText(map, j))));
    const body = el("tbody");
    for (let i = 0; i < map.T; i++) {
      const line = el("tr", {}, el("th", { scope: "row", class: "token" }, bdi(rowText(map, i))));
      for (let j = 0; j < map.S; j++) line.append(el("td", {}, percent(weight(map, state.head, i, j))));
      body.append(line);
    }
    details.append(el("div", { class: "tablebox" }, el("table", {}, el("thead", {}, headRow), body)));
  });
  return details;
}

function onKey(event) {
  const map = DATA.maps[state.map], key = event.key;
  const move = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[key];
  if (move) {
    state.row = Math.min(map.T - 1, Math.max(0, state.row + move[0]));
    state.key = move[1] ? Math.min(map.S - 1, Math.max(-1, state.key + move[1])) : state.key;
    drawRow();
    follow();
  } else if (key === "Home" || key === "End") {
    state.row = key === "Home" ? 0 : map.T - 1;
    drawRow();
    follow();
  } else if (key === "[" || key === "]") choose({ head: (state.head + (key === "]" ? 1 : map.heads.length - 1)) % map.heads.length });
  else if (key === "{" || key === "}") choose({ map: (state.map + (key === "}" ? 1 : DATA.maps.length - 1)) % DATA.maps.length, head: 0 });
  else if (key === "v") choose({ view: state.view === "heat" ? "lines" : "heat" });
  else return;
  event.preventDefault();
  document.getElementById("figure")?.focus();
}
function follow() {
  const figure = document.getElementById("figure"), box = figure.parentElement.getBoundingClientRect();
  const own = (document.getElementById("frame") ?? figure.querySelector(`text[data-row="${state.row}"]`)).getBoundingClientRect();
  const { left, above } = figure.geometry ?? { left: 0, above: 20 };
  if (own.bottom > box.bottom) figure.parentElement.scrollTop += own.bottom - box.bottom + 8;
  if (own.top < box.top + above) figure.parentElement.scrollTop += own.top - box.top - above - 8;
  if (state.key < 0) return;
  if (own.right > box.right) figure.parentElement.scrollLeft += own.right - box.right + 8;
  if (own.left < box.left + left) figure.parentElement.scrollLeft += own.left - box.left - left - 8;
}
function choose(change) { Object.assign(state, { key: -1 }, change); drawStage(); }

// ---- heads

function headsPanel() {
  const rows = [];
  DATA.maps.forEach((map, m) => map.heads.forEach((label, h) => rows.push({ m, h, name: title(map) + " · " + label, stats: map.stats[h] })));
  if (state.sort) rows.sort((a, b) => ((a.stats[state.sort] ?? -1) - (b.stats[state.sort] ?? -1)) * (state.down ? -1 : 1));
  const names = STATS.filter((n) => rows.some((r) => r.stats[n] !== null));
  const header = el("tr", {}, el("th", { scope: "col" }, t("head")));
  for (const name of names) {
    const sorted = state.sort === name ? (state.down ? "descending" : "ascending") : null;
    const sort = () => { state.down = state.sort === name ? !state.down : true; state.sort = name; draw(); document.getElementById("sort-" + name).focus(); };
    header.append(el("th", { scope: "col", "aria-sort": sorted }, el("button", { type: "button", id: "sort-" + name, onclick: sort }, headed(name))));
  }
  const top = Math.max(...rows.map((r) => r.stats.removed ?? 0), 1e-9);
  const body = el("tbody");
  for (const r of rows.slice(0, 1500)) {
    const go = () => { state.tab = "attention"; Object.assign(state, { map: r.m, head: r.h, key: -1 }); draw(); document.getElementById("figure").focus({ preventScroll: true }); scrollTo(0, 0); };
    const line = el("tr", { class: "pick", onclick: go }, el("th", { scope: "row" }, el("button", { type: "button", class: "plain" }, r.name)));
    for (const name of names) {
      const value = r.stats[name], td = el("td", {}, value === null ? "–" : shown(name, value));
      const share = value === null || name === "entropy" || name === "distance" ? 0 : name === "removed" ? value / top : value;
      td.style.background = share > 0.02 ? `rgba(var(--rgb), ${(0.42 * share).toFixed(3)})` : "";
      line.append(td);
    }
    body.append(line);
  }
  const said = el("ul", { class: "said" });
  const noted = DATA.maps.map((map, m) => [title(map), DATA.marked.filter(([i]) => i === m).map(([, h]) => map.heads[h])]).filter(([, heads]) => heads.length);
  if (noted.length) said.append(el("li", {}, t(DATA.idle ? "dead" : "live") + t("colon").trim(), el("ul", {}, ...noted.slice(0, 40).map(([map, heads]) => el("li", {}, map + " · " + t("head") + " " + heads.join(", "))))));
  DATA.maps.forEach((map, m) => map.alike.slice(0, 20).forEach(([a, b]) => said.append(el("li", {}, title(map) + " · " + t("head") + " " + map.heads[a] + ", " + map.heads[b] + t("colon") + t("alike")))));
  return el("section", { class: "card" }, said.childElementCount ? said : null, el("p", { class: "quiet" }, t("heads_about")), el("div", { class: "tablebox" }, el("table", {}, el("thead", {}, header), body)));
}

// ---- steps

function stepsPanel() {
  const panel = el("section", { class: "card" });
  const range = el("input", { type: "range", min: 1, max: DATA.steps.length, value: state.step + 1, "aria-label": t("step"), oninput: () => { state.step = Number(range.value) - 1; fill(); } });
  const body = el("div");
  const place = el("span", { class: "quiet" });
  panel.append(el("div", { class: "slider" }, range, place), body);
  function fill() {
    const step = DATA.steps[state.step], first = DATA.written, shownFrom = Math.max(0, first + DATA.step0 + state.step - 120);
    range.setAttribute("aria-valuetext", t("step") + " " + (state.step + 1) + ": " + step.text);
    place.textContent = state.step + 1 + " " + t("of") + " " + DATA.steps.length;
    const chips = el("div", { class: "chips" });
    const all = DATA.labels.slice(shownFrom, first + DATA.step0 + DATA.steps.length + 1).slice(0, 240);
    const texts = [...all, ...(DATA.labels.length < first + DATA.step0 + DATA.steps.length && all.length < 240 ? [DATA.steps[DATA.steps.length - 1].text] : [])];  // written, not read
    const now = first + DATA.step0 + state.step - shownFrom;
    texts.forEach((text, i) => chips.append(bdi(text, { class: "chip" + (i === now ? " now" : i > now ? " later" : "") })));
    const bars = el("div", { class: "bars" });
    for (const [text, p, chosen] of step.top) {
      const fillBar = el("i");
      fillBar.style.width = 100 * p + "%";
      bars.append(bdi(text, { class: "token" }), el("span", { class: "bar" }, fillBar), el("span", { class: "value" }, percent(p) + (chosen ? " ✓" : "")));
    }
    const slots = el("div", { class: "slots", role: "img", "aria-label": t("cache") + " " + step.length + " " + t("of") + " " + step.slots });
    const before = state.step ? DATA.steps[state.step - 1].length : 0;
    if (step.slots <= 600) for (let i = 0; i < step.slots; i++) slots.append(el("i", { class: i >= step.length ? "" : i >= before ? "new" : "full" }));
    body.replaceChildren(chips, el("h3", { class: "section" }, t("candidates")), bars, el("div", { class: "head section" }, el("h3", {}, t("cache")), el("span", { class: "quiet" },
      step.length + " " + t("of") + " " + step.slots + " " + t("slots") + " · " + step.nbytes.toLocaleString("en") + " " + t("bytes"))), slots);
    say(t("step") + " " + (state.step + 1) + ": " + step.text + ". " + t("cache") + " " + step.length + " " + t("of") + " " + step.slots);
  }
  fill();
  return panel;
}

// ---- layers

function layersPanel() {
  const { names, cells, kl, row0 } = DATA.lens;
  const header = el("tr", {}, el("td", {}, ""));
  const count = cells[0].length;
  for (let i = 0; i < count; i++) header.append(el("th", { class: "token", scope: "col" }, bdi(DATA.labels[row0 + i] ?? "")));
  header.append(el("th", { scope: "col" }, t("kl")));
  const body = el("tbody");
  for (let l = names.length - 1; l >= 0; l--) {
    const [, number, turn] = /^layers\.(\d+)(?: \((\d+) of)?/.exec(names[l]) ?? [];
    const called = number === undefined ? t("embedding") : t("layer") + " " + (Number(number) + 1) + (turn ? " (" + turn + ")" : "");
    const line = el("tr", {}, el("th", { scope: "row" }, called));
    for (let i = 0; i < count; i++) {
      const best = cells[l][i], td = el("td", { class: "token", title: best.map(([text, p]) => text + " " + percent(p)).join("\n") }, bdi(best[0][0]));
      td.style.background = `rgba(var(--rgb), ${(0.62 * best[0][1]).toFixed(3)})`;
      line.append(td);
    }
    line.append(el("td", {}, kl[l].toFixed(3)));
    body.append(line);
  }
  return el("section", { class: "card" }, el("p", { class: "quiet" }, t("lens")), el("div", { class: "tablebox" }, el("table", {}, el("thead", {}, header), body)));
}

// ---- the page

const PANELS = { attention: attentionPanel, steps: stepsPanel, heads: headsPanel, layers: layersPanel };
function tabs() { return Object.keys(PANELS).filter((n) => n !== "steps" || DATA.steps.length).filter((n) => n !== "layers" || DATA.lens); }
function draw() {
  root.lang = state.lang === "zh" ? "zh-Hans" : "en";
  document.getElementById("title").textContent = DATA.title;
  document.getElementById("about").textContent = DATA.about[state.lang] + (state.lost ? " · " + t("stopped") : "");
  document.getElementById("lang").textContent = t("other");
  document.getElementById("theme").textContent = t(dark() ? "light" : "dark");
  const notes = document.getElementById("notes");
  notes.hidden = DATA.left_out.length === 0;
  notes.replaceChildren(...DATA.left_out.map((pair) => el("p", {}, pair[state.lang])));
  if (!tabs().includes(state.tab)) state.tab = tabs()[0];
  const bar = document.getElementById("tabs");
  bar.replaceChildren(...tabs().map((name) => el("button", {
    type: "button", role: "tab", id: "tab-" + name, "aria-selected": String(name === state.tab), "aria-controls": "main", tabindex: name === state.tab ? "0" : "-1",
    onclick: () => { state.tab = name; draw(); },
    onkeydown: (event) => {
      const all = tabs(), at = all.indexOf(name);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      state.tab = all[(to + all.length) % all.length];
      draw();
      document.getElementById("tab-" + state.tab).focus();
    },
  }, t(name))));
  bar.hidden = tabs().length < 2;
  if (!bar.hidden) made(main, { role: "tabpanel", "aria-labelledby": "tab-" + state.tab });
  main.replaceChildren(PANELS[state.tab]());
  drawStage();
}
function asked() {
  const said = new URLSearchParams(location.hash.slice(1));
  if (WORDS[said.get("lang")]) state.lang = said.get("lang");
  if (["dark", "light"].includes(said.get("theme"))) root.dataset.theme = said.get("theme");
  if (said.get("tab")) state.tab = said.get("tab");
  if (["heat", "lines"].includes(said.get("view"))) state.view = said.get("view");
  const number = (name) => Math.max(0, Math.floor(Number(said.get(name))) || 0);
  for (const name of ["map", "head", "row", "step"]) if (said.get(name) !== null) state[name] = number(name);
  if (!DATA.maps) return;
  if (said.get("map") !== null && said.get("head") === null) state.head = 0;
  state.map = Math.min(state.map, DATA.maps.length - 1);
  state.head = Math.min(state.head, DATA.maps[state.map].heads.length - 1);
  state.step = Math.min(state.step, Math.max(0, DATA.steps.length - 1));
}
function begin() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  state.lang = navigator.language.startsWith("zh") ? "zh" : "en";
  root.dataset.theme = system.matches ? "dark" : "light";
  if (DATA.maps) Object.assign(state, { map: DATA.start[0], head: DATA.start[1], row: 1e9 });
  asked();
  addEventListener("hashchange", () => { asked(); draw(); });
  system.addEventListener("change", (event) => { root.dataset.theme = event.matches ? "dark" : "light"; draw(); });
  document.getElementById("lang").addEventListener("click", () => { state.lang = state.lang === "en" ? "zh" : "en"; draw(); });
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; draw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  draw();
}
