"""A sweep as a TOML file: the reference, the text and the windows, and the candidates with their names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evalgate.errors import InputError, UsageError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Listed(_Strict):
    """One candidate. bytes: of its weights, where they cannot be counted (an endpoint's)."""

    spec: str
    name: str | None = None
    bytes: int | None = Field(default=None, gt=0)


class Listing(_Strict):
    """What a list says; None = as the command line has it. Options have the command line's names, with `_` for `-`."""

    ref: str | None = None
    candidates: list[Listed] = Field(min_length=1)
    data: str | None = None
    split: str | None = None
    text_column: str | None = None
    split_on: str | None = None
    windows: Literal["disjoint", "sliding", "llama.cpp", "lm-eval"] | None = None
    context: int | None = Field(None, ge=2)
    stride: int | None = Field(None, ge=1)
    limit: int | None = Field(None, ge=1)
    positions: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0)
    confidence: float | None = Field(None, gt=0, lt=1)
    device: str | None = None
    logits: Literal["float32", "model"] | None = None
    noise_floor: bool | None = None

    @field_validator("candidates", mode="before")
    @classmethod
    def _specs(cls, given: object) -> object:
        """A plain string is a spec."""
        return [{"spec": one} if isinstance(one, str) else one for one in given] if isinstance(given, list) else given

    @property
    def options(self) -> dict[str, Any]:
        """The options that it gives, by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name not in ("ref", "candidates")}
        return {name: value for name, value in named.items() if value is not None}


def read_listing(path: Path) -> Listing:
    """Read a list. Raises InputError where it cannot be read, UsageError naming the key that is wrong."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not TOML ({error}): correct it", file=str(path)) from None
    try:
        found = Listing.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UsageError(f"{path} has the key {where}, which no list takes: remove it", file=str(path)) from None
        raise UsageError(f"{path}, {where}: {first['msg']}", file=str(path)) from None
    specs = [entry.spec for entry in found.candidates]
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise UsageError(f"{path} names {twice} twice: name each candidate once", file=str(path))
    return found
