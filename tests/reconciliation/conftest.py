"""A measurement of round figures, and the ledger and prediction of the same step."""

from __future__ import annotations

import pytest

from meshwright.ledger import FlopLedger, Ledger, MemoryLedger, Timeline
from meshwright.measure import Measurement, Percentiles
from meshwright.predict import Interval, Prediction


@pytest.fixture
def measurement() -> Measurement:
    """Of two GPUs."""
    return Measurement(
        steps=7,
        signal="",
        resumed_from=None,
        held_out_metrics={},
        num_bad_steps=0,
        seconds_by_phase={"compile": 1.0, "step": 3.0},
        tokens_per_step=100,
        step_seconds=Percentiles(median=0.5, low=0.4, high=0.7, num_steps=5),
        compile_seconds=3.0,
        losses={1: 5.5, 2: 4.25},
        held_out_losses={0: 5.6, 2: 4.5},
        unigram_entropy_nats=3.25,
        argument_bytes_per_device=1000,
        peak_bytes=4000,
        process_rss_growth_bytes=None,
        xla_flops=2000,
        not_measured={"process_rss_growth_bytes": "not asked"},
        fingerprint="abc",
        platform="cuda",
        device_kind="NVIDIA H200",
        num_devices=2,
        host="an abacus, 10 beads",
        versions={"jax": "0.10.2"},
        date="2026-11-21T03:00:00+00:00",
        sample_prompt="def f(",
        sample="x):\n",
    )


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(
        memory=MemoryLedger(
            reserved_bytes=3000,
            argument_bytes=1100,
            peak_bytes=2900,
            allowance={},
            usable_bytes=10_000,
            by_category={
                "temporaries": 1500,
                "optimizer_state": 600,
                "outputs": 400,
                "parameters": 300,
                "keys": 90,
                "batch": 60,
                "step": 50,
            },
            optimizer_state_by_moment={},
            buffers=(),
            timeline=Timeline(instants=(), last_instant=0, peak_instant=0, by_category={}),
        ),
        flops=FlopLedger(
            model=1600,
            executed=1800,
            recomputed=200,
            by_phase={},
            by_format={},
            by_module={},
            model_by_module={},
            waste_by_module={},
            rule_6nd=None,
        ),
        traffic=(),
        unpriced=(),
    )


@pytest.fixture
def prediction() -> Prediction:
    return Prediction(
        step_seconds=Interval(low=0.3, expected=0.4, high=0.6),
        tokens_per_second_per_device=125.0,
        mfu=0.5,
        hfu=0.6,
        peak_flops_per_second=4000.0,
        slices=(),
        basis="made up",
        unpriced=(),
    )
