"""Declare what each value of `offload` keeps in the hosts' memory; a room outside the core does it."""

from __future__ import annotations

OFFLOADED = {
    "none": (),
    "optimizer": ("moments",),
    "activations": ("activations",),
    "both": ("moments", "activations"),
    "state": ("moments", "parameters"),
    "all": ("moments", "parameters", "activations"),
}
"""The parts of a run that wait in the hosts' memory, by the value of `offload`."""
