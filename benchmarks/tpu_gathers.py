"""Print how XLA compiles one gather of a matrix for slices of TPUs: as a gather, or as an all-reduce.

Run: python benchmarks/tpu_gathers.py [SLICE ...] (default: eight slices). Needs libtpu, and no TPU.
docs/results/tpus.md holds what it printed, and what follows.
"""

from __future__ import annotations

import os
import re
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.hardware import Fleet, topology_arguments
from meshwright.sharding import mesh_of

SLICES = ("v5e-64", "v5e-256", "v6e-64", "v6e-256", "v4-128", "v5p-64", "v5p-128", "v5p-256")
WIDTH = 4096
FORM = re.compile(r" (all-gather|all-reduce)(?:-start)?\(.*")
CHOICE = re.compile(r'"(?:emitter|strategy)":"(\w+)"')


def compiled_gather(fleet: Fleet, rows: int) -> str:
    """Return the compiled program of a product whose second factor [rows, WIDTH] is gathered over a slice."""
    devices = topologies.get_topology_desc(**topology_arguments(fleet)).devices
    mesh = mesh_of([("fsdp", len(devices))], devices)
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("fsdp", None))

    def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return x @ jax.lax.with_sharding_constraint(matrix, whole).T

    matrix = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16, sharding=split)
    traced = jax.jit(product, out_shardings=split).trace(matrix, matrix)
    return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def main() -> None:
    """Print a line for each slice and size."""
    for name in sys.argv[1:] or SLICES:
        fleet = Fleet.parse(name)
        shape = fleet.topology.partition(":")[2]
        for rows in (1024, 8192):
            found = FORM.search(compiled_gather(fleet, rows))
            assert found, "the program gathers"
            how = ", ".join(CHOICE.findall(found[0]))
            mebibytes = rows * WIDTH * 2 // 2**20
            print(f"{name:8} {shape:8} {fleet.num_devices:4} chips, {mebibytes:3} MiB: {found[1]} ({how})")


if __name__ == "__main__":
    main()
