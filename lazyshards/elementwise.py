"""Work on each element of a row, as data: NumPy's functions, their operands, and how they follow one another.

Such work knows no rows beside the one that it is given, so that it can be done in any blocks, on any tile, in any
process; and since it is done element by element, what is not wanted of its result is not wanted of its operands.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.functions import NamedFunction
from lazyshards.selection import Cell, as_slice, cell_index

__all__ = ["Applied", "Constant", "Elementwise", "Node", "Taken", "applied", "cast", "constant"]

_MOST_SHOWN = 4
"""Functions within one another that are spelled out."""
_SUB_BLOCK_NBYTES = 512 << 10
"""Bytes of the rows that go through all functions together: more would leave the cache, fewer cost a call each."""

_ROWS = 0
"""What stands for the rows where nodes are counted."""

Constant: TypeAlias = Any
"""A scalar of Python or NumPy, None, or a read-only array that broadcasts against a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """The rows that are worked on, restricted to a cell."""

    cell: Cell
    """The basic index on each row, as it was before anything was done to it."""
    dtype: np.dtype[np.generic]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of what the cell keeps of a row."""
        return tuple([len(axis) for axis in self.cell if type(axis) is range])

    @property
    def digest(self) -> bytes:
        """What tells it from other nodes."""
        cell = [(axis.start, axis.step, len(axis)) if type(axis) is range else axis for axis in self.cell]
        return _digest(repr(("rows", cell, _text(self.dtype))))

    @property
    def depth(self) -> int:
        """Functions that it went through."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """What a function makes of its operands. Made by `applied` and `cast`."""

    function: NamedFunction | None
    """A ufunc, ``np.where``, ``np.clip`` or ``np.round``; None for a cast to the dtype."""
    operands: "tuple[Node | Constant, ...]"
    output: int
    """Which of a ufunc's outputs it is."""
    dtype: np.dtype[np.generic]
    """Of the result, in native byte order."""
    row_shape: tuple[int, ...]
    """Of the result."""
    digest: bytes
    """What tells it from other nodes: all functions and operands, with every byte of them."""
    depth: int
    """Functions within one another."""


Node: TypeAlias = Taken | Applied


