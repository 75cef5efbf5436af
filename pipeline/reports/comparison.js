"use strict";
(function () {
  // A click on a title sorts the groups; the runs of a group stay below it.
  function key(body, column) {
    const text = body.rows[0].cells[column].textContent.trim();
    return [parseFloat(text.replace(/,/g, "")), text];
  }
  document.querySelectorAll("table.runs").forEach(function (table) {
    const heads = table.querySelectorAll("thead th");
    heads.forEach(function (head, column) {
      function sort() {
        const down = head.getAttribute("aria-sort") === "ascending" || (column > 1 && !head.hasAttribute("aria-sort"));
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const bodies = Array.from(table.tBodies);
        bodies.sort(function (one, other) {
          const [a, s] = key(one, column), [b, t] = key(other, column);
          if (column === 1) return (down ? -1 : 1) * s.localeCompare(t);
          if (isNaN(a) !== isNaN(b)) return isNaN(a) ? 1 : -1;  // what has no value yet is last
          return (down ? -1 : 1) * (isNaN(a) ? s.localeCompare(t) : a - b);
        });
        table.append(...bodies);
      }
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
    table.querySelectorAll(".fold").forEach(function (button) {
      button.addEventListener("click", function () {
        const open = button.getAttribute("aria-expanded") !== "true";
        button.setAttribute("aria-expanded", String(open));
        button.textContent = open ? "▾" : "▸";
        button.closest("tbody").querySelectorAll(".seed").forEach((row) => { row.hidden = !open; });
      });
    });
  });
  // A click on a name hides its curves in the figures below it.
  document.querySelectorAll(".chip").forEach(function (chip) {
    chip.addEventListener("click", function () {
      const shown = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", String(shown));
      chip.closest(".section").querySelectorAll(".js-plotly-plot").forEach(function (plot) {
        const its = plot.data.map((trace, number) => [trace.meta, number]).filter((each) => each[0] === chip.dataset.group);
        if (its.length) Plotly.restyle(plot, { visible: shown }, its.map((each) => each[1]));
      });
    });
  });
})();
