"""Typed values as plain data (what JSON has, and arrays), and the strict way back: one use of cattrs for all.

Whatever is kept and read again is a dataclass: events, states, tables of settings, headers. Its annotations
are the format; nothing is written out a second time by hand. On the way back a field that is missing takes
its default, so that what older releases have written is read; one that there is not, and a value of another
type, is a `FieldError`, which names it.

Numbers are as they were written: digests are of their text, and a whole number stays one where a float may
stand.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from cattrs import BaseValidationError, Converter, transform_error
from cattrs.cols import (
    homogenous_tuple_structure_factory,
    is_mapping,
    list_structure_factory,
    mapping_structure_factory,
)
from cattrs.errors import ForbiddenExtraKeysError, StructureHandlerNotFoundError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from anabranch.core.errors import UPGRADE, AnabranchError, StoreNewer
from anabranch.core.later import LATER_KEY

T = TypeVar("T")
Number = Callable[[int | float], int | float]
SHOWN_MAX = 80  # characters of a value in a message


class FieldError(ValueError):
    """Plain data are not what a type asks for: the place, and why. Callers say of what they are."""


class UnknownField(FieldError):
    """They say more than is known here: what a program has kept, a newer release has written then."""


def of_python(value: Any) -> Any:
    """Numbers and arrays of numpy, which seeds and grids often are, as Python's own; in lists too.

    Of a class of strings, as `StrEnum` makes them, its text.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(of_python(each) for each in value)
    if type(value) is dict:
        return {name: of_python(each) for name, each in value.items()}
    return value


def as_written(number: float) -> int | float:
    """Any number."""
    return number


def finite(number: float) -> int | float:
    """As it was written. Raises `ValueError` for what no float is, or is not finite."""
    try:
        is_finite = math.isfinite(number)
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ValueError(_wanted("a finite number", number))
    return number


def real(number: float) -> float:
    """A float, and finite. Raises `ValueError`."""
    return float(finite(number))


def make_converter(number: Number = as_written) -> Converter:
    """A converter of its own, to which more may be registered; `number` is what is made of a float."""
    made = Converter(forbid_extra_keys=True)
    for plain_type in (int, str, bool):
        made.register_structure_hook(plain_type, _exactly(plain_type))
    made.register_structure_hook(float, _number_hook(number))
    made.register_structure_hook(StrEnum, _member)
    made.register_unstructure_hook(StrEnum, lambda member: member.value)
    made.register_structure_hook_func(_is_array, _array)
    made.register_unstructure_hook_func(_is_array, lambda array: array)
    made.register_structure_hook_factory(_is_choice, lambda of: _choice(of, made))
    for fits, wanted, factory in _CONTAINERS:
        made.register_structure_hook_factory(fits, _guarded(wanted, factory, made))
    made.register_structure_hook_factory(_is_record, lambda of: _record(made, of))
    made.register_unstructure_hook_factory(_has_grown, lambda of: _without_unsaid(made, of))
    return made


def written(
    converter: Converter, cls: type[Any], later: Iterable[str] = (), absent: Iterable[str] = (), **more: Any
) -> None:
    """Register which fields of a class are written, and how. All are read.

    `later`: not where they are as by default, because there was a time when they were not there. `absent`:
    never. `more`: an `override` of cattrs for each.
    """
    given: dict[str, Any] = {name: override(omit_if_default=True) for name in later}
    given |= {name: override(omit=True) for name in absent} | more
    converter.register_unstructure_hook(cls, make_dict_unstructure_fn(cls, converter, **given))


def from_plain(data: Any, cls: type[T], converter: Converter) -> T:
    """The value of plain data. Raises `FieldError`: the first place at which they are none of this type.

    Of fields that there are not, at any place, it is an `UnknownField`.
    What a class itself finds wrong, in an error of ours, is raised as it is.
    """
    try:
        return converter.structure(data, cls)
    except BaseValidationError as error:
        if (ours := _ours(error)) is not None:
            raise ours from None
        unknown = error.subgroup(ForbiddenExtraKeysError)
        reason, _, place = transform_error(unknown or error, "", _reason)[0].rpartition(" @ ")
        kind = FieldError if unknown is None else UnknownField
        raise kind(f"{place.removeprefix('.')} {reason}".strip()) from error
    except (StructureHandlerNotFoundError, TypeError, ValueError) as error:
        raise FieldError(_reason(error, cls)) from error


def from_kept(data: Any, cls: type[T], place: object) -> T:
    """The value of plain data that a program has kept at a place, such as a file.

    Raises `StoreNewer` where a newer release has written them, `FieldError` where nobody has.
    """
    try:
        return from_plain(data, cls, _kept)
    except UnknownField as error:
        raise StoreNewer(f"{place} {error}: {UPGRADE}") from error


