"""The form that a request's text must have, as it travels from a front end to the scheduler."""

from typing import Any

import msgspec


# Producer: front end, inside SamplingParams. Consumers: front end and Scheduler, which compile it.
class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of: ``json``, a JSON schema as an object or as its text; ``regex``, which the
    whole text matches; ``choice``, texts of which one is given; ``grammar``, in Lark or GBNF;
    ``json_object``, true for any JSON object.

    Raises:
        ValueError: none of them is given or several are, or there is nothing to choose from.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        fields = self.__struct_fields__
        given = [field for field in fields if getattr(self, field) not in (None, False)]
        if len(given) != 1:
            needed = f"exactly one of {', '.join(fields)} is needed"
            raise ValueError(f"{needed}, got {' and '.join(given) or 'none'}")
        if self.choice == ():
            raise ValueError("choice must hold at least one text, got none")

    @property
    def kind(self) -> str:
        """The field that is given."""
        fields = self.__struct_fields__
        return next(field for field in fields if getattr(self, field) not in (None, False))
