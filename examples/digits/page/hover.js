// Reads the values under the pointer into the legend of its chart.
for (const figure of document.querySelectorAll("figure")) {
  const values = JSON.parse(figure.dataset.values);
  const show = (step, first) => {
    figure.querySelector("[data-step]").value = step;
    for (const output of figure.querySelectorAll("[data-level]")) {
      const value = values[output.dataset.level][step - first] ?? "-";
      output.value = typeof value === "string" || Number.isInteger(value) ? value : value.toFixed(4);
    }
  };
  for (const svg of figure.querySelectorAll("svg")) {
    const [left, right, first, last] = ["left", "right", "first", "last"].map(
      (name) => Number(svg.dataset[name]));
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const share = Math.min(Math.max((x - left) / (right - left), 0), 1);
      const step = Math.round(first + share * (last - first));
      const at = left + (step - first) / Math.max(last - first, 1) * (right - left);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.classList.add("on");
      show(step, first);
    });
    svg.addEventListener("pointerleave", () => {
      cursor.classList.remove("on");
      show(last, first);
    });
  }
}
