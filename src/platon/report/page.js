"use strict";
// Draws the charts of a report as SVG from the JSON in the page, and again whenever a chart's width changes.

const DATA = JSON.parse(document.getElementById("data").textContent);

function make(name, attributes, parent, text) {
  const svg = ["svg", "g", "path", "line", "text", "rect", "circle", "polygon"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(+value.toPrecision(size >= 1000 ? 6 : 4));
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) found.push(+t.toPrecision(12));
  return found;
}

function decades(low, high, wanted) {
  const step = [1, 2, 5, 10, 20, 50].find((s) => s >= (high - low) / wanted) ?? 100, found = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) found.push(t);
  return found;
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// A tooltip inside its figure, beside the point that it describes, on the side with more room.
function tip(figure) {
  const box = make("div", { class: "tip", role: "status", hidden: "" }, figure);
  return {
    show(x, y, title, lines) {
      box.replaceChildren();
      make("b", {}, box, title);
      for (const [colour, words] of lines) {
        const line = make("div", {}, box);
        if (colour) make("i", { style: `display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.4em;background:${colour}` }, line);
        line.append(words);
      }
      box.hidden = false;
      const wide = figure.clientWidth, right = x > wide / 2;
      box.style.left = right ? "" : `${x + 12}px`;
      box.style.right = right ? `${wide - x + 12}px` : "";
      box.style.top = `${Math.max(0, y)}px`;
    },
    hide() { box.hidden = true; },
  };
}

function place(event, svg) {
  const box = svg.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function redraw(figure, draw) {
  let last = 0;
  const look = () => {
    const wide = Math.floor(figure.clientWidth);
    if (wide && wide !== last) { last = wide; draw(wide); }
  };
  new ResizeObserver(look).observe(figure);
  look();
}

function frame(figure, wide, high, label) {
  figure.querySelector("svg")?.remove();
  const svg = make("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": label, tabindex: "0" });
  figure.prepend(svg);
  return svg;
}

