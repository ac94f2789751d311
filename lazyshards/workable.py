"""NumPy's operators and functions of elements, as methods of a lazy view: what they make is lazy as well."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np

from lazyshards.arithmetic import View, combine, refuse
from lazyshards.layout import Layout
from lazyshards.reductions import Measurable
from lazyshards.selection import Selection

__all__ = ["Workable"]

_Operator: TypeAlias = Callable[[Any, object], Any]


def _operator(ufunc: np.ufunc, *, reflected: bool = False) -> _Operator:
    """Return the method of an operator: what the ufunc makes of the dataset and the other operand, lazily."""

    def method(self: "Workable", other: object) -> Any:  # what Python asks for if it is for the other to do
        if other is None or getattr(type(other), "__array_ufunc__", ...) is None:
            return NotImplemented
        return self._lazy(ufunc, (other, self) if reflected else (self, other))

    return method


def _view(operand: object) -> object:
    """Return what is selected of which layout, if the operand is a dataset."""
    if isinstance(operand, Workable):
        return View(operand._layout, operand._selection)  # noqa: SLF001  # what it is made of
    return operand


def _unary(ufunc: np.ufunc) -> Callable[[Any], Any]:
    return lambda self: self._lazy(ufunc, (self,))


class Workable(Measurable):
    """A lazy view with whose elements NumPy works lazily.

    What works on the elements of a row, alone or with scalars and arrays that broadcast against a row, becomes part of
    the view and is done when it is read; all else is refused with a TypeError that says what to do instead.
    """

    __slots__ = ("_engine", "_layout", "_selection")
    __array_priority__ = 1000

    def __init__(self, layout: Layout, selection: Selection, engine: str | None = None) -> None:
        self._layout = layout
        self._selection = selection
        self._engine = engine

    def _lazy(self, function: Callable[..., Any], operands: Sequence[object], output: int = 0) -> Self:
        """Return what a function of NumPy makes of datasets of the same rows and operands, lazily."""
        layout, selection = combine(function, [_view(operand) for operand in operands], output)
        return type(self)(layout, selection, self._engine)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, **options: object
    ) -> Self | tuple[Self, ...]:
        """Return what a ufunc makes of the elements, lazily."""
        name = f"np.{ufunc.__name__}"
        if method != "__call__":
            raise refuse(f"{name}.{method}")
        if options:
            raise refuse(f"{name} with {', '.join(f'{option}=' for option in options)}")
        if ufunc.signature is not None:
            raise refuse(f"{name}, which is not work on single elements,")
        made = tuple([self._lazy(ufunc, inputs, output) for output in range(ufunc.nout)])
        return made if ufunc.nout > 1 else made[0]

    def __array_function__(
        self, function: Any, types: Sequence[type], arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Do ``np.where`` lazily; all other functions of NumPy do what they do with anything that makes an array."""
        if function is np.where and len(arguments) == 3 and not options:
            return self._lazy(np.where, arguments)
        if not all([issubclass(kind, Workable | np.ndarray) for kind in types]):
            return NotImplemented
        return function._implementation(*arguments, **options)  # noqa: SLF001  # NumPy's way to do as without this

    __add__, __radd__ = _operator(np.add), _operator(np.add, reflected=True)
    __sub__, __rsub__ = _operator(np.subtract), _operator(np.subtract, reflected=True)
    __mul__, __rmul__ = _operator(np.multiply), _operator(np.multiply, reflected=True)
    __truediv__, __rtruediv__ = _operator(np.true_divide), _operator(np.true_divide, reflected=True)
    __floordiv__, __rfloordiv__ = _operator(np.floor_divide), _operator(np.floor_divide, reflected=True)
    __mod__, __rmod__ = _operator(np.remainder), _operator(np.remainder, reflected=True)
    __pow__, __rpow__ = _operator(np.power), _operator(np.power, reflected=True)
    __and__, __rand__ = _operator(np.bitwise_and), _operator(np.bitwise_and, reflected=True)
    __or__, __ror__ = _operator(np.bitwise_or), _operator(np.bitwise_or, reflected=True)
    __xor__, __rxor__ = _operator(np.bitwise_xor), _operator(np.bitwise_xor, reflected=True)
    __lshift__, __rlshift__ = _operator(np.left_shift), _operator(np.left_shift, reflected=True)
    __rshift__, __rrshift__ = _operator(np.right_shift), _operator(np.right_shift, reflected=True)
    __lt__, __le__ = _operator(np.less), _operator(np.less_equal)
    __gt__, __ge__ = _operator(np.greater), _operator(np.greater_equal)
    __neg__, __pos__ = _unary(np.negative), _unary(np.positive)
    __abs__, __invert__ = _unary(np.absolute), _unary(np.invert)

    def __matmul__(self, other: object) -> Self:
        raise refuse("the product @, which sums over elements,")

    __rmatmul__ = __matmul__

    def clip(self, min: object = None, max: object = None, out: None = None) -> Self:
        """Return the dataset with its elements kept between two bounds, lazily.

        Parameters
        ----------
        min, max : scalar, array or None
            The bounds; they broadcast against a row. None is no bound.
        out : None
            As np.clip() passes it on; nothing else is possible.

        Raises
        ------
        TypeError
            If an operand has an axis of rows, or an ``out`` is given.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("levels_0.npy", np.arange(6.0))
        >>> lazyshards.open_shards("levels_0.npy", engine="numpy").clip(1, 3).compute()
        array([1., 1., 2., 3., 3., 3.])
        """
        if out is not None:
            raise refuse("clip with out=")
        return self._lazy(np.clip, (self, min, max))

    def round(self, decimals: int = 0, out: None = None) -> Self:
        """Return the dataset with its elements rounded as np.round() does, lazily.

        Parameters
        ----------
        decimals : int
            Places after the point; negative ones are before it.
        out : None
            As np.round() passes it on; nothing else is possible.

        Raises
        ------
        TypeError
            If an ``out`` is given.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("parts_0.npy", np.array([0.26, 1.74]))
        >>> lazyshards.open_shards("parts_0.npy", engine="numpy").round(1).compute()
        array([0.3, 1.7])
        """
        if out is not None:
            raise refuse("round with out=")
        return self._lazy(np.round, (self, operator.index(decimals)))

    def where(self, condition: object, other: object) -> Self:
        """Return the dataset with ``other`` in place of the elements where a condition does not hold, lazily.

        Parameters
        ----------
        condition : ShardedDataset or array of bool
            Made of this dataset, such as ``ds > 0``, or an array that broadcasts against a row.
        other : scalar, array or ShardedDataset
            Likewise.

        Raises
        ------
        TypeError
            If an operand has an axis of rows, or is a dataset of other rows.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("signal_0.npy", np.array([-2.0, 1.0, 3.0]))
        >>> ds = lazyshards.open_shards("signal_0.npy", engine="numpy")
        >>> ds.where(ds > 0, 0).compute()
        array([0., 1., 3.])
        """
        return self._lazy(np.where, (condition, self, other))
