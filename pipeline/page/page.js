"use strict";
(function () {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", function () {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Figures: colours of text and grid come from the style sheet, so that they follow dark, light and print by themselves.
  const touch = matchMedia("(pointer: coarse)").matches;
  const common = {
    margin: { l: 50, r: 14, t: 34, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12 }, hovermode: "x unified",
    legend: { orientation: "h", x: 0, y: -0.14, yanchor: "top", xanchor: "left", font: { size: 11 } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#8a9096", activecolor: "#3f7fd0" },
    xaxis: { zeroline: false, automargin: true }, yaxis: { zeroline: false, automargin: true, exponentformat: "power" },
    dragmode: touch ? false : "zoom",  // a finger scrolls the page; the buttons of a figure zoom it
  };
  function merged(below, above) {
    const all = Object.assign({}, below);
    for (const key of Object.keys(above)) {
      const both = [below[key], above[key]].every((value) => value && typeof value === "object" && !Array.isArray(value));
      all[key] = both ? merged(below[key], above[key]) : above[key];
    }
    return all;
  }
  function draw(place) {
    const shown = JSON.parse(place.querySelector("script").textContent);
    const options = {
      responsive: true, displaylogo: false, displayModeBar: touch ? true : "hover",
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    };
    Plotly.newPlot(place, shown.data, merged(common, shown.layout), options);
  }
  const places = document.querySelectorAll(".plot");
  const opened = (place) => !place.closest("details:not([open])");
  const pending = new Set(places);
  function drawOpened() {
    for (const place of pending) if (opened(place)) { pending.delete(place); draw(place); }
  }
  drawOpened();
  document.querySelectorAll("details").forEach(function (part) {
    part.addEventListener("toggle", function () {
      drawOpened();
      if (part.open) part.querySelectorAll(".js-plotly-plot").forEach((place) => Plotly.Plots.resize(place));
    });
  });

  // What is folded up is printed too, and figures take the width of the paper.
  let folded = [];
  addEventListener("beforeprint", function () {
    folded = Array.from(document.querySelectorAll("details:not([open])"));
    for (const part of folded) part.open = true;
    drawOpened();
    document.querySelectorAll(".js-plotly-plot").forEach((place) => Plotly.relayout(place, { width: place.closest(".plots") ? 325 : 670 }));
  });
  addEventListener("afterprint", function () {
    for (const part of folded) part.open = false;
    document.querySelectorAll(".js-plotly-plot").forEach((place) => Plotly.relayout(place, { width: null, autosize: true }));
  });
  addEventListener("hashchange", function () {
    const part = document.querySelector(location.hash || "#none");
    if (part && part.tagName === "DETAILS") part.open = true;
  });

  // A click on a column's title sorts by it: numbers by value, with what is no number at the end.
  function key(row, column) {
    const cell = row.cells[column];
    const text = (cell.dataset.value || cell.textContent).trim();
    const number = parseFloat(text.replace(/[,\s]/g, ""));
    return [number, text];
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    table.querySelectorAll("thead th").forEach(function (head, column) {
      head.tabIndex = 0;
      function sort() {
        const up = head.getAttribute("aria-sort") !== "ascending";
        table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = Array.from(table.tBodies[0].rows);
        rows.sort(function (one, other) {
          const [a, s] = key(one, column), [b, t] = key(other, column);
          if (isNaN(a) !== isNaN(b)) return isNaN(a) ? 1 : -1;
          return (up ? 1 : -1) * (isNaN(a) ? s.localeCompare(t) : a - b);
        });
        table.tBodies[0].append(...rows);
      }
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  });
})();