def constant(value: object) -> Constant:
    """Return an operand that nobody can change any more: scalars as they are, since Python's promote as Python's.

    Raises
    ------
    TypeError
        If it is no plain value.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, np.generic):
        return value
    array = np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array cannot be an operand of lazy work: fill it, with .filled(), or compute() first")
    if array.dtype.hasobject:
        raise TypeError(
            f"a {type(value).__name__} cannot be an operand of lazy work: expected a scalar, or an array of plain "
            "values that broadcasts against a row; compute() first, or use map()"
        )
    array = np.array(array, array.dtype.newbyteorder("="), order="C")
    array.flags.writeable = False
    return array


def applied(function: NamedFunction, operands: Sequence["Node | Constant"], output: int = 0) -> Applied:
    """Return what a function makes of its operands: what NumPy says of none of the rows, it says of all.

    Parameters
    ----------
    function : NamedFunction
    operands : sequence
        Nodes, and what `constant` returned.
    output : int
        Which of a ufunc's outputs.
    """
    axes = max([len(operand.row_shape) for operand in operands if isinstance(operand, Node)])
    axes = max([axes, *[operand.ndim for operand in operands if isinstance(operand, np.ndarray)]])
    empty = [
        _aligned(np.empty((0, *operand.row_shape), operand.dtype), axes) if isinstance(operand, Node) else operand
        for operand in operands
    ]
    with np.errstate(all="ignore"):
        found = function.function(*empty)
    made = np.asarray(found[output] if isinstance(found, tuple) else found)
    return _node(function, tuple(operands), output, made.dtype.newbyteorder("="), made.shape[1:])


def cast(node: Node, dtype: np.dtype[np.generic]) -> Applied:
    """Return a node cast to another dtype."""
    return _node(None, (node,), 0, dtype, node.row_shape)


def _node(
    function: NamedFunction | None,
    operands: "tuple[Node | Constant, ...]",
    output: int,
    dtype: np.dtype[np.generic],
    row_shape: tuple[int, ...],
) -> Applied:
    parts = [operand.digest if isinstance(operand, Node) else _constant_digest(operand) for operand in operands]
    depth = 1 + max([operand.depth for operand in operands if isinstance(operand, Node)])
    digest = _digest(repr((repr(function), output, _text(dtype), row_shape, parts)))
    return Applied(function, operands, output, dtype, row_shape, digest, depth)


def _constant_digest(value: Constant) -> bytes:
    if isinstance(value, np.ndarray | np.generic):
        return _digest(repr(("array", _text(value.dtype), value.shape)), value.tobytes())
    return _digest(repr((type(value).__name__, value)))


def _digest(text: str, data: bytes = b"") -> bytes:
    return blake2b(text.encode() + b"\0" + data, digest_size=16).digest()


def _text(dtype: np.dtype[np.generic]) -> str:
    return repr(dtype.descr) if dtype.names else dtype.str


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """All that is done to each element of a row, from the rows that are read to what is made of them."""

    root: Node
    _uses: Counter[int] = field(init=False, repr=False)
    """How often each node is an operand; the rows, however often they are named, are one."""
    _leaves: dict[Cell, Taken] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        uses: Counter[int] = Counter()
        leaves: dict[Cell, Taken] = {}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Taken):
                leaves[node.cell] = node
                continue
            for operand in node.operands:
                if isinstance(operand, Node):
                    uses[_key(operand)] += 1
                    if isinstance(operand, Taken) or uses[_key(operand)] == 1:
                        waiting.append(operand)
        object.__setattr__(self, "_uses", uses)
        object.__setattr__(self, "_leaves", leaves)

    def __reduce__(self) -> tuple[type["Elementwise"], tuple[Node]]:
        return Elementwise, (self.root,)

    def __eq__(self, other: object) -> bool:
        return self.root.digest == other.root.digest if isinstance(other, Elementwise) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.root.digest)

    def __repr__(self) -> str:
        return _shown(self.root, _MOST_SHOWN)

    def given(self, row_shape: tuple[int, ...]) -> Cell:
        """Return the basic index on each row that has to be read.

        Parameters
        ----------
        row_shape : tuple of int
            Of the rows that are worked on.
        """
        if len(self._leaves) == 1:
            return next(iter(self._leaves))
        return tuple(map(range, row_shape))

    def cut(self, cell: Cell) -> "Elementwise":
        """Return the work that makes no more than a cell of each row of the result."""
        if all([type(axis) is range and axis == range(n) for axis, n in zip(cell, self.root.row_shape, strict=True)]):
            return self
        return Elementwise(_cut(self.root, cell, {}))

    def cast(self, *dtypes: np.dtype[np.generic]) -> "Elementwise":
        """Return the work with the result cast, to one dtype after the other."""
        root = self.root
        for dtype in dtypes:
            root = cast(root, dtype)
        return self if root is self.root else Elementwise(root)

    def run(self, block: npt.NDArray[np.generic], out: npt.NDArray[np.generic], given: Cell) -> None:
        r"""Work on a block of rows, of which nothing is left, and write the result.

        What is no number becomes NaN or infinite, or wraps around, without a warning.

        Parameters
        ----------
        block : ndarray, (n, \*shape of ``given``)
            May be written to.
        out : ndarray, (n, \*row shape)
            Of the result's dtype; it may be ``block`` itself.
        given : tuple
            The cell of each row that ``block`` holds.
        """
        if not out.size:
            return
        each = max(block[:1].nbytes, out[:1].nbytes, 1)
        count = max(1, _SUB_BLOCK_NBYTES // each)
        with np.errstate(all="ignore"):
            for start in range(0, len(out), count):
                part = out[start : start + count]
                _Run(block[start : start + count], given, self._uses, single=len(self._leaves) == 1).write(
                    self.root, part
                )


class _Run:
    """One block on its way through all functions."""

    def __init__(self, block: npt.NDArray[np.generic], given: Cell, uses: Counter[int], *, single: bool) -> None:
        self._block = block
        self._given = given
        self._left = dict(uses)
        self._made: dict[int, npt.NDArray[np.generic]] = {}
        self._single = single

    def write(self, root: Node, out: npt.NDArray[np.generic]) -> None:
        """Write the value of the last node."""
        found = self._value(root, out)
        if found is not out:
            np.copyto(out, found, casting="unsafe")

    def _value(self, node: Node, out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        """Return the value of a node, in ``out`` where it can be put there."""
        if isinstance(node, Taken):
            if node.cell == self._given:
                return self._block
            return self._block[(slice(None), *cell_index(node.cell))]
        found = self._made.get(id(node))
        if found is None:
            found = self._apply(node, out)
            if self._left.get(id(node), 0) > 1:
                self._made[id(node)] = found
        return found

    def _apply(self, node: Applied, out: npt.NDArray[np.generic] | None) -> npt.NDArray[np.generic]:
        # All operands first: until then, what one of them is made of may be needed for another.
        values = [self._value(operand) if isinstance(operand, Node) else operand for operand in node.operands]
        free = out
        for i, operand in enumerate(node.operands):
            if not isinstance(operand, Node):
                continue
            value, key = values[i], _key(operand)
            self._left[key] -= 1
            if not self._left[key]:
                self._made.pop(key, None)
                is_own = self._single or isinstance(operand, Applied)
                if free is None and is_own and value.dtype == node.dtype and operand.row_shape == node.row_shape:
                    free = value
            values[i] = _aligned(value, len(node.row_shape))
        if node.function is None:
            if free is None:
                return np.asarray(values[0].astype(node.dtype))
            np.copyto(free, values[0], casting="unsafe")
            return free
        function = node.function.function
        if isinstance(function, np.ufunc) and function.nout > 1:
            found: npt.NDArray[np.generic] = function(*values)[node.output]
        elif function is np.where:
            found = np.where(*values)
        elif function is np.round and node.dtype.kind in "iu":
            # Before the point NumPy divides, whose floating quotients it puts in no place for integers.
            found = node.function.function(*values)
        else:
            found = function(*values, out=free)
        return found


def _aligned(value: npt.NDArray[np.generic], axes: int) -> npt.NDArray[np.generic]:
    """Return rows with as many axes of their own as are asked for, the new ones first, as NumPy aligns shapes."""
    missing = axes - (value.ndim - 1)
    return value[(slice(None), *[None] * missing)] if missing > 0 else value


def _cut(node: Node, cell: Cell, done: dict[int, Node]) -> Node:
    """Return the node of which no more than a cell is made."""
    found = done.get(id(node))
    if found is not None:
        # A node may be cut in one way only where it is of the shape of what it becomes a part of.
        return found
    if isinstance(node, Taken):
        return Taken(_compose(node.cell, cell), node.dtype)
    operands: list[Node | Constant] = []
    for operand in node.operands:
        if isinstance(operand, Node):
            wanted = _part(operand.row_shape, node.row_shape, cell)
            operands.append(_cut(operand, wanted, done if operand.row_shape == node.row_shape else {}))
        elif isinstance(operand, np.ndarray) and 0 < operand.ndim <= len(node.row_shape):
            part = operand[(*cell_index(_part(operand.shape, node.row_shape, cell)), ...)]
            # Of one axis at least: NumPy before 2.0 promotes arrays without axes in another way.
            operands.append(part if part.ndim else part.reshape(1))
        else:
            operands.append(operand)
    shape = tuple([len(axis) for axis in cell if type(axis) is range])
    made = _node(node.function, tuple(operands), node.output, node.dtype, shape)
    done[id(node)] = made
    return made


def _part(shape: tuple[int, ...], row_shape: tuple[int, ...], cell: Cell) -> Cell:
    """Return the cell of an operand that broadcasts to ``row_shape``, where that of the result is ``cell``."""
    last = len(row_shape) - len(shape)
    part: list[range | int] = []
    for size, whole, axis in zip(shape, row_shape[last:], cell[last:], strict=True):
        if size == whole:
            part.append(axis)
        else:
            part.append(range(1) if type(axis) is range else 0)
    return tuple(part)


def _compose(outer: Cell, inner: Cell) -> Cell:
    """Return the one cell that picks ``inner`` of what ``outer`` keeps."""
    left = iter(inner)
    composed: list[range | int] = []
    for axis in outer:
        if type(axis) is not range:
            composed.append(axis)
            continue
        kept = next(left)
        composed.append(axis[as_slice(kept)] if type(kept) is range else axis[kept])
    return tuple(composed)


def _key(node: Node) -> int:
    return id(node) if isinstance(node, Applied) else _ROWS


def _shown(value: Node | Constant, levels: int) -> str:
    """Return a node or operand for a person."""
    if isinstance(value, Taken):
        return "rows" if all([type(axis) is range for axis in value.cell]) else f"rows{list(value.cell)}"
    if isinstance(value, Applied):
        if not levels:
            return "..."
        inner = ", ".join([_shown(operand, levels - 1) for operand in value.operands])
        if value.function is None:
            return f"astype({inner}, {value.dtype})"
        part = f"[{value.output}]" if value.output else ""
        return f"{str(value.function).removeprefix('numpy.')}({inner}){part}"
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{value.dtype} array of shape {value.shape}"
    return str(value) if isinstance(value, np.ndarray | np.generic) else repr(value)
