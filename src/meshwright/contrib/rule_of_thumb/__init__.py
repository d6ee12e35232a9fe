"""Compare the memory of a compiled step with the rule of thumb for it.

Imports: `planning`, `config`, `ledger`, `compiler`. Used by: `results`, by the entry point.
"""

from ._rule import rule_of_thumb as rule_of_thumb