function lineChart(figure, chart) {
  const hidden = new Set(), bubble = tip(figure);
  const legend = make("div", { class: "legend" });
  figure.after(legend);
  chart.lines.forEach((line) => {
    const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
    make("i", { style: `background:${line.colour}` }, button);
    button.append(line.name);
    button.addEventListener("click", () => {
      hidden.has(line.name) ? hidden.delete(line.name) : hidden.add(line.name);
      button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
      draw(Math.floor(figure.clientWidth));
    });
  });
  const at = (x) => (chart.log_x ? Math.log10(x) : x);

  function draw(wide) {
    const high = Math.round(Math.min(330, Math.max(230, wide * 0.58)));
    const svg = frame(figure, wide, high, chart.title);
    const lines = chart.lines.filter((line) => !hidden.has(line.name) && line.points.length);
    if (!lines.length) return;
    const every = lines.flatMap((line) => line.points);
    let low = Math.min(...every.map((p) => p[2] ?? p[1])), top = Math.max(...every.map((p) => p[3] ?? p[1]));
    if (top - low < 1e-9) { low -= 1; top += 1; }
    const room = (top - low) * 0.06;
    low = low >= 0 ? Math.max(0, low - room) : low - room;
    top += room;
    const first = Math.min(...every.map((p) => at(p[0]))), end = Math.max(...every.map((p) => at(p[0])));
    const left = 52, right = wide - 14, upper = 22, lower = high - 40;
    const X = scale(first, end, left + 6, right - 6), Y = scale(low, top, lower, upper);
    for (const t of ticks(low, top, 5)) {
      make("line", { class: "grid", x1: left, x2: right, y1: Y(t), y2: Y(t) }, svg);
      make("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, svg, short(t));
    }
    const across = Math.max(3, Math.floor(wide / 90));
    for (const t of chart.log_x ? decades(first, end, across) : ticks(first, end, across)) {
      make("line", { class: "axis", x1: X(t), x2: X(t), y1: lower, y2: lower + 4 }, svg);
      make("text", { x: X(t), y: lower + 18, "text-anchor": "middle" }, svg, chart.log_x ? `1e${t}` : short(t));
    }
    make("line", { class: "axis", x1: left, x2: right, y1: lower, y2: lower }, svg);
    make("text", { x: (left + right) / 2, y: high - 4, "text-anchor": "middle" }, svg, chart.x);
    make("text", { x: 2, y: 12 }, svg, chart.y);
    for (const line of lines) {
      const banded = line.points.filter((p) => p[2] !== null);
      if (banded.length > 1) {
        const edge = [...banded.map((p) => [X(at(p[0])), Y(p[3])]), ...banded.slice().reverse().map((p) => [X(at(p[0])), Y(p[2])])];
        make("polygon", { points: edge.map((p) => p.join()).join(" "), style: `fill:${line.colour}`, opacity: ".13" }, svg);
      }
      const path = line.points.map((p, i) => `${i ? "L" : "M"}${X(at(p[0])).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
      make("path", { d: path, fill: "none", style: `stroke:${line.colour}`, "stroke-width": 2, "stroke-dasharray": line.dashed ? "6 4" : "none", "stroke-linejoin": "round" }, svg);
      if (line.points.length < 30 && !line.dashed) {
        for (const p of line.points) make("circle", { cx: X(at(p[0])), cy: Y(p[1]), r: 3, style: `fill:${line.colour}` }, svg);
      }
    }
    const rule = make("line", { class: "rule", y1: upper, y2: lower, visibility: "hidden" }, svg);
    const stops = [...new Set(every.map((p) => p[0]))].sort((a, b) => a - b);
    let here = -1;
    const show = (number) => {
      here = number;
      const stop = stops[number], x = X(at(stop));
      rule.setAttribute("x1", x); rule.setAttribute("x2", x); rule.setAttribute("visibility", "visible");
      const words = [];
      for (const line of lines) {
        const p = line.points.reduce((best, q) => (Math.abs(at(q[0]) - at(stop)) < Math.abs(at(best[0]) - at(stop)) ? q : best));
        const near = line.dashed && line.points.length === 2 || Math.abs(X(at(p[0])) - x) < 12;
        if (near) words.push([line.colour, `${line.name}: ${short(p[1])}` + (p[2] === null ? "" : ` ± ${+((p[3] - p[2]) / 2).toPrecision(2)}`), p[1]]);
      }
      words.sort((a, b) => b[2] - a[2]);
      bubble.show(x, upper, `${chart.x.replace(/, %$/, "")} ${short(stop)}`, words);
    };
    const hide = () => { here = -1; rule.setAttribute("visibility", "hidden"); bubble.hide(); };
    const follow = (event) => {
      const x = place(event, svg)[0];
      let best = 0;
      stops.forEach((stop, i) => { if (Math.abs(X(at(stop)) - x) < Math.abs(X(at(stops[best])) - x)) best = i; });
      show(best);
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); show(Math.min(stops.length - 1, Math.max(0, here + step))); }
    });
  }
  redraw(figure, draw);
}

function violinChart(figure, chart) {
  const bubble = tip(figure);
  redraw(figure, (wide) => {
    const each = 200, high = chart.scores.length * each + 34, left = 52, right = wide - 8;
    const svg = frame(figure, wide, high, chart.title);
    const spans = chart.scores.map(([, found]) => found.flatMap((v) => v.outline.map((p) => p[0])));
    const tall = Math.max(...spans.map((s) => (s.length ? Math.max(...s) - Math.min(...s) : 1))) * 1.08;
    chart.scores.forEach(([name, found], row) => {
      if (!found.length) return;
      const upper = row * each + 22, lower = upper + each - 46;
      const middle = (Math.max(...spans[row]) + Math.min(...spans[row])) / 2;
      const Y = scale(middle - tall / 2, middle + tall / 2, lower, upper), gap = (right - left) / found.length;
      make("text", { x: 2, y: upper - 7 }, svg, `log10 ${name}`);
      for (const t of decades(middle - tall / 2, middle + tall / 2, 5)) {
        make("line", { class: "grid", x1: left, x2: right, y1: Y(t), y2: Y(t) }, svg);
        make("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, svg, String(t));
      }
      found.forEach((violin, number) => {
        const x = left + gap * (number + 0.5), half = gap * 0.44, outline = violin.outline;
        const edge = [...outline.map(([y, w]) => [x + half * w, Y(y)]), ...outline.slice().reverse().map(([y, w]) => [x - half * w, Y(y)])];
        const shape = make("polygon", { class: "violin", points: edge.map((p) => p.map((v) => v.toFixed(1)).join()).join(" "), style: `fill:var(--c${row ? 0 : 1})`, opacity: ".8" }, svg);
        make("line", { x1: x - half * 0.6, x2: x + half * 0.6, y1: Y(violin.median), y2: Y(violin.median), style: "stroke:var(--card)", "stroke-width": 2 }, svg);
        if (row === chart.scores.length - 1) make("text", { x, y: lower + 17, "text-anchor": "middle" }, svg, violin.label);
        const show = () => bubble.show(x, upper, `weight ${violin.label}, ${name}`, [
          ["", `median ${short(10 ** violin.median)}`],
          ["", `over ${short(outline[outline.length - 1][0] - outline[0][0])} decades`],
        ]);
        shape.addEventListener("pointerenter", show);
        shape.addEventListener("pointerdown", show);
        shape.addEventListener("pointerleave", () => bubble.hide());
      });
    });
    make("text", { x: (left + right) / 2, y: high - 2, "text-anchor": "middle" }, svg, "sampled weight, from the first layer to the last");
  });
}

const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
// Colour by the square root of the share, so that small shares can be distinguished.
function shade(share) {
  const x = Math.sqrt(Math.min(0.9999, Math.max(0, share))) * 4, i = Math.floor(x), part = x - i;
  return `rgb(${STOPS[i].map((c, k) => Math.round(c + (STOPS[i + 1][k] - c) * part)).join()})`;
}

function heatMap(figure, map) {
  const bubble = tip(figure);
  redraw(figure, (wide) => {
    const left = Math.min(90, 14 + 8 * Math.max(...map.rows.map((r) => r.length)));
    const across = Math.max(1, Math.min(map.panels.length, Math.floor((wide - left) / 130)));
    const gap = 10, width = (wide - left - gap * across) / across;
    const cell = Math.max(9, Math.min(20, 240 / map.rows.length)), tall = cell * map.rows.length + 46;
    const down = Math.ceil(map.panels.length / across), high = down * tall + 36;
    const svg = frame(figure, wide, high, map.title);
    map.panels.forEach(([name, rows], number) => {
      const x0 = left + (number % across) * (width + gap), y0 = Math.floor(number / across) * tall + 20;
      make("text", { x: x0, y: y0 - 6 }, svg, name);
      const step = width / map.steps.length;
      rows.forEach((values, row) => {
        const y = y0 + (rows.length - 1 - row) * cell;
        if (number % across === 0 && (cell > 11 || row % 2 === 0)) make("text", { x: left - 5, y: y + cell / 2 + 4, "text-anchor": "end" }, svg, map.rows[row]);
        values.forEach((value, column) => {
          if (value === null) return;
          const rect = make("rect", { class: "cell", x: x0 + column * step, y, width: step + 0.4, height: cell + 0.4, fill: shade(value / 100) }, svg);
          const show = () => bubble.show(x0 + (column + 1) * step, y, `layer ${map.rows[row]}, ${name}`, [["", `step ${map.steps[column]}: ${short(value)} % kept`]]);
          rect.addEventListener("pointerenter", show);
          rect.addEventListener("pointerdown", show);
          rect.addEventListener("pointerleave", () => bubble.hide());
        });
      });
      const bottom = y0 + rows.length * cell + 14;
      make("text", { x: x0, y: bottom }, svg, String(map.steps[0]));
      if (map.steps.length > 1) make("text", { x: x0 + width, y: bottom, "text-anchor": "end" }, svg, String(map.steps[map.steps.length - 1]));
    });
    const bar = Math.min(180, wide / 3), y = high - 16;
    make("text", { x: left, y: y + 10 }, svg, "kept: 0");
    for (let i = 0; i < 40; i++) make("rect", { x: left + 48 + (i * bar) / 40, y, width: bar / 40 + 0.5, height: 11, fill: shade((i / 39) ** 2) }, svg);
    make("text", { x: left + 48 + bar / 2, y: y - 4, "text-anchor": "middle" }, svg, "25");
    make("text", { x: left + 54 + bar, y: y + 10 }, svg, "100 %");
  });
}

const DRAW = { lines: lineChart, violins: violinChart, map: heatMap };

function mount(holder, chart) {
  const card = make("div", { class: "card", "data-chart": chart.name }, holder);
  make("h3", {}, card, chart.title);
  DRAW[chart.kind](make("figure", {}, card), chart);
}

// A group with data-choice shows one chart at a time, chosen in a menu.
for (const holder of document.querySelectorAll("[data-group]")) {
  const charts = DATA[holder.dataset.group];
  if (holder.hasAttribute("data-choice") && charts.length > 1) {
    const choice = make("select", { "aria-label": "which run" }), stage = make("div");
    charts.forEach((chart, i) => make("option", { value: i }, choice, chart.title));
    holder.className = "choice";
    holder.append(choice, stage);
    const show = () => { stage.replaceChildren(); mount(stage, charts[+choice.value]); };
    choice.addEventListener("change", show);
    show();
  } else {
    charts.forEach((chart) => mount(holder, chart));
  }
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
document.documentElement.dataset.drawn = "yes";
