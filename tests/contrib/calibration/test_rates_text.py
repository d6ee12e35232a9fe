"""The rates of a machine, on a terminal."""

from meshwright.hardware import Calibration, MeasuredAttention, MeasuredCollective


def test_what_predictions_use_stands_before_what_is_only_shown():
    made = Calibration(
        matmul_flops_per_second={"fp32": 1e11},
        memory_bytes_per_second=2e10,
        launch_seconds=3e-6,
        date="2026-11-21",
        source="a test",
        details={"matmul fp32 512, FLOP/s": 5e10, "copy of 64 MiB, bytes/s": 1e9},
    )
    lines = [" ".join(line.split()) for line in str(made).splitlines()]
    assert lines[0] == "CPU: a test, 2026-11-21"
    assert "large product in fp32 100 GFLOP/s" in lines
    assert "launch of a kernel 3.00 us" in lines
    assert lines.index("memory, of fused kernels 20.0 GB/s") < lines.index("matmul fp32 512 50.0 GFLOP/s")
    assert lines[-1] == "copy of 64 MiB 1.00 GB/s"


def test_attention_and_collectives_stand_among_what_predictions_use():
    attention = MeasuredAttention(
        head_size=128, length=4096, forward_flops_per_second=4e14, backward_flops_per_second=3e14
    )
    gather = MeasuredCollective(kind="all-gather", group_size=8, bytes_per_second=2e11, latency_seconds=2e-5)
    made = Calibration(
        matmul_flops_per_second={"bf16": 5e14},
        memory_bytes_per_second=3e12,
        launch_seconds=2e-6,
        attention=(attention,),
        collectives=(gather,),
        date="2026-11-21",
        source="a test",
        chip="H100",
    )
    lines = [" ".join(line.split()) for line in str(made).splitlines()]
    assert "attention of 4096, heads of 128 400 TFLOP/s, 300 TFLOP/s backward" in lines
    assert "all-gather among 8, sent 200 GB/s after 20.0 us" in lines
