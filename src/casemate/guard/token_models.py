"""The model of a defense that decodes token by token."""

from __future__ import annotations

from typing import cast

from casemate.errors import CapabilityError
from casemate.protocols import Generator, TokenModel


def require_token_model(
    name: str, model: TokenModel | None, generator: Generator, instead: str = "", option: str = "model"
) -> TokenModel:
    """Returns the model of a defense; by default the generator, if it provides token probabilities.

    Args:
        name: Name of the defense, for the error.
        model: The defense's model.
        generator: The system's generator.
        instead: What else can be set, for the error; begins with a comma.
        option: The defense's option for its model, for the error.

    Raises:
        CapabilityError: If there is no model, and the generator provides no token probabilities.
    """
    if model is not None:
        return model
    if TokenModel in type(generator).__mro__:
        return cast(TokenModel, generator)
    raise CapabilityError(
        f"{name} needs token probabilities, and {type(generator).__name__} provides none; set {option!r}, for "
        f"example {{use: transformers, model: ...}}{instead}"
    )
