"""Define the reference models: pure functions over declared parameters (docs/dev/adr/0001).

A new kind of model is a subclass of `Model` in a module of its own, and one line of `MODELS`; or it is
outside the core, and an entry point of `meshwright.toy_models` has its name.
Imports: `config`, `registry`, `sharding`, jax. Used by: `step`, and rooms of `contrib`.
"""

from __future__ import annotations

from importlib import import_module

from meshwright import config as _config

from ._base_model import RESIDUAL as RESIDUAL
from ._base_model import STATELESS as STATELESS
from ._base_model import Batch as Batch
from ._base_model import Context as Context
from ._base_model import Model as Model
from ._base_model import Outcome as Outcome
from ._base_model import Parameter as Parameter
from ._base_model import Tree as Tree
from ._base_model import initial_parameters as initial_parameters
from ._base_model import is_parameter as is_parameter
from ._base_model import with_experts_over as with_experts_over

TOY_MODELS = "meshwright.toy_models"
MODELS: dict[type[_config.ModelKind], tuple[str, str] | type[Model]] = {
    _config.TransformerModel: ("transformer", "Transformer"),
}
"""By kind of record: the model's class, or its module here and its name, to import it when it is used."""


def model_of(config: _config.ModelKind) -> Model:
    """Return the model that the `model` section of a config describes.

    >>> from meshwright.config import load_config
    >>> model_of(load_config("linear").model).parameters()["weight"].dims
    ('embed', 'one')
    """
    found = MODELS.get(type(config))
    if found is None:
        from meshwright.registry import load_registered

        found = load_registered(TOY_MODELS, config.kind)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(found, tuple):
        found = getattr(import_module(f"{__name__}.{found[0]}"), found[1])
    return found(config)
