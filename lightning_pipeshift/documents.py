"""Documents that a user may have edited: read into dataclasses, and written as text.

The dataclasses say what a document has: their fields, the types of these, and what the constructors
check. pydantic checks the types, without conversions: ``"4"`` is no number, and ``true`` neither.
Python's own error for a damaged file is a KeyError; the errors of this module contain the field,
the value found, and the allowed values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, GetCoreSchemaHandler, Strict, TypeAdapter
from pydantic import ValidationError as PydanticError
from pydantic_core import PydanticCustomError, core_schema

from lightning_pipeshift.errors import PipeShiftError, PlanError
from lightning_pipeshift.files import MOST_BYTES, parse_json, read_text, shortened

T = TypeVar("T")

# The types of our own errors: of a field's value, of a field, of an object.
_VALUE: Final = "value"
_FIELD: Final = "field"
_OBJECT: Final = "object"
_MISSING: Final = "missing_field"
# What is allowed, by the types of pydantic's errors.
_ALLOWED: Final = {
    "int_type": "a whole number",
    "float_type": "a number (of at most 308 digits)",
    "string_type": 'a text; a number goes in quotes, as "4090"',
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "an object",
}


class Entry:
    """How an object of a document is read into a dataclass: ``Annotated[Swap, Entry()]``.

    A field whose type is a dataclass is read so without saying it.

    Args:
        optional: the fields that may be omitted; if not given, those that have a default.
        types: of fields that are read otherwise than the class says, and of fields that are only
            checked, because the class does not have them.
    """

    def __init__(self, optional: Collection[str] | None = None, **types: Any) -> None:
        self._optional = optional
        self._types = types

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        defaults = {field.name: field.default for field in fields(source)}
        hints = get_type_hints(source, include_extras=True)
        types = {**self._types, **{name: hints[name] for name in defaults}, **self._types}
        optional = self._optional
        if optional is None:
            optional = [name for name, default in defaults.items() if default is not MISSING]

        def read(value: Any, checked: Callable[[Any], dict[str, Any]]) -> Any:
            allowed = ", ".join(types)
            if not isinstance(value, dict):
                raise _refusal(_OBJECT, f" is {shown(value)}; it must be an object with {allowed}")
            for name in types:
                if name not in value and name not in optional:
                    raise _refusal(_MISSING, f" has no field {name!r}; add it")
            for name in value:
                if name not in types:
                    text = f" has an unknown field {shortened(repr(name))}; allowed: {allowed}"
                    raise _refusal(_OBJECT, text)
            found = checked(value)
            with _explained(_OBJECT):
                return source(**{name: found[name] for name in defaults if name in found})

        of_fields = {
            name: core_schema.typed_dict_field(
                handler.generate_schema(_strict(hint)), required=name not in optional
            )
            for name, hint in types.items()
        }
        return core_schema.no_info_wrap_validator_function(
            read, core_schema.typed_dict_schema(of_fields)
        )


def made(make: Callable[[Any], Any]) -> AfterValidator:
    """Metadata of a field's type: its value is made from the one that was read.

    Args:
        make: raises PipeShiftError if it refuses the value.
    """

    def read(value: Any) -> Any:
        with _explained(_FIELD):
            return make(value)

    return AfterValidator(read)


def check(is_allowed: Callable[[Any], bool], allowed: str) -> AfterValidator:
    """Metadata of a field's type: which values it may have, and how to say that."""

    def read(value: Any) -> Any:
        if not is_allowed(value):
            raise refusal(allowed)
        return value

    return AfterValidator(read)


def refusal(allowed: str) -> PydanticCustomError:
    """The error of a validator that refuses a field's value."""
    return _refusal(_VALUE, allowed)


def _refusal(kind: str, text: str) -> PydanticCustomError:
    """An error whose text continues the name of a field or an object, or says what is allowed."""
    return PydanticCustomError(kind, "{text}", {"text": text})


@contextmanager
def _explained(kind: str) -> Iterator[None]:
    try:
        yield
    except PipeShiftError as error:
        raise _refusal(kind, f": {error}") from error


# Longer ones are no counts, and the longest do not fit a float.
Whole = Annotated[
    int, Strict(), check(lambda n: abs(n) < 10**18, "a whole number of at most 18 digits")
]
Number = Annotated[float, Strict()]
Text = Annotated[str, Strict()]
_STRICT: Final[dict[Any, Any]] = {
    int: Whole,
    float: Number,
    str: Text,
    bool: Annotated[bool, Strict()],
}


