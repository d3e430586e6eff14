// The page of `brick look --training`: curves in small charts, refreshed where it is served.
for (const name of Object.keys(PANELS)) delete PANELS[name];
PANELS.training = trainingPanel;
const DASHES = ["", "7 4", "2 4", "9 3 2 3", "1 3", "12 5"];
const short = (v) => (v === 0 ? "0" : Math.abs(v) < 0.001 || Math.abs(v) >= 1e5 ? v.toExponential(0).replace("e+", "e") : String(Number(v.toPrecision(3))));

function trainingPanel() {
  const charts = el("div", { class: "charts" });
  for (const chart of DATA.charts) charts.append(chartCard(chart));
  if (!DATA.charts.length) charts.append(el("p", { class: "quiet" }, t("empty")));
  const panel = el("div", {}, charts);
  if (DATA.missing.length) panel.append(el("p", { class: "quiet section" }, t("missing") + " " + DATA.missing.map(t).join(", ")));
  return panel;
}
function chartCard(chart) {
  const inside = main.clientWidth, columns = Math.max(1, Math.floor((inside + 18) / 478));  // as the style sheet has them
  const width = Math.max(220, (inside - 18 * (columns - 1)) / columns - (innerWidth > 820 ? 46 : 30)), height = 236, left = 52, right = 12, top = 10, bottom = 32;
  const points = chart.series.flatMap((s) => s.y);
  let low = Math.min(...points), high = Math.max(...points);
  const log = low > 0 && high / low > 20 && chart.key !== "exact";
  if (chart.key === "exact") [low, high] = [0, 1];
  if (!log && chart.key !== "exact" && low > 0 && low < 0.5 * high) low = 0;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5 * Math.abs(low) - 1e-9, high + 0.5 * Math.abs(high) + 1e-9];
  const at = log ? Math.log : (v) => v;
  const last = Math.max(1, DATA.steps_asked, ...chart.series.flatMap((s) => s.x));
  const x = (v) => left + ((width - left - right) * v) / last;
  const y = (v) => height - bottom - ((height - top - bottom) * (at(v) - at(low))) / (at(high) - at(low));
  const drawing = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const ticks = log ? logTicks(low, high) : niceTicks(low, high);
  for (const v of ticks) {
    drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
    drawing.append(svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, chart.key === "exact" ? Math.round(100 * v) + " %" : short(v)));
  }
  const marks = niceTicks(0, last);
  marks.forEach((v, i) => drawing.append(svg("text", { x: x(v), y: height - 11, "text-anchor": "middle" }, (i ? "" : t("step_axis") + " ") + short(v))));
  const said = [], keys = el("div", { class: "keys" });
  chart.series.forEach((s, i) => {
    const name = ["train", "val"].includes(s.name) ? t(s.name) : s.name, end = s.y[s.y.length - 1];
    const many = chart.series.length > 1;
    const line = svg("polyline", { class: "curve" + (s.name === "train" ? " thin" : ""), points: s.x.map((v, k) => x(v).toFixed(1) + "," + y(s.y[k]).toFixed(1)).join(" ") });
    const rank = s.name === "train" ? 0 : i - (chart.series[0].name === "train" ? 1 : 0);
    const opacity = s.name === "train" ? 0.55 : Math.max(0.3, 1 - 0.75 * Math.floor(rank / DASHES.length) / 3 - (many && chart.series.length > 3 ? 0.1 * (rank % DASHES.length) : 0));
    line.setAttribute("stroke-dasharray", s.name === "train" ? "" : DASHES[rank % DASHES.length]);
    line.style.opacity = opacity;
    line.append(svg("title", {}, name));
    drawing.append(line);
    if (s.x.length === 1) drawing.append(svg("circle", { class: "dot", cx: x(s.x[0]), cy: y(s.y[0]), r: 3 }));
    said.push(name + " " + short(end));
    if (many) {
      const sample = svg("svg", { class: "sample", width: 30, height: 8, "aria-hidden": "true" }, line.cloneNode(false));
      sample.firstChild.setAttribute("points", "1,4 29,4");
      keys.append(el("span", {}, sample, name + " " + (chart.key === "exact" ? percent(end) : short(end))));
    }
  });
  const one = chart.series.length === 1 ? chart.series[0].y : null;
  const now = one ? (chart.key === "exact" ? percent(one[one.length - 1]) : short(one[one.length - 1])) : "";
  drawing.setAttribute("aria-label", t(chart.key) + ": " + said.join(", "));
  return el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, t(chart.key)), el("span", { class: "quiet" }, now)), drawing, keys);
}
function niceTicks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-6 ? 0 : v);
  return out;
}
function logTicks(low, high) {
  const all = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) for (const m of [1, 2, 5]) all.push(m * 10 ** p);
  const inside = all.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  const tens = inside.filter((v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9);
  return inside.length > 6 && tens.length > 1 ? tens : inside;
}
if (DATA.live && location.protocol.startsWith("http")) {
  const ask = async () => {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = await answer.json(), changed = fresh.stamp !== DATA.stamp || state.lost;
      state.lost = false;
      if (changed) {
        const before = DATA.about[state.lang];
        Object.assign(DATA, fresh);
        draw();
        // read aloud is that it has ended or stands still, not each number
        if (fresh.about[state.lang].includes(" · ") && fresh.about[state.lang] !== before) say(fresh.about[state.lang]);
      }
    } catch {  // nobody serves it, or the run is gone: said, and asked again
      if (!state.lost) { state.lost = true; draw(); say(t("stopped")); }
    }
    setTimeout(ask, 2000);
  };
  setTimeout(ask, 2000);
}
