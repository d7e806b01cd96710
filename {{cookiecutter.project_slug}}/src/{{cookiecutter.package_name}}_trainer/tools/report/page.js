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
  curve: ({ domain, values }) => ({
    height: 200,
    mark: { type: "line", point: values.length <= 30 * domain.length && { size: 20 } },
    encoding: {
      x: { field: "step", type: "quantitative", axis: { format: "d", tickCount: 6 } },
      y: { field: "value", type: "quantitative", title: null, scale: { zero: false }, axis: { format: ".4~g" } },
      color: { ...color("name", domain), legend: domain.length === 1 ? null : { columns: 1 } },
      tooltip: [{ field: "name" }, { field: "step" }, { field: "value", format: ".6~g" }],
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
document.querySelectorAll(".plot").forEach((place, number) => {
  const plot = plots[number];
  const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", data: { values: plot.values }, ...specs[plot.kind](plot) };
  // `ast` interprets Vega's expressions: the page allows no eval.
  vegaEmbed(place, spec, { config, renderer: "svg", actions: false, ast: true }).catch((error) => {
    console.error(error);
    place.textContent = "This plot cannot be drawn; its numbers are in the table.";
  });
});
