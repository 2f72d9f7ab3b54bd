"""A plot as an SVG: axes, points with numbers beside them, lines, and a legend that says what the numbers are.

Why not a plotting library: two simple figures, and the same numbers must give the same bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1b6ca8", "#c8553d", "#4f8a3d", "#7d4fa1", "#b8860b", "#3d8a8a", "#a83d73", "#555555", "#8a6d3d", "#2d3fa1")
_LEFT, _TOP, _BOTTOM, _WIDTH, _HEIGHT, _LEGEND = 64, 40, 52, 520, 400, 420
_LINE = 17  # between two lines of the legend


@dataclass(frozen=True)
class Series:
    """Points that belong together, joined by a line if there are several."""

    title: str
    points: Sequence[tuple[float, float]]
    """x and y."""
    spread: Sequence[tuple[float, float]] = ()
    """Lowest and highest y of each point, if known."""


@dataclass(frozen=True)
class Axis:
    """One axis: what it shows, and which values."""

    title: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 to 1."""
        low, high, value = (self._scale(v) for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values inside the axis: for a log axis powers of ten, with 2 and 5 where there are few of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            return [m * 10.0**e for e in decades for m in steps if self.low <= m * 10.0**e <= self.high]
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        return [round(i * step, 10) for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else value


def axis(title: str, values: Sequence[float], *, log: bool = False) -> Axis:
    """An axis with room for all values and a margin."""
    low, high = min(values), max(values)
    if log:
        margin = max(1.15, (high / low) ** 0.06)
        return Axis(title, low / margin, high * margin, log=True)
    margin = max(1e-3, 0.08 * (high - low))
    return Axis(title, low - margin, high + margin)


def plot(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The whole picture.

    Args:
        title: Above it.
        x: Horizontal axis.
        y: Vertical axis.
        series: What is drawn; numbered from 1 in this order.
    """
    height = max(_TOP + _HEIGHT + _BOTTOM, _TOP + _LINE * (len(series) + 2))
    width = _LEFT + _WIDTH + _LEGEND
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    parts = [
        head,
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 22, title, 'font-size="15" font-weight="bold"'),
        *_frame(x, y),
    ]
    for number, one in enumerate(series, 1):
        parts += _series(number, one, x, y)
    return "\n".join((*parts, "</svg>")) + "\n"


def _frame(x: Axis, y: Axis) -> list[str]:
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>']
    for tick in x.ticks():
        at = _LEFT + x.place(tick) * _WIDTH
        parts.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(_text(at, bottom + 18, f"{tick:g}", 'text-anchor="middle"'))
    for tick in y.ticks():
        at = bottom - y.place(tick) * _HEIGHT
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{tick:g}", 'text-anchor="end"'))
    middle = _TOP + _HEIGHT / 2
    parts.append(_text(_LEFT + _WIDTH / 2, bottom + 40, x.title, 'text-anchor="middle"'))
    parts.append(_text(16, middle, y.title, f'text-anchor="middle" transform="rotate(-90 16 {middle:.1f})"'))
    return parts


def _series(number: int, series: Series, x: Axis, y: Axis) -> list[str]:
    colour = COLOURS[(number - 1) % len(COLOURS)]
    places = [(_LEFT + x.place(a) * _WIDTH, _TOP + (1 - y.place(b)) * _HEIGHT) for a, b in series.points]
    parts = []
    if len(places) > 1:
        path = " L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for (at, _), (low, high) in zip(places, series.spread, strict=False):
        top, bottom = (_TOP + (1 - y.place(value)) * _HEIGHT for value in (high, low))
        parts.append(f'<path d="M{at:.1f} {top:.1f}V{bottom:.1f}" stroke="{colour}"/>')
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places]
    at, height = places[-1]
    parts.append(_text(at + 6, height - 5, str(number), f'fill="{colour}" font-size="11"'))
    row = _TOP + 12 + _LINE * (number - 1)
    parts.append(f'<circle cx="{_LEFT + _WIDTH + 22}" cy="{row - 4}" r="3.5" fill="{colour}"/>')
    parts.append(_text(_LEFT + _WIDTH + 32, row, f"{number}  {series.title}"))
    return parts


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
