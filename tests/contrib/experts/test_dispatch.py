"""To how many hosts or racks a token's row is sent once, in the step and in the planner's estimates."""

import numpy as np
import pytest

from meshwright.config import Layout, load_config, resolve_dispatch
from meshwright.hardware import Fleet
from meshwright.planning import estimate, parsed_knobs, space_of
from meshwright.predict import machine_of

QWEN = ("model.num_experts=128", "model.experts_per_token=8")


@pytest.mark.parametrize(
    ("fleet", "layout", "changes", "domains"),
    [
        ("16xH100", "expert=16", (), 2),
        ("64xH100", "fsdp=8,expert=8", (), None),  # inside a host
        ("64xH100", "expert=8,fsdp=8", (), 8),  # each device of a group in a host of its own
        ("64xH100", "expert=16,fsdp=4", (), 8),
        ("128xH100", "expert=128", (), None),  # 16 hosts, to each of which half a choice goes
        ("128xH100", "expert=128", ("model.router_groups=16", "model.router_groups_chosen=4"), 16),
        ("144xGB200", "fsdp=9,expert=16", (), None),  # a group straddles the racks of 72 unevenly
        ("144xGB200", "context=9,expert=4,tensor=4", ("fold_experts=both",), 2),
        ("24xH100", "expert=4,data=6", (), None),  # in hosts 0, 0, 1 and 2
        ("16xA100-PCIe-80GB", "expert=16", (), None),  # as slow inside a host as between hosts
        ("16xMI300X", "expert=16", (), 2),
        ("16xH100", "expert=16", ("model.experts_per_token=1",), None),
        ("16xH100", "expert=16", ("model.capacity_factor=1.0",), None),
        ("16xH100", "expert=16", ("expert_domains=1",), 1),
        ("16xH100", "context=2,expert=2,tensor=4", ("fold_experts=both",), 2),
        ("v5e-16", "expert=16", (), None),
    ],
)
def test_rows_are_sent_once_to_the_domains_of_experts(fleet, layout, changes, domains):
    run = load_config("llama3-8b", [*QWEN, *changes])
    assert resolve_dispatch(run, Layout.parse(layout), Fleet.parse(fleet)).expert_domains == domains


@pytest.mark.parametrize(
    ("fleet", "changes"),
    [
        ("16xH100", []),
        ("24xH100", ["fold_experts=context"]),
        ("64xH100", ["fold_experts=both"]),
        ("72xGB200", []),
        ("144xGB200", ["fold_experts=both"]),
        ("16xMI300X", []),
        ("16xL40S", []),
        ("v5e-16", ["expert_domains=2"]),
    ],
)
def test_estimates_send_rows_as_the_step_would(fleet, changes):
    """With the domains that a run has on a layout, given by hand, its estimate is the same."""
    target = Fleet.parse(fleet)
    sizes = ("model.num_experts=144", "model.experts_per_token=8", "batch.sequences=576")
    run = load_config("bytes-moe", [*changes, *sizes, "model.capacity_factor=none"])
    candidates = space_of(run, target, parsed_knobs(["offload=none", "remat=full", "stage=1"])).candidates
    once = 0
    for row in np.random.default_rng(0).permutation(len(candidates))[:40]:
        own = candidates[[row]]
        resolved = resolve_dispatch(run, candidates.layout(row), target)
        given = resolved.model_copy(update={"expert_domains": resolved.expert_domains or 1})
        once += (resolved.expert_domains or 1) > 1
        found = [estimate(each, machine_of(target, None), own).seconds[0] for each in (run, given)]
        assert found[0] == found[1]
    assert (once > 3) == (fleet != "72xGB200")
