"""Return the fleet that a user names. "local" is what is attached to this machine."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.hardware import Fleet


def fleet_of(on: str | Fleet | None) -> Fleet:
    """Return the fleet that a text names; "local" names the attached devices.

    Raises:
        InputError: no fleet is named, or it cannot be read.
    """
    if on is None:
        raise InputError("no fleet is named", hint='on="8xH100"; `meshwright fleets` lists chips')
    if isinstance(on, Fleet):
        return on
    if on != "local":
        return Fleet.parse(on)
    from meshwright.trainer.loop import local_fleet  # imports jax to query the attached devices

    return local_fleet()