def _ours(error: BaseException) -> AnabranchError | None:
    """The first thing that was wrong, if it is an error of ours."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, AnabranchError) else None


Hook = Callable[[Any, Any], Any]


def _exactly(plain_type: type[Any]) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not plain_type:
            raise TypeError(_wanted(plain_type.__name__, value))
        return value

    return hook


def _member(value: Any, cls: Any) -> Any:
    if value not in list(cls):
        raise ValueError(_wanted(f"one of {', '.join(map(repr, map(str, cls)))}", value))
    return cls(value)


def _number_hook(number: Number) -> Hook:
    def hook(value: Any, _: Any) -> int | float:
        if type(value) is not float and type(value) is not int:
            raise TypeError(_wanted("float", value))
        return number(value)

    return hook


def _is_array(of: Any) -> bool:
    return of is np.ndarray or typing.get_origin(of) is np.ndarray


def _array(value: Any, _: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(_wanted("an array", value))
    return value


def _is_choice(of: Any) -> bool:
    """Of a union of more than one type beside None, each of which is told by its Python type alone."""
    if typing.get_origin(of) not in (types.UnionType, typing.Union):
        return False
    members = [m for m in typing.get_args(of) if m is not types.NoneType]
    return len(members) > 1 and all(_python_type(m) in (int, float, str, bool, list, dict) for m in members)


def _choice(of: Any, converter: Converter) -> Hook:
    members = typing.get_args(of)
    by_type = {_python_type(m): m for m in members}
    if float in by_type:
        by_type.setdefault(int, by_type[float])
    hooks = {t: (converter.get_structure_hook(m), m) for t, m in by_type.items() if t is not types.NoneType}
    names = " or ".join(t.__name__ for t in map(_python_type, members))

    def hook(value: Any, _: Any) -> Any:
        if value is None and types.NoneType in members:
            return None
        if type(value) not in hooks:
            raise TypeError(_wanted(names, value))
        structure, member = hooks[type(value)]
        return structure(value, member)

    return hook


def _python_type(of: Any) -> type[Any]:
    found: type[Any] = typing.get_origin(of) or of
    return found


def _is_list(of: Any) -> bool:
    return typing.get_origin(of) is list


def _is_tuple(of: Any) -> bool:
    return typing.get_origin(of) is tuple and typing.get_args(of)[1:] == (...,)


_CONTAINERS: tuple[tuple[Callable[[Any], bool], type[Any] | tuple[type[Any], ...], Any], ...] = (
    (_is_list, (list, tuple), list_structure_factory),
    (_is_tuple, (list, tuple), homogenous_tuple_structure_factory),
    (is_mapping, Mapping, mapping_structure_factory),
)


def _guarded(wanted: Any, factory: Any, converter: Converter) -> Callable[[Any], Hook]:
    """A container is made of one: a text is no list of letters."""
    name = "a table" if wanted is Mapping else "a list"

    def guarded(of: Any) -> Hook:
        inner = factory(of, converter)

        def hook(value: Any, cls: Any) -> Any:
            if not isinstance(value, wanted):
                raise TypeError(_wanted(name, value))
            return inner(value, cls)

        return hook

    return guarded


def _is_record(of: Any) -> bool:
    return isinstance(of, type) and is_dataclass(of)


def _record(converter: Converter, cls: type[Any]) -> Hook:
    inner = make_dict_structure_fn(cls, converter)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(_wanted("a table", value))
        return inner(value, cls)

    return hook


def _has_grown(of: Any) -> bool:
    return _is_record(of) and bool(_later(of))


def _later(cls: type[Any]) -> dict[str, Any]:
    """The fields that were not always there, with their defaults."""
    return {f.name: f.default for f in fields(cls) if f.metadata == LATER_KEY}


def _without_unsaid(converter: Converter, cls: type[Any]) -> Callable[[Any], dict[str, Any]]:
    inner, later = make_dict_unstructure_fn(cls, converter), _later(cls)

    def hook(record: Any) -> dict[str, Any]:
        plain = inner(record)
        for name, default in later.items():
            value = getattr(record, name)
            if value is default or (not isinstance(value, np.ndarray) and value == default):
                del plain[name]
        return plain

    return hook


def _wanted(names: str, value: Any) -> str:
    shown = repr(value)
    return f"must be {names}, not {shown if len(shown) <= SHOWN_MAX else shown[:SHOWN_MAX] + '...'}"


def _reason(error: BaseException, _: Any) -> str:
    """Why one field is none."""
    if isinstance(error, KeyError):
        return "is missing"
    if isinstance(error, ForbiddenExtraKeysError):
        return f"has unknown fields: {', '.join(sorted(map(str, error.extra_fields)))}"
    return str(error)


_kept = make_converter(finite)
