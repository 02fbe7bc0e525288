"""Debian's Chromium with the network off: what a reader of a page sees."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CHROMIUM = Path("/usr/bin/chromium")
INSTALL = "apt-get install -y chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_LOCAL = ("file:", "data:", "blob:", "about:")


@dataclass
class Seen:
    """What an opened page did: figures in it and drawn, requests beyond the file, errors, width that overflows (px)."""

    figures: int = 0
    drawn: int = 0
    requests: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    overflow_px: int = 0
    overlaps: list = field(default_factory=list)


@contextmanager
def opened(path, width=1400, height=1000):
    """A page opened offline, as (playwright Page, Seen with `requests` and `errors` so far)."""
    from playwright.sync_api import sync_playwright

    seen = Seen()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
        page = context.new_page()
        page.on("request", lambda r: None if r.url.startswith(_LOCAL) else seen.requests.append(r.url))
        page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: seen.errors.append(str(e)))
        page.on("dialog", lambda d: (seen.errors.append(f"dialog: {d.message}"), d.dismiss()))
        page.goto(Path(path).resolve().as_uri())
        yield page, seen
        browser.close()


def look(path, width=1400, screenshot=None, figures=".plot"):
    """Open a page offline, scroll through it until its figures are drawn; a Seen. `screenshot`: a PNG of all of it."""
    with opened(path, width) as (page, seen):
        boxes = page.locator(figures)
        seen.figures = boxes.count()
        for n in range(seen.figures):
            boxes.nth(n).scroll_into_view_if_needed()
            page.wait_for_function(DRAWN, arg=boxes.nth(n).element_handle(), timeout=20_000)
        seen.drawn = page.locator(f"{figures} .main-svg:first-child").count()
        seen.overflow_px = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        seen.overlaps = page.evaluate(OVERLAPS)
        if screenshot:
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=str(screenshot), full_page=True)
    return seen


DRAWN = "box => box.querySelector('.main-svg') !== null"
# Texts of one figure that lie over each other by more than 2 px in both directions, and texts that leave its box
# (rotated texts are left out: their boxes overlap where they do not).
OVERLAPS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const texts = [...plot.querySelectorAll('svg text')]
    .filter(t => t.textContent.trim() && t.getBoundingClientRect().width && t.getScreenCTM().b === 0);
  const boxes = texts.map(t => t.getBoundingClientRect()), outer = plot.getBoundingClientRect(), found = [];
  boxes.forEach((a, i) => {
    if (a.left < outer.left - 1 || a.right > outer.right + 1 || a.top < outer.top - 1 || a.bottom > outer.bottom + 1)
      found.push(`${plot.id}: "${texts[i].textContent}" leaves the figure`);
    boxes.slice(i + 1).forEach((b, j) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const pair = [texts[i], texts[i + 1 + j]].map(t => `"${t.textContent}"`);
      if (across > 2 && down > 2) found.push(`${plot.id}: ${pair.join(" over ")}`);
    });
  });
  return found;
})"""
