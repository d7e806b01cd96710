"use strict";
// Colors of text and lines follow the page's, in light and dark mode and in print.
const ink = "currentColor";
const config = {
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: { labelColor: ink, titleColor: ink, tickColor: ink, domainColor: ink, gridColor: ink, gridOpacity: 0.15, titleFontWeight: "normal" },
  legend: { labelColor: ink, titleColor: ink, orient: "bottom", columns: 1, labelLimit: 300 },
};
const specs = JSON.parse(document.getElementById("specs").textContent);
for (const [id, spec] of Object.entries(specs)) {
  // `ast` interprets Vega's expressions: the page allows no eval.
  vegaEmbed(document.getElementById(id), spec, { config, renderer: "svg", actions: false, ast: true }).catch((error) => {
    console.error(error);
    document.getElementById(id).textContent = "This plot cannot be drawn; its numbers are in the table.";
  });
}
