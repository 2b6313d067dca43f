"""What the conversions that round weights share, and a recipe that rounds different layers in different ways.

Only values change: a rounded weight is held in the model's own dtype, so the layers compute as they did. What is
measured is the error of the weights, and not that of a kernel that computes with packed ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from serve.config import Recipe
from serve.errors import LoadFailed
from serve.models.conversions._base import Change, Conversion, Part, copy_sharing, kind, module_of
from serve.models.conversions._weights import Place, places
from serve.models.scheme import dtype_name

Choice = Callable[[Place], Conversion | None]
_EVERYWHERE = "every linear layer but the head"


class Rounding(Conversion):
    """Weights rounded to a format's values, on every linear layer but the head.

    group: weights that share a scale, None = all of a row. grid: the format in words.
    """

    group: int | None = None

    @property
    def name(self) -> str:
        """The file's name, with the group size where one was asked for."""
        return super().name + (f"-g{self.group}" if self.group else "")

    @property
    @abstractmethod
    def grid(self) -> str:
        """How the values are rounded, as a phrase."""

    @property
    def counted(self) -> str:  # type: ignore[override]
        """How `stored` counts."""
        return f"linear layers {self.bits}, all else at 16 bits"

    @property
    @abstractmethod
    def bits(self) -> str:
        """What a weight takes, as a phrase that follows the layers: "at 8 bits with a float32 scale a row"."""

    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """The rounded model. Raises LoadFailed for one without a layer to convert."""
        return rounded(model, self.changes(model, name=name)), self.scheme(model, name=name)

    @property
    def by_rows(self) -> bool:
        """See `Conversion`."""
        return True

    def changes(self, model: Any, *, name: str) -> dict[str, Change]:
        """See `Conversion`."""
        return changes(model, self._choice, conversion=self.name, name=name)

    def scheme(self, model: Any, *, name: str) -> str:
        """See `Conversion`."""
        said = f"{self.name}: weights rounded to {self.grid} on {_EVERYWHERE}, computed in {dtype_name(model.dtype)}"
        return "; ".join([said, *notes(model, self._choice, conversion=self.name, name=name)])

    def parts(self, model: Any, *, name: str) -> Iterator[Part]:
        """The rounded weights in their format, all else at 16 bits."""
        return rounded_parts(model, self._choice, conversion=self.name, name=name)

    def note(self, rows: int, columns: int) -> str:
        """What a reader must know of how this format takes rows of that length; "" = nothing."""
        del rows, columns
        return ""

    def _choice(self, place: Place) -> Conversion | None:
        return None if place.end else self


class Mixed(Conversion):
    """A recipe: a conversion for all linear layers, and others for the layers that its patterns name."""

    def __init__(self, recipe: Recipe, find: Callable[[str], Conversion]) -> None:
        self.recipe = recipe
        self._base = find(recipe.base)
        self._layers = [(pattern, find(chosen)) for pattern, chosen in recipe.layers]

    @property
    def name(self) -> str:
        """The recipe as it could stand after `@`."""
        return str(self.recipe)

    counted = "layers in the formats of the recipe, all else at 16 bits"

    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """The model with every layer rounded as the recipe says. Raises LoadFailed for a pattern that decides nothing.

        Weights alone change, also those of layers in `bf16`: the model computes in the dtype that it has.
        """
        return rounded(model, self.changes(model, name=name)), self.scheme(model, name=name)

    @property
    def by_rows(self) -> bool:
        """See `Conversion`."""
        return all(each.by_rows for each in (self._base, *(chosen for _, chosen in self._layers)))

    def changes(self, model: Any, *, name: str) -> dict[str, Change]:
        """See `Conversion`."""
        return changes(model, self._choices(model, name=name), conversion=self._base.name, name=name)

    def scheme(self, model: Any, *, name: str) -> str:
        """See `Conversion`."""
        said = f"{self.name}: weights rounded layer by layer, computed in {dtype_name(model.dtype)}"
        choice = self._choices(model, name=name)
        return "; ".join([said, *notes(model, choice, conversion=self._base.name, name=name)])

    def parts(self, model: Any, *, name: str) -> Iterator[Part]:
        """Every layer in its own format, all else at 16 bits."""
        return rounded_parts(model, self._choices(model, name=name), conversion=self._base.name, name=name)

    def _choices(self, model: Any, *, name: str) -> Choice:
        """What the recipe chooses for each place. The last pattern that names a layer decides."""
        chosen: dict[int, Conversion | None] = {}
        met, decided = set(), set()
        for place in places(model, conversion=self._base.name, name=name):
            last = None
            for number, (pattern, _) in enumerate(self._layers):
                if any(names(pattern, path) for path in place.paths):
                    met.add(number)
                    last = number
            if last is not None:
                decided.add(last)
                chosen[id(place.weight)] = self._layers[last][1]
            else:
                chosen[id(place.weight)] = None if place.end else self._base
        for number, (pattern, conversion) in enumerate(self._layers):
            if number not in met:
                raise LoadFailed(
                    f"'{name}': the pattern '{pattern}' matches no layer; layers are called like {_examples(model)}"
                )
            if number not in decided:
                raise LoadFailed(
                    f"'{name}': '{pattern}={conversion.name}' decides no layer, since later patterns match all of its: "
                    "put it after them"
                )
        return lambda place: chosen[id(place.weight)]


