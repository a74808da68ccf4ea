"""Tables and flowing text that fit a terminal's width without wrapping, for ``extproc top``.

A table gives up its less important columns first. Figures are never cut; names are cut in their middle, where
they differ least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich.cells import cell_len, chop_cells
from rich.text import Text

Row = TypeVar("Row")

GAP = 1

#: Columns of lower ranks have their place even if names must be cut for it.
ESSENTIAL = 5

CUT = "…"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column. ``width``: at least; ``rank``: the higher, the sooner it is left out.

    ``kind``: figures stand to the right and are shown whole or not at all; names and texts are as wide as
    they are, and cut to ``width`` where there is no room, a text at its end.
    """

    title: str
    width: int
    rank: int
    cell: Callable[[Row], Text | str]
    kind: Literal["figure", "name", "text"] = "figure"


def table(columns: Sequence[Column[Row]], rows: Iterable[Row], width: int | None) -> list[Text]:
    """The title line and a line for each row. ``width`` None: as wide as it gets."""
    cells = [[_text(column.cell(row)) for column in columns] for row in rows]
    natural = [
        max([column.width, cell_len(column.title), *[line[index].cell_len for line in cells]])
        for index, column in enumerate(columns)
    ]
    widths = _fit(columns, natural, width)
    titles = [Text(column.title, "bold") for column in columns]
    return [_line(columns, line, widths) for line in (titles, *cells)]


def _fit(columns: Sequence[Column[Row]], natural: Sequence[int], width: int | None) -> dict[int, int]:
    """Index of each column that is shown, and its width."""
    if width is None:
        return dict(enumerate(natural))
    widths: dict[int, int] = {}
    left = width + GAP

    def add(indices: Iterable[int], least: Sequence[int]) -> None:
        nonlocal left
        for index in indices:
            if least[index] + GAP > left:
                return
            widths[index] = least[index]
            left -= least[index] + GAP

    def widen() -> None:
        nonlocal left
        for index in by_rank:
            if index in widths:
                more = min(left, natural[index] - widths[index])
                widths[index] += more
                left -= more

    by_rank = sorted(range(len(columns)), key=lambda index: columns[index].rank)
    shortest = [n if c.kind == "figure" else c.width for c, n in zip(columns, natural, strict=True)]
    whole = [c.width if c.kind == "text" else n for c, n in zip(columns, natural, strict=True)]
    essential = [index for index in by_rank if columns[index].rank < ESSENTIAL]
    add(essential, shortest)
    widen()
    # What isn't essential must not cost a name its middle.
    if len(widths) == len(essential):
        add(by_rank[len(essential) :], whole)
        widen()
    return dict(sorted(widths.items()))


def _line(columns: Sequence[Column[Row]], cells: Sequence[Text], widths: dict[int, int]) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for index, width in widths.items():
        if line:
            line.append(" " * GAP)
        kind = columns[index].kind
        cell = ended(cells[index], width) if kind == "text" else shortened(cells[index], width)
        space = " " * (width - cell.cell_len)
        if kind == "figure":
            line.append(space).append_text(cell)
        else:
            line.append_text(cell).append(space)
    line.rstrip()
    return line


def shortened(text: Text, width: int) -> Text:
    """The same, or its beginning and end with a mark between."""
    if text.cell_len <= width:
        return text
    text = text.copy()
    text.rstrip()
    if text.cell_len <= width or width < 5:
        return ended(text, width)
    # The end of an address tells more workers apart than its beginning.
    tail = (width - 1) * 2 // 3
    plain = text.plain
    return Text(
        next(iter(chop_cells(plain, width - 1 - tail)))
        + CUT
        + next(iter(chop_cells(plain[::-1], tail)))[::-1],
        text.style,
    )


def ended(text: Text, width: int) -> Text:
    """The same, or its beginning with a mark behind."""
    copy = text.copy()
    copy.truncate(max(0, width), overflow="ellipsis")
    return copy


def flow(items: Iterable[Text | str], width: int | None, most: int | None = None) -> list[Text]:
    """Items beside each other, on as many lines as they need, ``most`` at most; the rest is left out."""
    lines: list[Text] = []
    for item in items:
        text = _text(item)
        if lines and (width is None or lines[-1].cell_len + 2 + text.cell_len <= width):
            lines[-1].append("  ").append_text(text)
        elif most is None or len(lines) < most:
            fresh = text if width is None else ended(text, width)
            lines.append(Text(no_wrap=True, overflow="crop").append_text(fresh))
        else:
            break
    return lines


def clean(text: str) -> str:
    """Without characters that could do something to a terminal."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _text(cell: Text | str) -> Text:
    return Text(clean(cell)) if isinstance(cell, str) else cell
