"""What the wrapped models have in common."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

Model: TypeAlias = Callable[..., Any]


def adopt_signature(wrapped: Any, fn: Model) -> None:
    """Gives a wrapped model the name, the documentation and the signature of the model."""
    vars(wrapped).update(
        {name: getattr(fn, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(fn, name)}, __wrapped__=fn
    )


def bound_arguments(fn: Model, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by name, defaults and extra keywords included; a keyword not given is None."""
    signature = inspect.signature(fn)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments = defaultdict(lambda: None, arguments | arguments.pop(name))
    return arguments
