"""Say what a step's account assumes of experts where one device's experts may get more tokens than others'.

No byte depends on the load: a compiled step has buffers of a fixed size. With a capacity factor they are all
there is. Otherwise they hold an even share and a spare, and what exceeds them follows in rounds whose buffers
the program has too (`trainer.models.dropless`).
"""

from __future__ import annotations

from meshwright.compiler import Routing


def load_in_words(routing: Routing | None) -> tuple[str, ...]:
    """Return what is assumed of the experts' load, in words; nothing without experts."""
    if routing is None or routing.ways == 1:  # with one, each device multiplies its own tokens alone
        return ()
    if routing.is_capped:
        what = (
            "experts: all places of the buffers of model.capacity_factor are sent and multiplied, filled or"
        )
        return (f"{what} not, so that no model.expert_load changes the step",)
    if routing.load == 1.0:
        return ("experts: every device gets as many tokens as another (model.expert_load = 1.0)",)
    whole = ", all of them" if routing.load == routing.ways else ""
    return (
        f"experts: one device gets {routing.load:g} times the mean of tokens{whole} (model.expert_load): the "
        "time of its experts and their messages is multiplied by that; tokens beyond the buffers follow in "
        "further rounds, whose memory is counted",
    )
