"""Say in words why a configuration or an option is refused, and which of ours another program's name means.

Imports: `config`, `errors`. Used by: `config` and `cli`, by the entry point; the program that makes the page
of keys.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._elsewhere import keys_meant as keys_meant
    from ._elsewhere import keys_named as keys_named
    from ._elsewhere import names_elsewhere as names_elsewhere
    from ._elsewhere import value_meant as value_meant
    from ._option_hints import option_hint as option_hint
    from ._refusals import file_hint as file_hint
    from ._refusals import foreign_hint as foreign_hint
    from ._refusals import near_presets as near_presets
    from ._refusals import refusal as refusal

__getattr__, __dir__ = names_on_first_use(__name__)
