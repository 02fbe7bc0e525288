// Draws the figures when they come near the window; everything needed is in the page.
(async () => {
  const nonce = document.currentScript.nonce;
  const boxes = [...document.querySelectorAll(".plot")];
  const narrow = 640, paper = 680;
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  let figures;
  try {
    figures = JSON.parse(await unpack("figures"));
    const script = document.createElement("script");
    script.nonce = nonce;
    script.textContent = await unpack("plotly");
    document.head.append(script);
  } catch (error) {
    for (const box of boxes) box.textContent = `${box.ariaLabel}: this browser cannot draw it (${error.message}).`;
    return;
  }
  const wrap = (text, most) => text.split("<br>").map((line) => {
    let length = 0;
    return line.split(" ").map((word) => {
      length += word.length + 1;
      if (length <= most) return word;
      length = word.length + 1;
      return "<br>" + word;
    }).join(" ");
  }).join("<br>");
  // On a phone the title is wrapped, the legend goes below the figure, and the margins shrink.
  const fitted = (figure, width) => {
    const layout = structuredClone(figure.layout || {});
    if (width >= narrow) return layout;
    const title = typeof layout.title === "string" ? {text: layout.title} : layout.title || {};
    title.text = wrap(title.text || "", width / 8.5);
    title.font = {...title.font, size: 14};
    layout.title = title;
    layout.font = {...layout.font, size: 11};
    layout.legend = {...layout.legend, orientation: "h", x: 0, xanchor: "left", y: -0.25, yanchor: "top"};
    const margin = layout.margin || {};
    layout.margin = {...margin, l: Math.min(margin.l ?? 60, 60), r: 16, t: 24 + 18 * title.text.split("<br>").length};
    return layout;
  };
  const draw = (box, printing = false) => {
    const figure = figures[box.id], width = printing ? paper : box.clientWidth;
    const layout = fitted(figure, width);
    if (printing) layout.width = paper;
    Plotly.react(box, figure.data, layout, {responsive: true, displaylogo: false, ...figure.config});
  };
  const drawn = () => boxes.filter((box) => box.classList.contains("js-plotly-plot"));
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      near.unobserve(entry.target);
      draw(entry.target);
    }
  }, {rootMargin: "800px"});
  boxes.forEach((box) => near.observe(box));
  matchMedia(`(max-width: ${narrow}px)`).addEventListener("change", () => drawn().forEach((box) => draw(box)));
  addEventListener("beforeprint", () => boxes.forEach((box) => draw(box, true)));
  addEventListener("afterprint", () => boxes.forEach((box) => draw(box)));
})();
