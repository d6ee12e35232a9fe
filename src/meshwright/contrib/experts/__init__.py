"""Send each token to a few of many MLPs: a mixture of experts, its kernels and its estimates.

Imports: `trainer.models`, `sharding`, `planning`, `predict`, `hardware`, `config`, jax. Used by: a block of
the Transformer and `trainer.step`, and without jax by `config` and `planning`; all by the entry point.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: configurations and plans need no jax
    from ._balance import with_moved_bias as with_moved_bias
    from ._balance import without_excess as without_excess
    from ._dispatch_estimates import Dispatch as Dispatch
    from ._dispatch_sizes import domains_of_layout as domains_of_layout
    from ._dispatch_sizes import sent_rows as sent_rows
    from .expert_rows import order_of as order_of
    from .expert_rows import places_of as places_of
    from .experts import expert_mlp as expert_mlp
    from .experts import expert_parameters as expert_parameters
    from .experts import route as route
    from .experts import router_input as router_input
    from .experts import whole_in_eight_bits as whole_in_eight_bits
    from .grouped_products import Axes as Axes
    from .grouped_products import Grouping as Grouping
    from .grouped_products import Tiles as Tiles
    from .grouped_products import by_matrix as by_matrix
    from .grouped_products import grouped_fp8_product as grouped_fp8_product
    from .grouped_products import grouped_product as grouped_product
    from .grouped_products import grouping_for as grouping_for
    from .grouped_products import of_matrices as of_matrices
    from .grouped_products import tiles_for as tiles_for
    from .grouped_products import tiles_of as tiles_of

__getattr__, __dir__ = names_on_first_use(__name__)
