// Reads the values under the pointer into the legend of its chart.
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const { steps, values, unit } = JSON.parse(figure.dataset.chart);
  const last = steps.length - 1;
  const numbers = steps.every(Number.isFinite);
  const show = (index) => {
    figure.querySelector("[data-step]").value = steps[index];
    for (const output of figure.querySelectorAll("[data-level]")) {
      const value = values[output.dataset.level][index] ?? null;
      output.value = value === null ? "-" : value + unit;
    }
  };
  // Steps may be unevenly apart: the nearest one is looked up.
  const place = (index) => numbers && last
    ? (steps[index] - steps[0]) / (steps[last] - steps[0]) : last ? index / last : 0.5;
  for (const svg of figure.querySelectorAll("svg")) {
    const [left, right] = [Number(svg.dataset.left), Number(svg.dataset.right)];
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const share = (x - left) / (right - left);
      let nearest = 0;
      for (let index = 1; index <= last; index++) {
        if (Math.abs(place(index) - share) < Math.abs(place(nearest) - share)) nearest = index;
      }
      const at = left + place(nearest) * (right - left);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.classList.add("on");
      show(nearest);
    });
    svg.addEventListener("pointerleave", () => {
      cursor.classList.remove("on");
      show(last);
    });
  }
}
