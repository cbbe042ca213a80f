"use strict";
(() => {
  const ROW_PX = 29; // of a table row with its border
  const SPARE_ROWS = 20; // drawn above and below what is seen
  const PAUSE_MS = 200; // after the last key, before anything is drawn anew
  const CHOICES = ["source", "device", "arithmetic", "layout", "direction", "class", "library"];
  const collator = new Intl.Collator("en", { numeric: true });
  const NUMBERS = new Set(["time_ms", "tflops", "floor", "intensity"]);

  const told = JSON.parse(document.getElementById("data").textContent);
  const compared = Object.keys(told.rows.ratios);
  const rows = rowsOf(told.rows);
  const classes = [...new Set(rows.map((row) => row.class))];
  const views = {};
  let shown = rows;
  let sorting = { name: "time_ms", descending: true };
  let chosen = null;

  const COLUMNS = [
    ["layer", "layer", 180],
    ["problem", "problem", 290],
    ["epilogue", "epilogue", 150],
    ["direction", "direction", 78],
    ["arithmetic", "type", 76],
    ["layout", "layout", 68],
    ["class", "class", 108],
    ["solver", "solver", 214],
    ["library", "library", 84],
    ["time_ms", "ms", 88],
    ["tflops", "TFLOP/s", 78],
    ["floor", "of floor", 76],
    ...compared.map((name) => [name, name, 116]),
    ["marks", "marks", 140],
  ].filter(([name]) => isNumber(name) || rows.some((row) => row[name]));

  function isNumber(name) {
    return NUMBERS.has(name) || compared.includes(name);
  }

  function rowsOf(columns) {
    const { ratios, ...plain } = columns;
    const count = columns.problem.length;
    const made = Array.from({ length: count }, (_, number) => ({ number }));
    for (const [name, values] of Object.entries(plain)) {
      const of = Array.isArray(values) ? (i) => values[i] : (i) => values.names[values.at[i]];
      made.forEach((row, i) => (row[name] = of(i)));
    }
    made.forEach((row, i) => {
      for (const name of Object.keys(ratios)) row[name] = ratios[name][i];
      row.network_config = `${row.prefix}-${row.long_direction}-${row.problem}${row.suffix}`;
      row.time = row.time_ms === null ? "-" : `${digits(row.time_ms)} ms`;
      row.rate = row.tflops === null ? "-" : `${digits(row.tflops)} TFLOP/s`;
      row.of_floor = row.floor === null ? "not known" : `${Math.round(100 * row.floor)} %`;
      row.compared = Object.keys(ratios)
        .filter((name) => row[name] !== null)
        .map((name) => `${name} ${row[name].toFixed(2)}x`)
        .join(", ");
      row.words = [row.network_config, row.layer, row.solver, row.config, row.marks].join(" ").toLowerCase();
    });
    return made;
  }

  function digits(value) {
    return value === 0 || value >= 1000 ? value.toFixed(0) : value.toPrecision(4);
  }

  function cell(row, name) {
    const value = row[name];
    if (value === null || value === undefined) return "-";
    if (name === "floor") return `${Math.round(100 * value)} %`;
    if (compared.includes(name)) return `${value.toFixed(2)}x`;
    return isNumber(name) ? digits(value) : value;
  }

  // ---- filters

  function makeChoices() {
    for (const name of CHOICES) {
      const counts = new Map();
      for (const row of rows) counts.set(row[name], (counts.get(row[name]) || 0) + 1);
      if (counts.size < 2) continue;
      const select = document.createElement("select");
      select.name = name;
      select.setAttribute("aria-label", name);
      select.append(new Option(`${name}: all`, ""));
      for (const [value, count] of [...counts].sort((a, b) => b[1] - a[1]))
        select.append(new Option(`${value} (${count})`, `=${value}`));
      document.getElementById("choices").append(select);
    }
  }

  function choose() {
    const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const selects = [...document.querySelectorAll("#choices select")];
    for (const select of selects) select.classList.toggle("set", select.value !== "");
    const wanted = selects.filter((select) => select.value).map((select) => [select.name, select.value.slice(1)]);
    shown = rows.filter(
      (row) => wanted.every(([name, value]) => row[name] === value) && words.every((word) => row.words.includes(word)),
    );
    document.getElementById("shown").textContent = `${shown.length} of ${rows.length} problems`;
    sort();
    feed();
  }

  // ---- charts

  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const text = { labelColor: color("text"), titleColor: color("dim"), titleFontWeight: "normal" };
    return {
      background: "transparent",
      font: "system-ui, sans-serif",
      view: { stroke: color("line") },
      axis: { ...text, gridColor: color("line"), gridOpacity: 0.7, domainColor: color("line"), tickColor: color("line") },
      legend: { ...text, orient: "top", symbolOpacity: 1, symbolSize: 80, labelFontSize: 12 },
      text: { color: color("text") },
      style: {
        mean: { stroke: color("ground"), strokeWidth: 1.5 },
        halo: { stroke: color("ground"), strokeWidth: 4, strokeJoin: "round" },
      },
    };
  }

  async function draw(name) {
    const parts = data[name]();
    const has = Object.values(parts)[0].length > 0;
    document.getElementById(name).hidden = !has;
    if (!has) return;
    if (views[name]) {
      for (const [part, values] of Object.entries(parts)) views[name].data(part, values);
      await views[name].runAsync();
      return;
    }
    const options = {
      renderer: "canvas", logLevel: 1, config: theme(), tooltip: { theme: dark.matches ? "dark" : "light", formatTooltip: tooltip },
      actions: { export: true, source: false, compiled: false, editor: false },
    };
    const made = await window.vegaEmbed(`#${name}`, { ...told.charts[name], datasets: parts }, options);
    views[name] = made.view;
  }

  // `safe` makes text of whatever a source put there.
  function tooltip(value, safe) {
    if (typeof value !== "object") return safe(value);
    const lines = Object.entries(value).filter(([, told]) => told !== "" && told !== null && told !== undefined);
    const cells = lines.map(([name, told]) => `<td class="key">${safe(name)}</td><td class="value">${safe(told)}</td>`);
    return `<table><tbody><tr>${cells.join("</tr><tr>")}</tr></tbody></table>`;
  }

  // What each chart shows, by the names of its data; where the first is empty, the chart is hidden. Vega writes into the
  // objects that it is given: it gets copies.
  const data = {
    roofline() {
      const timed = shown.filter((row) => row.tflops !== null);
      const arithmetics = new Set(timed.map((row) => row.arithmetic));
      return {
        rows: copies(timed),
        roofs: copies(told.roofs.filter((point) => arithmetics.has(point.arithmetic))),
        marked: chosen !== null && chosen.tflops !== null ? copies([chosen]) : [],
      };
    },
    ratios() {
      const ticks = compared.flatMap((name) =>
        shown.filter((row) => row[name] !== null).map((row) => ({ ...row, compared: name, told: row.compared, ratio: row[name] })),
      );
      return { ticks, means: means(ticks) };
    },
    searches() {
      const curves = shownCurves();
      return { curves: curves.flat(), median: median(curves) };
    },
  };

  function copies(objects) {
    return objects.map((object) => ({ ...object }));
  }

  let drawing = Promise.resolve();

  function feed() {
    const all = async () => {
      for (const name of Object.keys(data)) await draw(name);
    };
    drawing = drawing.then(all, all); // one after the other: a view is made once
  }

  function drawAnew() {
    for (const name of Object.keys(views)) {
      views[name].finalize();
      delete views[name];
    }
    feed();
  }

  function means(ticks) {
    const groups = new Map();
    for (const tick of ticks)
      for (const kind of [tick.class, "all"]) {
        const key = `${classes.indexOf(kind)}/${tick.compared}`;
        if (!groups.has(key)) groups.set(key, { class: kind, compared: tick.compared, logs: [] });
        groups.get(key).logs.push(Math.log(tick.ratio));
      }
    return [...groups.values()].map(({ logs, ...group }) => {
      const mean = Math.exp(logs.reduce((sum, log) => sum + log, 0) / logs.length);
      const least = Math.exp(logs.reduce((low, log) => Math.min(low, log), Infinity));
      return { ...group, mean, least, count: logs.length, text: `${mean.toFixed(2)}x (${logs.length})` };
    });
  }

  function shownCurves() {
    const numbers = new Set(shown.map((row) => row.number));
    return told.curves
      .filter((curve) => numbers.has(curve.row))
      .map((curve) => {
        const best = Math.min(...curve.best_ms);
        return curve.trials.map((trials, i) => ({
          row: curve.row, trials, best_ms: curve.best_ms[i], behind: curve.best_ms[i] / best,
          network_config: rows[curve.row].network_config,
        }));
      });
  }

  function median(curves) {
    const steps = [...new Set(curves.flat().map((point) => point.trials))].sort((a, b) => a - b);
    return steps.flatMap((trials) => {
      const values = curves.flatMap((curve) => curve.findLast((point) => point.trials <= trials)?.behind ?? []).sort((a, b) => a - b);
      return 2 * values.length < curves.length ? [] : [{ trials, behind: values[values.length >> 1] }];
    });
  }

  // ---- the table: only the rows in view are there

  const scroller = document.getElementById("scroller");
  const body = document.getElementById("body");

  function makeHeadings() {
    for (const [name, title, width] of COLUMNS) {
      const heading = document.createElement("th");
      heading.style.width = `${width}px`;
      heading.dataset.name = name;
      const button = document.createElement("button");
      button.type = "button";
      button.title = title;
      if (isNumber(name)) button.classList.add("number");
      button.addEventListener("click", () => {
        const same = sorting.name === name;
        sorting = { name, descending: same ? !sorting.descending : isNumber(name) };
        sort();
      });
      heading.append(button);
      document.getElementById("headings").append(heading);
    }
    scroller.querySelector("table").style.width = `${COLUMNS.reduce((sum, column) => sum + column[2], 0)}px`;
  }

  function sort() {
    const { name, descending } = sorting;
    const sign = descending ? -1 : 1;
    const isNone = (value) => value === null || value === "";
    const compare = (a, b) => (isNumber(name) ? a - b : collator.compare(a, b));
    shown.sort((one, other) => {
      const [a, b] = [one[name], other[name]];
      if (isNone(a) || isNone(b)) return isNone(a) - isNone(b) || one.number - other.number; // last in either order
      return sign * compare(a, b) || one.number - other.number;
    });
    for (const heading of document.getElementById("headings").children) {
      const isSorted = heading.dataset.name === name;
      heading.setAttribute("aria-sort", isSorted ? (descending ? "descending" : "ascending") : "none");
      const title = COLUMNS.find((column) => column[0] === heading.dataset.name)[1];
      heading.firstChild.textContent = isSorted ? `${title} ${descending ? "\u25be" : "\u25b4"}` : title;
    }
    scroller.scrollTop = 0;
    fill();
  }

  function fill() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PX) - SPARE_ROWS);
    const last = Math.min(shown.length, first + Math.ceil(scroller.clientHeight / ROW_PX) + 2 * SPARE_ROWS);
    body.replaceChildren(space(first), ...shown.slice(first, last).map(line), space(shown.length - last));
  }

  function space(count) {
    const made = document.createElement("tr");
    made.className = "space";
    made.append(document.createElement("td"));
    made.style.height = `${count * ROW_PX}px`;
    return made;
  }

  function line(row) {
    const made = document.createElement("tr");
    made.classList.toggle("chosen", row === chosen);
    for (const [name] of COLUMNS) {
      const data = document.createElement("td");
      data.textContent = cell(row, name);
      data.title = data.textContent;
      if (isNumber(name)) data.className = "number";
      made.append(data);
    }
    made.addEventListener("click", () => mark(row));
    return made;
  }

  function mark(row) {
    chosen = row === chosen ? null : row;
    const detail = document.getElementById("detail");
    detail.hidden = chosen === null;
    const fields = {
      problem: row.network_config, layer: row.layer, source: row.source, device: row.device, class: row.class,
      solver: row.solver, configuration: row.config, time: row.time, rate: row.rate, "of the floor": row.of_floor,
      intensity: `${digits(row.intensity)} FLOP/B`, ratios: row.compared, marks: row.marks, message: row.message,
    };
    detail.replaceChildren(
      ...Object.entries(fields).filter(([, value]) => value).flatMap(([name, value]) => {
        const [term, text] = [document.createElement("dt"), document.createElement("dd")];
        term.textContent = name;
        text.textContent = value;
        return [term, text];
      }),
    );
    fill();
    feed();
  }

  function summarise() {
    const names = (name) => [...new Set(rows.map((row) => row[name]).filter(Boolean))];
    const solvers = names("solver").length;
    const parts = [`${rows.length} problems`, `${solvers} solver${solvers === 1 ? "" : "s"}`, names("device").join(", ")];
    document.getElementById("summary").textContent = parts.filter(Boolean).join(" \u00b7 ");
  }

  const form = document.getElementById("filters");
  let waiting = 0;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(choose, PAUSE_MS);
  };
  form.addEventListener("input", later);
  form.addEventListener("reset", later);
  form.addEventListener("submit", (event) => event.preventDefault());
  scroller.addEventListener("scroll", fill);
  dark.addEventListener("change", drawAnew);
  makeChoices();
  makeHeadings();
  summarise();
  for (const [name, has] of [["ratios", compared.length > 0], ["searches", told.curves.length > 0]])
    document.getElementById(`${name}-section`).hidden = !has;
  choose();
})();
