"use strict";
// Colors of text and lines follow the page's, in light and dark mode and in print.
const ink = "currentColor";
// Seen on a light and on a dark page (contrast of at least 3:1), and by the color-blind.
const colors = ["#2f81c7", "#cf6a12", "#169468", "#b8569b", "#8a7a1c", "#6f6fd8", "#c4504e"];
const config = {
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: { labelColor: ink, titleColor: ink, tickColor: ink, domainColor: ink, gridColor: ink, gridOpacity: 0.15, titleFontWeight: "normal" },
  legend: { labelColor: ink, titleColor: ink, orient: "bottom", columns: 2, labelLimit: 260 },
};

function color(field, domain) {
  const range = domain.map((name, index) => (name === "other" ? "#7d8590" : colors[index % colors.length]));
  return { field, type: "nominal", title: null, scale: { domain, range } };
}

const specs = {
  curve: ({ domain, values, unit = "steps", log = false }) => ({
    height: 200,
    mark: { type: "line", point: values.length <= 30 * domain.length && { size: 20 } },
    encoding: {
      x: { field: "at", type: "quantitative", title: unit, axis: { format: ".6~g", tickCount: 6 } },
      y: { field: "value", type: "quantitative", title: null, scale: log ? { type: values.every((each) => each.value > 0) ? "log" : "symlog" } : { zero: false }, axis: { format: ".4~g" } },
      color: { ...color("name", domain), legend: domain.length === 1 ? null : { columns: 1 } },
      tooltip: [{ field: "name" }, { field: "step" }, { field: "at", title: unit, format: ".6~g" }, { field: "value", format: ".6~g" }],
    },
  }),
  bars: ({ domain, values }) => ({
    height: 32 * new Set(values.map((each) => each.name)).size,
    mark: "bar",
    encoding: {
      x: { field: "value", type: "quantitative", title: null, stack: "zero" },
      y: { field: "name", type: "nominal", title: null, sort: null },
      color: color("part", domain),
      order: { field: "order", type: "quantitative" },
      tooltip: [{ field: "name" }, { field: "part" }, { field: "value", format: ".4~g" }],
    },
  }),
};

const plots = JSON.parse(document.getElementById("plots").textContent);
const axes = document.getElementById("axes");
const units = JSON.parse(axes.dataset.units);
// A step in epochs or samples; a run that does not know them has no curve there.
function at({ name, step }, unit) {
  const [, steps, samples] = units[name];
  return { steps: step, epochs: steps ? step / steps : null, samples: samples ? step * samples : null }[unit];
}

function draw(place, number) {
  const choice = { unit: axes.elements.unit.value, log: axes.elements.log.checked };
  const plot = { ...plots[number], ...choice };
  if (plot.kind === "curve") {
    if (!plot.values.some((each) => at(each, plot.unit) !== null)) plot.unit = "steps";
    plot.values = plot.values.map((each) => ({ ...each, at: at(each, plot.unit) }));
  }
  const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", data: { values: plot.values }, ...specs[plot.kind](plot) };
  // `ast` interprets Vega's expressions: the page allows no eval.
  vegaEmbed(place, spec, { config, renderer: "svg", actions: false, ast: true }).catch((error) => {
    console.error(error);
    place.textContent = "This plot cannot be drawn; its numbers are in the table.";
  });
}

const places = document.querySelectorAll(".plot");
places.forEach(draw);
axes.addEventListener("submit", (event) => event.preventDefault());
axes.addEventListener("change", () => places.forEach((place, number) => plots[number].kind === "curve" && draw(place, number)));
