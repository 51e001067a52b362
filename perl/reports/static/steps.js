"use strict";
// The values of a training's step under the pointer, in all charts over the steps at once.

(() => {
  const columns = JSON.parse(document.getElementById("steps").textContent);
  const charts = [...document.querySelectorAll("svg[data-metrics]")].map((svg) => ({
    svg, metrics: JSON.parse(svg.dataset.metrics), plot: JSON.parse(svg.dataset.plot),
    readout: svg.querySelector(".readout"), cursor: svg.querySelector(".cursor"),
    legend: [...svg.parentElement.querySelectorAll(".legend b")], // one for each metric where there are several
  }));

  // Place in the columns of the logged step nearest to `step`.
  function nearest(step) {
    let low = 0, high = columns.step.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (columns.step[middle] > step) high = middle;
      else low = middle;
    }
    return step - columns.step[low] <= columns.step[high] - step ? low : high;
  }

  const said = (value) => (value === null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 4 }));

  function show(place) {
    const step = columns.step[place];
    for (const { svg, metrics, plot: [low, high, start, end], readout, cursor, legend } of charts) {
      const values = metrics.map((name) => said(columns.values[name][place]));
      const one = legend.length ? "" : `: ${values[0]}`;
      readout.textContent = `step ${step.toLocaleString("en")}${one}`;
      legend.forEach((entry, i) => { entry.textContent = values[i]; });
      const x = high > low ? start + ((step - low) / (high - low)) * (end - start) : (start + end) / 2;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
    }
  }

  function rest() {
    for (const { readout, cursor, legend } of charts) {
      readout.textContent = "";
      for (const entry of legend) entry.textContent = "";
      cursor.setAttribute("visibility", "hidden");
    }
  }

  for (const { svg, plot: [low, high, start, end] } of charts) {
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      show(nearest(low + ((x - start) / (end - start)) * (high - low)));
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", rest);
  }
})();
