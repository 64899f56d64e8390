"use strict";
// Adds to a page that is complete without it: sorting, searching, figures on hover and by arrow keys, larger charts.
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  document.documentElement.classList.add("js");

  // -- sorting: the heading becomes a button ---------------------------------------------------------------------
  const keyOf = (row, column, number) => {
    const value = row.cells[column].dataset.value;
    if (!number) return (value ?? row.cells[column].textContent).toLocaleLowerCase();
    return value === undefined || value === "" ? Number.NaN : Number(value);
  };
  const sortBy = (table, heading) => {
    const number = heading.dataset.sort === "number";
    const before = heading.getAttribute("aria-sort");
    const down = before ? before === "ascending" : number && heading.dataset.first === "descending";
    for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0], column = heading.cellIndex, sign = down ? -1 : 1;
    const rows = [...body.rows].map((row) => [keyOf(row, column, number), row]);
    rows.sort(([a], [b]) => {
      if (number) return Number.isNaN(a) ? 1 : Number.isNaN(b) ? -1 : sign * (a - b);
      return sign * a.localeCompare(b);
    });
    body.append(...rows.map(([, row]) => row));
  };
  for (const table of all("table.data")) {
    for (const heading of all("thead th[data-sort]", table)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener("click", () => sortBy(table, heading));
    }
  }

  // -- searching -------------------------------------------------------------------------------------------------
  for (const input of all("input[data-filter]")) {
    const name = input.dataset.filter, place = document.getElementById(name);
    if (!place) continue;
    const rows = place.tBodies ? [...place.tBodies[0].rows] : all("[data-find]", place);
    const texts = rows.map((row) => (row.dataset.find ?? row.textContent).toLocaleLowerCase());
    const counter = document.querySelector(`output[data-count="${name}"]`);
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLocaleLowerCase();
      let shown = 0;
      rows.forEach((row, number) => {
        row.hidden = !texts[number].includes(wanted);
        shown += row.hidden ? 0 : 1;
      });
      if (counter) counter.textContent = wanted ? `${shown} of ${rows.length}` : `${rows.length}`;
    });
    if (counter) counter.textContent = `${rows.length}`;
  }

  // -- figures on hover and by arrow keys --------------------------------------------------------------------------
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);
  let shown = null;
  const follow = () => { // the mark moves with the page
    const mark = shown;
    if (!mark) return;
    const box = mark.getBoundingClientRect(), mine = tip.getBoundingClientRect();
    const left = Math.min(Math.max(4, box.left + box.width / 2 - mine.width / 2), innerWidth - mine.width - 4);
    const above = box.top - mine.height - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < 4 ? box.bottom + 8 : above}px`;
  };
  const show = (mark) => {
    shown = mark;
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    follow();
  };
  const hide = () => { shown = null; tip.hidden = true; };
  addEventListener("pointerover", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (mark) show(mark);
    else if (shown && !shown.closest("svg").matches(":focus")) hide(); // what the arrow keys show stays
  });
  addEventListener("scroll", follow, { passive: true, capture: true });

  const dialog = document.createElement("dialog");
  document.body.append(dialog);
  const prepare = (chart, enlarge) => {
    const marks = all("[data-tip]", chart);
    for (const mark of marks) mark.querySelector("title")?.remove(); // ours is shown in its place
    chart.tabIndex = 0;
    let at = -1;
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step && marks.length) {
        event.preventDefault();
        at = (at + step + marks.length) % marks.length;
        show(marks[at]);
      } else if (event.key === "Enter" && enlarge) {
        event.preventDefault(); // the same key press would close it again
        enlarge();
      } else if (event.key === "Escape") {
        hide();
      }
    });
    chart.addEventListener("blur", hide);
    if (enlarge) chart.addEventListener("click", enlarge);
  };
  for (const chart of all("figure svg.chart")) {
    prepare(chart, () => {
      const large = chart.cloneNode(true), close = document.createElement("button");
      close.type = "button";
      close.textContent = "Close";
      close.addEventListener("click", () => dialog.close());
      dialog.replaceChildren(close, large);
      prepare(large, null);
      dialog.showModal();
      dialog.append(tip); // a modal lies above everything that is not in it
    });
  }
  dialog.addEventListener("close", () => { document.body.append(tip); hide(); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  // -- one series stands out -----------------------------------------------------------------------------------------
  for (const legend of all(".legend")) {
    const part = legend.closest(".part") ?? document;
    for (const item of all("li[data-series]", legend)) {
      item.tabIndex = 0;
      item.setAttribute("role", "button");
      const pick = () => {
        const on = item.classList.toggle("on");
        for (const other of all("li.on", legend)) if (other !== item) other.classList.remove("on");
        for (const chart of all("svg.chart", part)) {
          chart.classList.toggle("dim", on);
          for (const trace of all(".trace", chart)) trace.classList.toggle("on", on && trace.dataset.series === item.dataset.series);
        }
      };
      item.addEventListener("click", pick);
      item.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); }
      });
    }
  }
})();
