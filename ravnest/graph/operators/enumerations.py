"""Enumeration arguments: the values that torch knows for each of them.

Kernels do not check these arguments: an unknown interpolation mode, for example, leaves the result unwritten.
"""

import re
from typing import Final

_REDUCTION: Final = (0, 1, 2)
"""none, mean, sum."""
_ROUNDING: Final = ("floor", "trunc")
_SPANNED: Final = ("valid", "same")

_BY_ARGUMENT: Final[dict[str, tuple[str | int, ...]]] = {
    "reduction": _REDUCTION,
    "rounding_mode": _ROUNDING,
    "approximate": ("none", "tanh"),
    "interpolation": ("linear", "lower", "higher", "midpoint", "nearest"),
    "indexing": ("ij", "xy"),
    "side": ("left", "right"),
    "padding_mode": (0, 1, 2),
    "interpolation_mode": (0, 1, 2),
    "compute_mode": (0, 1, 2),
}
_BY_OPERATOR: Final[dict[tuple[str, str], tuple[str | int, ...]]] = {
    ("pad", "mode"): ("constant", "reflect", "replicate", "circular"),
    ("embedding_bag", "mode"): (0, 1, 2),
    ("grid_sampler_3d", "interpolation_mode"): (0, 1),
    ("linalg_norm", "ord"): ("fro", "nuc"),
    ("linalg_matrix_norm", "ord"): ("fro", "nuc"),
    ("scatter", "reduce"): ("add", "multiply"),
    ("scatter_", "reduce"): ("add", "multiply"),
    ("scatter_reduce", "reduce"): ("sum", "prod", "mean", "amax", "amin"),
    ("scatter_reduce_", "reduce"): ("sum", "prod", "mean", "amax", "amin"),
    **{(f"conv{n}d", "padding"): _SPANNED for n in (1, 2, 3)},
}
_EQUATION: Final = re.compile(r"[A-Za-z., >-]{1,256}", re.ASCII)


def is_known(short_name: str, argument: str, value: str | int) -> bool:
    """Whether torch knows this value for this argument. For an argument without a list here, every number is known and
    no text is."""
    if short_name == "einsum" and argument == "equation":
        return isinstance(value, str) and _EQUATION.fullmatch(value) is not None
    values = _BY_OPERATOR.get((short_name, argument), _BY_ARGUMENT.get(argument))
    if isinstance(value, str):
        return values is not None and value in values
    # A list of texts belongs to an overload whose argument is a text.
    return values is None or isinstance(values[0], str) or value in values
