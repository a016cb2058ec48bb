"use strict";
// Draws the charts from the JSON beside this script. Texts reach the page as text nodes, and
// plotly.js as escaped text: nothing that came with the data is ever read as markup.
(() => {
  const charts = JSON.parse(document.getElementById("report-data").textContent);
  const CONFIG = { responsive: true, displayModeBar: false, displaylogo: false, scrollZoom: false };
  const redraw = [];

  const css = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // A color that begins with "@" is one of the page's; its value depends on light or dark.
  const painted = (value) => {
    if (typeof value === "string") return /^@[a-z]+$/.test(value) ? css(value.slice(1)) : value;
    if (Array.isArray(value)) return value.map(painted);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v)]));
    }
    return value;
  };

  const escaped = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const wrapped = (lines, width) => {
    const out = [];
    for (const line of lines) {
      let rest = String(line);
      while (rest.length > width) {
        const cut = rest.lastIndexOf(" ", width);
        const at = cut > width / 3 ? cut : width;
        out.push(rest.slice(0, at));
        rest = rest.slice(at).trimStart();
      }
      out.push(rest);
    }
    return out.map(escaped).join("<br>");
  };

  // Labels of rows stand above their marks, as long as the chart is wide.
  const labelled = (id, { labels, lift }) => {
    const px = document.getElementById(id).clientWidth - 24;
    const fit = (text, each) => {
      const room = Math.floor(px / each);
      return escaped(text.length > room ? text.slice(0, room - 3) + "..." : text);
    };
    return labels.map(([label, said], row) => ({
      x: 0, xref: "paper", xanchor: "left", y: row, yref: "y", yshift: lift, showarrow: false,
      align: "left", bgcolor: css("surface"), borderpad: 0, text: `<b>${fit(label, 8.6)}</b><br>${fit(said, 7.4)}`,
    }));
  };

  const draw = (id, figure) => {
    const look = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("ink") },
      hoverlabel: {
        align: "left", bgcolor: css("surface"), bordercolor: css("ink"),
        font: { color: css("ink"), size: 13 },
      },
      dragmode: false,
      autosize: true,
    };
    const layout = { ...look, ...painted(figure.layout) };
    if (figure.labels) layout.annotations = labelled(id, figure);
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) layout[name] = { fixedrange: true, ...layout[name] };
      if (layout[name] && layout[name].title) layout[name].title.font = { size: 13 };
    }
    return Plotly.react(id, painted(figure.data), layout, CONFIG);
  };

  const detail = (id) => {
    const output = document.querySelector(`[data-detail="${id}"]`);
    return (text) => { output.textContent = text; };
  };

  // Figures that came whole: one, or one an option of the select above the chart.
  const still = (id, { figures, said }) => {
    const select = document.querySelector(`select[data-chart="${id}"]`);
    const say = detail(id);
    const show = () => {
      const index = select ? Number(select.value) : 0;
      if (said) say(said[index]);
      return draw(id, figures[index]);
    };
    if (select) select.addEventListener("change", show);
    redraw.push(show);
    return show();
  };

  const option = (value, text) => {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = text;
    return made;
  };

  const ANY = "any";
  const MOST = 4; // times the tile in use: beyond it all colors are the same
  const MARKS = {
    wrong: { name: "rejected: wrong result", symbol: "x", color: "@bad" },
    stopped: { name: "rejected: did not run", symbol: "triangle-up", color: "@bad" },
    untimed: { name: "passed, not timed", symbol: "circle-open", color: "@ink" },
    some: { name: "some tiles rejected", symbol: "x", color: "#b33000", line: "#ffffff", size: 9 },
    before: { name: "tile in use before", symbol: "diamond", color: "#ffffff", line: "#000000" },
    star: { name: "tile from now on", symbol: "star", color: "#ffffff", line: "#000000" },
  };

  // Round values between low and high, 1 among them, not too close to each other on a log scale.
  const ticksOf = (low, high) => {
    const gap = Math.log2(high / low) / 7;
    const kept = [1];
    for (const tick of [0.125, 0.25, 0.5, 2, 4, 8, 16, 0.7, 1.5, 3, 6, 0.8, 1.2, 0.9, 1.1, 0.95,
      1.05, 0.98, 1.02]) {
      const near = kept.some((other) => Math.abs(Math.log2(tick / other)) < gap);
      if (tick > low && tick < high && !near) kept.push(tick);
    }
    return kept;
  };

  // The heat map: two fields on the axes, the others fixed or "any", best tile of a field shown.
  const heat = (id, { spaces }) => {
    const controls = document.querySelector(`[data-controls="${id}"]`);
    const say = detail(id);
    const state = { space: 0 };

    const picker = (label, choices, value, change) => {
      const wrap = document.createElement("label");
      wrap.append(label);
      const select = document.createElement("select");
      select.dataset.field = label;
      select.append(...choices.map(([v, text]) => option(v, text)));
      select.value = String(value);
      select.addEventListener("change", () => change(select.value, select));
      wrap.append(select);
      return wrap;
    };

    const fieldsOf = () => spaces[state.space].fields[state.algorithm] || {};
    const valuesOf = (field) => (field ? fieldsOf()[field] : [""]);

    const chooseSpace = (index) => {
      const space = spaces[index];
      const names = [...new Set(space.tiles.map((tile) => tile.algorithm))];
      state.space = index;
      chooseAlgorithm(names.includes(state.algorithm) && state.touched ? state.algorithm
        : names.includes(space.first) ? space.first : names[0]);
    };

    const chooseAlgorithm = (algorithm) => {
      state.algorithm = algorithm;
      const fields = fieldsOf();
      const order = Object.keys(fields).sort((a, b) => fields[b].length - fields[a].length);
      state.x = order[0] || "";
      state.y = order[1] || "";
      state.fixed = Object.fromEntries(order.map((name) => [name, ANY]));
    };

    const build = () => {
      const space = spaces[state.space];
      const fields = fieldsOf();
      const focus = document.activeElement && document.activeElement.dataset.field;
      const algorithms = [...new Set(space.tiles.map((tile) => tile.algorithm))];
      const names = Object.keys(fields);
      const act = (change) => (value) => { change(value); build(); show(); };
      const parts = [];
      if (spaces.length > 1) {
        parts.push(picker("product", spaces.map((s, i) => [i, s.label]), state.space,
          act((v) => chooseSpace(Number(v)))));
      }
      if (algorithms.length > 1) {
        parts.push(picker("algorithm", algorithms.map((a) => [a, a]), state.algorithm,
          act((v) => { state.touched = true; chooseAlgorithm(v); })));
      }
      if (names.length > 1) {
        for (const axis of ["x", "y"]) {
          const other = axis === "x" ? "y" : "x";
          const title = axis === "x" ? "across" : "down";
          parts.push(picker(title, names.map((n) => [n, n]), state[axis], act((v) => {
            if (state[other] === v) state[other] = state[axis];
            state[axis] = v;
          })));
        }
      }
      for (const name of names) {
        if (name === state.x || name === state.y || fields[name].length < 2) continue;
        const choices = [[ANY, "any (best shown)"], ...fields[name].map((v, i) => [i, String(v)])];
        parts.push(picker(name, choices, state.fixed[name], act((v) => { state.fixed[name] = v; })));
      }
      controls.replaceChildren(...parts);
      const again = focus && controls.querySelector(`[data-field="${CSS.escape(focus)}"]`);
      if (again) again.focus();
    };

    const cells = () => {
      const found = new Map();
      const fields = fieldsOf();
      const [xs, ys] = [valuesOf(state.x), valuesOf(state.y)];
      for (const tile of spaces[state.space].tiles) {
        if (tile.algorithm !== state.algorithm) continue;
        const out = Object.keys(fields).some((name) => name !== state.x && name !== state.y
          && state.fixed[name] !== ANY && fields[name][state.fixed[name]] !== tile.fields[name]);
        if (out) continue;
        const x = state.x ? xs.indexOf(tile.fields[state.x]) : 0;
        const y = state.y ? ys.indexOf(tile.fields[state.y]) : 0;
        const key = `${x},${y}`;
        if (!found.has(key)) found.set(key, { x, y, tiles: [] });
        found.get(key).tiles.push(tile);
      }
      return [...found.values()];
    };

    const isRejected = (tile) => tile.state === "wrong" || tile.state === "stopped";

    const words = (tiles) => {
      const timed = tiles.filter((t) => t.relative).sort((a, b) => a.relative - b.relative);
      const rejected = tiles.filter(isRejected);
      const lines = timed.length ? [...timed[0].lines] : [];
      if (!timed.length && !rejected.length && tiles.length) lines.push(...tiles[0].lines);
      if (timed.length > 1) lines.push(`best of ${timed.length} tiles timed here`);
      for (const tile of rejected.slice(0, 3)) lines.push(...(lines.length ? [""] : []), ...tile.lines);
      if (rejected.length > 3) lines.push(`and ${rejected.length - 3} more rejected here`);
      return lines;
    };

    const show = () => {
      const [xs, ys] = [valuesOf(state.x), valuesOf(state.y)];
      const blank = (fill) => ys.map(() => xs.map(() => fill));
      const z = blank(null), text = blank("");
      const points = Object.fromEntries(Object.keys(MARKS).map((name) => [name, []]));
      const width = Math.max(24, Math.min(60, Math.floor(controls.parentElement.clientWidth / 17)));
      const relatives = [];
      for (const { x, y, tiles } of cells()) {
        const lines = words(tiles);
        const best = Math.min(...tiles.filter((t) => t.relative).map((t) => t.relative));
        const rejected = tiles.filter(isRejected);
        const point = { x, y, lines };
        if (Number.isFinite(best)) {
          z[y][x] = Math.log2(best);
          text[y][x] = wrapped(lines, width);
          relatives.push(best);
          if (rejected.length) points.some.push({ ...point, x: x + 0.32, y: y - 0.3 });
        } else if (rejected.length === tiles.length) {
          points[rejected.some((t) => t.state === "wrong") ? "wrong" : "stopped"].push(point);
        } else {
          points.untimed.push(point);
        }
        const mark = ["star", "before"].find((name) => tiles.some((t) => t.mark === name));
        if (mark) points[mark].push(point);
      }
      const low = Math.max(1 / MOST, Math.min(1, ...relatives));
      const slowest = Math.max(1, ...relatives);
      const high = Math.min(MOST, slowest);
      const ticks = ticksOf(low, high);
      if (slowest > MOST) ticks.push(MOST);
      const data = [{
        type: "heatmap", x: xs.map((_, i) => i), y: ys.map((_, i) => i), z, text,
        hoverinfo: "text", hoverongaps: false, xgap: 2, ygap: 2, colorscale: "Cividis",
        reversescale: true, zmin: Math.log2(low) - 0.01, zmax: Math.log2(high) + 0.01,
        showscale: relatives.length > 0,
        colorbar: {
          orientation: "h", yref: "container", y: 0, yanchor: "bottom", ypad: 4, thickness: 12,
          len: 1, outlinewidth: 0, tickvals: ticks.map(Math.log2),
          ticktext: ticks.map((tick) => (tick === MOST ? `${tick} or more` : String(tick))),
          title: { text: "time over that of the tile in use", side: "bottom", font: { size: 13 } },
        },
      }];
      for (const [name, look] of Object.entries(MARKS)) {
        if (!points[name].length) continue;
        data.push({
          type: "scatter", mode: "markers", name: look.name, hoverinfo: "text",
          x: points[name].map((p) => p.x), y: points[name].map((p) => p.y),
          text: points[name].map((p) => wrapped(p.lines, width)),
          customdata: points[name].map((p) => p.lines.join("\n")),
          marker: {
            symbol: look.symbol, color: look.color, size: look.size || 13,
            line: { color: look.line || look.color, width: 1.5 },
          },
        });
      }
      const axis = (name, values) => ({
        title: { text: name }, tickvals: values.map((_, i) => i), ticktext: values.map(String),
        range: [-0.5, values.length - 0.5], showgrid: false, zeroline: false, automargin: true,
        showticklabels: Boolean(name),
      });
      return draw(id, {
        data,
        layout: {
          height: 250 + 42 * ys.length, hovermode: "closest", showlegend: true,
          margin: { l: 40, r: 12, t: 40, b: 128 },
          legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
          xaxis: axis(state.x, xs),
          yaxis: { ...axis(state.y, ys), range: [ys.length - 0.5, -0.5] },
        },
      });
    };

    const tell = (event) => {
      const { data, pointIndex, customdata } = event.points[0];
      if (customdata) { say(customdata); return; }
      if (data.type !== "heatmap") return;
      const [y, x] = pointIndex;
      const cell = cells().find((c) => c.x === x && c.y === y);
      if (cell) say(words(cell.tiles).join("\n"));
    };

    chooseSpace(0);
    build();
    say("Point at a field, or tap it: what was found there stands here.");
    redraw.push(show);
    return Promise.resolve(show()).then((chart) => {
      chart.on("plotly_hover", tell);
      chart.on("plotly_click", tell);
    });
  };

  const all = Object.entries(charts).map(([id, chart]) =>
    chart.spaces ? heat(id, chart) : still(id, chart));
  Promise.all(all).then(() => {
    document.getElementById("undrawn").remove();
    document.documentElement.dataset.drawn = "yes";
  });
  const again = () => { for (const show of redraw) show(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let waiting = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's bars come and go
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(again, 150);
  });
})();
