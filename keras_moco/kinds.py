"""Values of a declared type: checked, read from text, written as text."""

import numbers
import typing


def check_kind(name, value, kind):
    """Raises unless an argument is of its type; whole numbers are floats.

    Args:
        name: Str. What the argument is called.
        value: The argument.
        kind: Type, such as `int | None` or `tuple[float, float]`.
    """
    if not _is_kind(value, kind):
        raise ValueError(
            f"`{name}` is of type {kind_name(kind)}. Received: {value!r}"
        )


def kind_name(kind):
    """How an error names a type."""
    return str(kind) if typing.get_args(kind) else kind.__name__


def parse(text, kind):
    """Reads a value of a type.

    Args:
        text: Str, such as "none", "true" or "0.2,1".
        kind: Type, such as `int | None` or `tuple[float, float]`.

    Raises:
        ValueError: The text is no such value.

    Example:
        >>> parse("0.2,1", tuple[float, float])
        (0.2, 1.0)
    """
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        parts = [part for part in text.strip("()").split(",") if part.strip()]
        if ... in arguments:
            arguments = (arguments[0],) * len(parts)
        if len(parts) != len(arguments):
            raise ValueError
        return tuple(parse(p.strip(), a) for p, a in zip(parts, arguments))  # noqa: B905
    if type(None) in arguments:
        return None if text.lower() == "none" else parse(text, arguments[0])
    return kind(text)


def to_text(value):
    """Returns a value as `parse` reads it.

    Example:
        >>> to_text((0.2, 1.0))
        '0.2,1'
    """
    if isinstance(value, tuple):
        return ",".join(map(to_text, value))
    if isinstance(value, float):
        return f"{value:.15g}"
    return value if isinstance(value, str) else str(value).lower()


def _is_kind(value, kind):
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        if ... in arguments:
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(
            map(_is_kind, value, arguments)
        )
    if arguments:
        return any(_is_kind(value, part) for part in arguments)
    numeric = {int: numbers.Integral, float: numbers.Real}
    if kind in numeric and isinstance(value, bool):
        return False
    return isinstance(value, numeric.get(kind, kind))
