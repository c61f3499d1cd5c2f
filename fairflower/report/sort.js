// A table's rows by a column: a click or Enter on its head, once more for the other way round.
for (const head of document.querySelectorAll("table:not(.text) thead th")) {
  const column = head.cellIndex;
  const value = row => {
    const told = row.cells[column]?.firstChild?.textContent ?? "";
    const text = told.replace("\u2212", "-").replace("< ", "");
    return Number.isNaN(parseFloat(text)) ? text : parseFloat(text);
  };
  const sort = () => {
    const down = head.ariaSort !== "descending";
    for (const other of head.parentNode.cells) other.ariaSort = null;
    head.ariaSort = down ? "descending" : "ascending";
    for (const body of head.closest("table").tBodies) {
      const rows = [...body.rows].filter(row => row.cells.length > column);
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const order = typeof x === "number" && typeof y === "number" ? y - x : x < y ? 1 : x > y ? -1 : 0;
        return down ? order : -order;
      });
      body.append(...rows);
    }
  };
  head.tabIndex = 0;
  head.title = "Sort by this column";
  head.onclick = sort;
  head.onkeydown = event => event.key === "Enter" && sort();
}