def _strict(hint: Any) -> Any:
    """A type, read without conversions. None is no value of a document: it is the default of fields
    that may be omitted.
    """
    if get_origin(hint) is Annotated:
        return hint
    if is_dataclass(hint):
        return Annotated[hint, Entry()]
    inside = tuple(
        _strict(of) if of is not ... else of for of in get_args(hint) if of is not NoneType
    )
    if get_origin(hint) in (tuple, dict):
        return get_origin(hint)[inside]
    return _STRICT[hint] if hint in _STRICT else inside[0]


class Document(Generic[T]):
    """The reader of one kind of document.

    Args:
        of: the dataclass that a document becomes.
        name: of the document, in errors.
        again: what to do if a document cannot be used, such as ``make the plan again``.
        version: the only one that is read; None: these documents have no version.
        entry: as in :class:`Entry`.
    """

    def __init__(
        self, of: type[T], name: str, again: str = "", version: int | None = None, **entry: Any
    ) -> None:
        self._of = of
        self._name = name
        self._again = again
        self._version = version
        self._entry = Entry(**entry) if version is None else Entry(version=int, **entry)

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        annotated: Any = Annotated[self._of, self._entry]
        return TypeAdapter(annotated)

    def load(self, path: str | Path) -> T:
        """The value of a JSON document's file. Raises PlanError, naming the file."""
        text = read_document(path, self._name)
        try:
            return self.read(self.parse(text))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def parse(self, text: str) -> Any:
        """The content of a JSON document, for :meth:`read`. Raises PlanError if it is none."""
        try:
            return parse_json(text)
        except ValueError as error:
            raise PlanError(
                f"{self._name} is not a JSON document: {error}; take an undamaged copy, or"
                f" {self._again}"
            ) from error

    def read(self, value: object) -> T:
        """The value of a document that was parsed.

        Raises:
            PlanError: it is damaged, or of another version.
        """
        # Before the fields: those of another version may have other names.
        version = value.get("version", self._version) if isinstance(value, dict) else self._version
        if self._version is not None and version != self._version:
            raise PlanError(
                f"{self._name}: field 'version' is {shown(version)}; this PipeShift reads version"
                f" {self._version}: {self._again}, or use the version that made it"
            )
        try:
            return self._adapter.validate_python(value)
        except PydanticError as error:
            raise PlanError(self._message(error)) from None

    def _message(self, error: PydanticError) -> str:
        """The first error, with its place in the document."""
        first = error.errors(include_url=False)[0]
        kind, text, place = first["type"], first["msg"], list(first["loc"])
        field = ""
        if kind not in (_OBJECT, _MISSING):
            # The last name, and its index in what has that name.
            at = max(i for i, key in enumerate(place) if isinstance(key, str))
            field = f": field {_path('', place[at:])!r}"
            del place[at:]
            if kind != _FIELD:
                allowed = _ALLOWED.get(kind, text.removeprefix("Input should be "))
                text = f" is {shown(first['input'])}; it must be {allowed}"
        elif kind == _MISSING and self._again:
            text += f", or {self._again}"
        return _path(f"{self._name}: " if place else self._name, place) + field + text


def _path(path: str, place: Iterable[int | str]) -> str:
    """Extends a path, as ``the plan: layers[1]`` by ``.tensors`` and ``[0]``."""
    for key in place:
        if isinstance(key, int):
            path += f"[{key}]"
        elif key.isidentifier():
            path += f".{key}" if path and path[-1] != " " else key
        else:
            path += f"[{shortened(repr(key))}]"
    return path


def read_document(path: str | Path, name: str, most: int = MOST_BYTES) -> str:
    """The text of a document.

    Args:
        path: the file.
        name: of the document, in errors.
        most: how many bytes it may have.

    Raises:
        PlanError: it is not a file, too large, or not text.
    """
    try:
        return read_text(path, most)
    except (OSError, ValueError) as error:
        raise PlanError(f"{name} {str(path)!r} cannot be read: {error}") from error


def as_json(value: Any, by_line: Collection[str]) -> str:
    """A JSON document, to be read, edited and compared: one field per line.

    Args:
        value: an object.
        by_line: the fields, in it or in each other, of which each entry has a line of its own.
    """
    return _lines(value, by_line, "") + "\n"


def _lines(value: Any, by_line: Collection[str], margin: str) -> str:
    inner = margin + "  "

    def text(name: str, part: Any) -> str:
        return _lines(part, by_line, inner) if part and name in by_line else json.dumps(part)

    if isinstance(value, dict):
        entries = [f"{json.dumps(name)}: {text(name, part)}" for name, part in value.items()]
    else:
        entries = [text("", part) for part in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(inner + entry for entry in entries) + f"\n{margin}{end}"


def shown(value: object) -> str:
    """A value for a message: its beginning, if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # YAML has dates, JSON has none; and numbers can have too many digits.
        try:
            text = repr(value)
        except (ValueError, RecursionError):
            text = f"a very long {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + " ..."
