"""A sheet that charts are drawn on: SVG elements from top to bottom, and what all charts have in common."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distgpt.show.reporting.style import SERIES, standalone_style
from distgpt.show.reporting.words import escaped, one_line, shorten, text_width, wrap

WIDE, NARROW = 800, 328  # drawn for a screen or paper, and for a phone: text keeps its size on both
SIZE = 13  # of text
LINE = 17  # from one line of text to the next
TITLE = 16

Sample = Callable[["Canvas", float, float, int], None]  # draws series i at x, y in a legend


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """`content` is markup; attribute names as Python writes them: class_, text_anchor."""
    words = "".join(f' {k.strip("_").replace("_", "-")}="{_value(v)}"' for k, v in attributes.items())
    return f"<{tag}{words}>{content}</{tag}>" if content else f"<{tag}{words}/>"


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escaped(str(value))


def hover(text: str) -> str:
    """What a pointer shows above an element."""
    return element("title", escaped(text))


@dataclass
class Canvas:
    """Elements so far, and how far down the sheet is used."""

    name: str  # ids begin with it: they have to differ within a page
    width: int
    y: float = 0.0
    parts: list[str] = field(default_factory=list)

    @property
    def narrow(self) -> bool:
        return self.width < 600

    def add(self, tag: str, content: str = "", /, **attributes: object) -> None:
        self.parts.append(element(tag, content, **attributes))

    def text(
        self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", whole: str | None = None
    ) -> None:
        """`y` is the baseline; `whole` is what the text says where it had to be cut."""
        text = one_line(text)
        title = hover(whole) if whole is not None and one_line(whole) != text else ""
        extra = {} if anchor == "start" else {"text_anchor": anchor}
        if kind:
            extra["class_"] = kind
        if text:
            self.add("text", escaped(text) + title, x=float(x), y=float(y), **extra)

    def lines(
        self, text: str, kind: str = "", size: int = SIZE, most: int = 2, middle: float | None = None
    ) -> None:
        """A text over the whole width, wrapped; around a middle, if that fits."""
        room = self.width / (1.1 if size > SIZE else 1)
        for line in wrap(one_line(text), room, size, most):
            self.y += size + 4
            half = text_width(line, size) / 2
            x = min(max(middle - half, 0.0), max(self.width - 2 * half, 0.0)) if middle else 0.0
            self.text(x, self.y - 4, line, kind, whole=text if line.endswith("…") else None)

    def legend(self, names: Sequence[str], sample: Sample, sample_width: float) -> None:
        """Names with samples, as many in a row as fit."""
        x, y = 0.0, self.y + LINE - 4
        room = self.width - sample_width - 8
        for i, name in enumerate(names):
            text = shorten(one_line(name), room, SIZE)
            needed = sample_width + 7 + text_width(text, SIZE)
            if x and x + needed > self.width:
                x, y = 0.0, y + LINE + 3
            sample(self, x, y - 4.5, i)
            self.text(x + sample_width + 7, y, text, whole=name)
            x += needed + 18
        self.y = y + 10

    def finish(self, title: str, description: str, alone: bool) -> str:
        height = round(self.y + 0.5)
        title_id, text_id = f"{self.name}-title", f"{self.name}-text"
        about = element("title", escaped(title) or "Chart", id=title_id)
        about += element("desc", escaped(description) or "No description.", id=text_id)
        space = {"xmlns": "http://www.w3.org/2000/svg"} if alone else {}
        margin = 16 if alone else 0
        box = f"{-margin} {-margin} {self.width + 2 * margin} {height + 2 * margin}"
        if alone:
            paper = element("rect", "", class_="paper", x=-margin, y=-margin, width="100%", height="100%")
            about += element("style", standalone_style()) + paper
        return element(
            "svg",
            about + "\n" + "\n".join(self.parts) + "\n",
            **space,
            class_="chart",
            viewBox=box,
            width=self.width + 2 * margin,
            height=height + 2 * margin,
            role="img",
            aria_labelledby=f"{title_id} {text_id}",
        )


def series_class(i: int) -> str:
    return f"s{i % SERIES + 1}"


@dataclass(frozen=True)
class Chart:
    """What every chart has: a title, a text that tells what is to be seen, and a way onto a page."""

    title: str
    description: str

    def draw(self, canvas: Canvas) -> None:
        raise NotImplementedError

    def svg(self, name: str = "", width: int = WIDE, alone: bool = False) -> str:
        """An element for a page, which styles it; its ids begin with `name`. Alone: a file of its own."""
        seed = f"{type(self).__name__} {self.title} {self.description} {width}"
        canvas = Canvas(name or f"chart-{zlib.crc32(seed.encode(errors='backslashreplace')):08x}", width)
        if alone:
            canvas.lines(self.title, "title", TITLE, most=3)
            canvas.y += 8
        self.draw(canvas)
        return canvas.finish(self.title, self.description, alone)

    def html(self, name: str) -> str:
        """Drawn twice, for a screen and for a phone: the page's style shows one of them."""
        wide = f'<div class="for-wide">{self.svg(f"{name}-wide", WIDE)}</div>'
        narrow = f'<div class="for-narrow">{self.svg(f"{name}-narrow", NARROW)}</div>'
        caption = f"<figcaption>{escaped(self.title)}</figcaption>"
        return f'<figure class="chart-box">{caption}{wide}{narrow}</figure>'
