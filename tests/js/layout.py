"""Looks at a page as people do: is text cut or too faint, do boxes stick out, does anything move."""

from js import chromium

# Text that is cut, columns that stick out, and boxes that do so.
CUT = """
Array.from(document.querySelectorAll("body *"), (one) => {
  const box = one.getBoundingClientRect(), style = getComputedStyle(one);
  if (!box.width || !one.checkVisibility() || one.closest("#treemap, svg, .scroll")) return "";
  const sticks = box.right > document.documentElement.clientWidth + 1 || box.left < -1;
  const isCut = one.scrollWidth > one.clientWidth + 1 && style.overflowX !== "visible" && !one.matches("input");
  return sticks || isCut ? `${one.tagName}#${one.id}.${one.className}: ${one.textContent.slice(0, 40)}` : "";
}).filter(Boolean).concat(Array.from(document.querySelectorAll(".scroll"),
  (one) => (one.checkVisibility() && one.scrollWidth > one.clientWidth + 1 ? `columns of ${one.textContent}` : "")
).filter(Boolean))
"""
# The lowest contrast of text with what is behind it, of 4.5 that WCAG asks for.
CONTRAST = """
(() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length === 3) return found;
    }
    return [255, 255, 255];
  };
  const texts = Array.from(document.querySelectorAll("body *")).filter((one) => one.checkVisibility()
    && Array.from(one.childNodes).some((child) => child.nodeType === 3 && child.data.trim()));
  return texts.map((one) => {
    const [a, b] = [light(numbers(getComputedStyle(one).color)), light(behind(one))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.textContent.slice(0, 30)];
  }).reduce((least, one) => (one[0] < least[0] ? one : least));
})()
"""


def look(page: chromium.Page) -> None:
    """Looks at the state of a page: nothing is cut or sticks out, text is readable, nothing moves."""
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # once it is laid out
    assert page.run(CUT) == []
    least, text = page.run(CONTRAST)
    assert least >= 4.5, text
    assert page.run("document.getAnimations().length") == 0
