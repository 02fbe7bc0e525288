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
  // The title starts at the left edge, in lines that fit; on a phone text and margins shrink.
  const fitted = (figure, width) => {
    const layout = structuredClone(figure.layout || {}), margin = layout.margin || {}, small = width < narrow;
    const title = typeof layout.title === "string" ? {text: layout.title} : layout.title || {};
    const size = small ? 14 : 16, lines = wrap(title.text || "", width / (0.56 * size));
    layout.title = {...title, text: lines, font: {...title.font, size}, x: 0, xref: "container", xanchor: "left"};
    layout.legend = {...layout.legend, maxheight: 4000};  // or plotly hides the last lines behind a scroll bar
    if (small) {
      layout.font = {...layout.font, size: 11};
      layout.margin = {...margin, l: Math.min(margin.l ?? 60, 60), r: Math.min(margin.r ?? 20, 20)};
    }
    return layout;
  };
  // A legend above the plot gets the room that its lines need at this width, below the title.
  const clear = (box) => {
    const {legend, margin, height} = box._fullLayout, lines = box.querySelector(".legend .bg");
    if (!lines || legend.orientation !== "h" || !(legend.y >= 1)) return;
    const title = box.querySelector(".gtitle")?.getBoundingClientRect().bottom - box.getBoundingClientRect().top || 0;
    const room = title + lines.getBoundingClientRect().height + 12;
    if (room > margin.t) Plotly.relayout(box, {height: height + room - margin.t, "margin.t": room});
  };
  const draw = async (box, printing = false) => {
    const figure = figures[box.id], width = printing ? paper : box.clientWidth;
    const layout = fitted(figure, width);
    if (printing) layout.width = paper;
    await Plotly.react(box, figure.data, layout, {responsive: true, displaylogo: false, ...figure.config});
    clear(box);
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
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("main details:not(.code):not(.facts)")) folded.open = true;
    boxes.forEach((box) => draw(box, true));
  });
  addEventListener("afterprint", () => boxes.forEach((box) => draw(box)));
})();
