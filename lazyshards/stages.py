"""What a leaf does to fill a tile, stage by stage, in words."""

from math import prod

from lazyshards.access import count_reads, is_gathered, is_kept, mapped_rows, wanted_map
from lazyshards.layout import Decoded, Layout, Planes
from lazyshards.selection import Cell, Rows

__all__ = ["stages_of", "stored_nbytes"]


def stored_nbytes(rows: Rows, layout: Layout, cell: Cell) -> int:
    """Return the bytes, in the files' own type, of the elements that are wanted; of encoded ones, once decoded.

    Parameters
    ----------
    rows : range or ndarray of int64
        Rows of the layout.
    layout : Layout
    cell : tuple
        The basic index on each row.
    """
    if layout.maps:
        return stored_nbytes(rows, layout.below, wanted_map(layout, cell).cell)
    stored = layout.dtype if layout.stored is None else layout.stored
    return len(rows) * stored.itemsize * prod([len(axis) for axis in cell if type(axis) is range])


def stages_of(rows: Rows, layout: Layout, cell: Cell) -> list[tuple[str, str]]:
    """Return the stages of a plan in the order in which bytes go through them, each as a name and what it does.

    The names are those of a profile: read, decode, convert, map.

    Parameters
    ----------
    rows : range or ndarray of int64
        Rows of the layout.
    layout : Layout
    cell : tuple
        The basic index on each row.
    """
    if not len(rows):
        return []
    if layout.maps:
        step = wanted_map(layout, cell)
        count = len(next(mapped_rows(rows, layout, step)))
        given = stages_of(rows, layout.below, step.cell)
        return [*given, ("map", f"{step.function}, on blocks of up to {count:,} rows"), *_casts(layout)]
    if is_kept(layout):
        return [("read", "rows copied from memory"), *_casts(layout)]
    kinds = {type(source) for source in layout.sources.values()}
    plain = len(layout.sources) < len(layout) or bool(kinds - {Decoded, Planes})
    how = "ranges, coalesced," if "://" in layout.root else "positional reads"
    stages = []
    if is_gathered(rows, layout, cell):
        return [("read", "rows copied out of memory maps of their files, straight into the result")]
    if plain:
        # The first two rows tell: whether what is wanted lies together, and as it is wanted.
        where = "through blocks" if count_reads(rows[:2], layout, cell)[2] else "straight into the result"
        stages.append(("read", f"plain bytes by {how} {where}"))
    if Planes in kinds:
        stages += [("read", f"columns by {how} through blocks"), ("convert", "columns to rows")]
    if Decoded in kinds:
        sources = layout.sources.values()
        formats = {source.format or layout.format for source in sources if isinstance(source, Decoded)}
        stages.append(("decode", f"by {' and '.join(sorted(formats))}"))
    if any(not dtype.isnative for dtype in layout.dtypes.values()):
        stages.append(("convert", "bytes swapped to this machine's order"))
    return stages + _casts(layout)


def _casts(layout: Layout) -> list[tuple[str, str]]:
    if not layout.cast_from:
        return []
    before = " or ".join(map(str, layout.cast_from))
    return [("convert", f"{' to '.join([before, *map(str, layout.steps), str(layout.dtype)])}")]
