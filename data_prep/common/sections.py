"""Settings of a table that users write: the types of their values, and how they become files again."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from data_prep.common.toml_text import toml_text


def whole(value: Any) -> Any:
    """Takes a whole number written with a point or an exponent, such as 1e6, for the int that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1, lt=2**31), BeforeValidator(whole)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of settings, which takes nothing unknown, converts nothing and never changes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def as_dict(self) -> dict[str, Any]:
        """All settings, defaults included, in the types of TOML and JSON, which are read back as the same."""
        return self.model_dump(mode="json", exclude_none=True)

    def as_toml(self) -> str:
        """All settings as a file that reads back as the same."""
        return toml_text(self.as_dict())


class NamedSection(Section):
    """A table whose `name` says which of several kinds it is about, and so which of its other settings count."""

    name: str