def names(pattern: str, path: str) -> bool:
    """Whether a pattern names a layer: its dotted parts stand side by side in the path, `*` for any characters.

    `mlp` names `model.layers.3.mlp.up_proj`, `layers.1` does not name `model.layers.11.mlp.up_proj`.
    """
    from fnmatch import fnmatchcase

    wanted, parts = pattern.split("."), path.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start : start + len(wanted)], wanted)) for start in starts)


def rounded(model: Any, changes: Mapping[str, Change]) -> Any:
    """A copy with the weights that are named changed, sharing all else. Raises LoadFailed as the changes do."""
    tensors = model.state_dict(keep_vars=True)
    changed: dict[int, torch.Tensor] = {}
    for key, change in changes.items():
        if id(tensors[key]) not in changed:  # one that is tied has several names
            changed[id(tensors[key])] = change(tensors[key].detach())
    return copy_sharing(model, changed)


def changes(model: Any, choice: Choice, *, conversion: str, name: str) -> dict[str, Change]:
    """By its name in the state dict, how each chosen weight is rounded. Raises LoadFailed where none is chosen.

    A change raises LoadFailed for a shape that its conversion cannot take.
    """
    known = model.state_dict(keep_vars=True)
    found: dict[str, Change] = {}
    for place in places(model, conversion=conversion, name=name):
        chosen = choice(place)
        if chosen is not None:
            change = partial(_rounded_weight, place=place, conversion=chosen, name=name)
            found |= {path if path in known else f"{path}.weight": change for path in place.paths}
    if not found:
        raise LoadFailed(f"'{name}' has no linear layer that @{conversion} could convert")
    return found


def _rounded_weight(weight: torch.Tensor, *, place: Place, conversion: Conversion, name: str) -> torch.Tensor:
    """One weight rounded. It may be some rows of the place's, or one of its experts."""
    own = replace(place, weight=weight)
    try:
        return own.from_rows(conversion.round_rows(own.as_rows()))
    except LoadFailed as error:
        raise LoadFailed(f"'{name}', layer {place.paths[0]}: {error.message}") from error


def notes(model: Any, choice: Choice, *, conversion: str, name: str) -> list[str]:
    """What a reader must know of how layers of some shapes were rounded."""
    said: dict[str, int] = {}
    count = 0
    for place in places(model, conversion=conversion, name=name):
        chosen = choice(place)
        if chosen is None:
            continue
        count += 1
        note = chosen.note(place.rows, place.columns) if isinstance(chosen, Rounding) else ""
        if note:
            said[note] = said.get(note, 0) + 1
    return [f"{number} of {count} layers {note}" for note, number in said.items()]


def rounded_parts(model: Any, choice: Choice, *, conversion: str, name: str) -> Iterator[Part]:
    """What each tensor would take in a file: rounded ones in their format, all others at 16 bits."""
    found = {id(place.weight): place for place in places(model, conversion=conversion, name=name)}
    for path, parameter in model.named_parameters():
        place = found.get(id(parameter))
        chosen = choice(place) if place is not None else None
        if place is None or chosen is None:
            size, vector = {"BF16": 2 * parameter.numel()}, parameter.ndim < 2
            yield Part(module_of(path), parameter.numel(), "BF16", size, vector)
        else:
            types: Mapping[str, int] = chosen.size(place.rows, place.columns)
            yield Part(place.paths[0], parameter.numel(), chosen.name, types)


def check_groups(columns: int, group: int, *, name: str) -> None:
    """Raise LoadFailed where rows are not whole groups."""
    if columns % group:
        raise LoadFailed(
            f"rows of {columns:,} weights are not whole groups of {group} for @{name}: use another group size, or "
            "another conversion for this layer"
        )


def _examples(model: Any) -> str:
    found = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return ", ".join(found[:2]) or kind(next(model.parameters()))
