"""Two hosts on one machine: network namespaces, joined by a link of limited bandwidth."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RATE = "50mbit"
PORT = 12731
ADDRESSES = ("10.231.7.1", "10.231.7.2")
# Activations are large beside the parameters: tensor parallelism moves far more than data parallelism.
SETTINGS = (
    "model.num_layers=2",
    "batch.sequence_length=256",
    "evaluation.every_steps=1000",
    "evaluation.batches=1",
    "checkpoint.every_steps=none",
)
STEPS = 8


def do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces whose only link is `RATE` wide each way."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("namespaces need root, ip and tc")
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")
    try:
        try:
            lay_out(names)
        except OSError as refused:
            pytest.skip(f"no network namespaces here: {refused}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def lay_out(names: tuple[str, str]) -> None:
    for name in names:
        do("ip", "netns", "add", name)
    link = [f"{name}v" for name in names]
    do("ip", "link", "add", link[0], "type", "veth", "peer", "name", link[1])
    for name, end, address in zip(names, link, ADDRESSES, strict=True):
        do("ip", "link", "set", end, "netns", name)
        inside = ("ip", "netns", "exec", name)
        do(*inside, "ip", "address", "add", f"{address}/24", "dev", end)
        do(*inside, "ip", "link", "set", "lo", "up")
        do(*inside, "ip", "link", "set", end, "up")
        shape = ("root", "tbf", "rate", RATE, "burst", "64kb", "latency", "400ms")
        do(*inside, "tc", "qdisc", "add", "dev", end, *shape)
        # Gloo advertises what the host's name resolves to.
        own = Path("/etc/netns") / name / "hosts"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")


def step_seconds(hosts: tuple[str, str], folder: Path, layout: str) -> tuple[float, list[float]]:
    """Median seconds of a step, and the losses, of two processes of two devices, one on each host."""
    words = ["train", "bytes-nano", "--on", "4xCPU", "--layout", layout, "--steps", str(STEPS)]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    told = {"MESHWRIGHT_COORDINATOR": f"{ADDRESSES[0]}:{PORT}", "MESHWRIGHT_NUM_PROCESSES": "2"}
    started = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                host,
                sys.executable,
                "-m",
                "meshwright",
                *words,
                "--folder",
                str(folder),
            ],
            env={**os.environ, **told, "MESHWRIGHT_PROCESS": str(index)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, host in enumerate(hosts)
    ]
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    measured = json.loads((folder / "measurement.json").read_text())
    return measured["step_seconds"]["median"], list(measured["losses"].values())


@pytest.mark.long
def test_a_chatty_axis_inside_hosts_is_faster_than_across_them(hosts, tmp_path):
    # Axes are laid over devices outermost first, and a host's devices are neighbours.
    inside, losses = step_seconds(hosts, tmp_path / "inside", "data=2,tensor=2")
    across, same = step_seconds(hosts, tmp_path / "across", "tensor=2,data=2")
    assert losses == pytest.approx(same, abs=1e-5)
    assert across > 1.5 * inside, f"{inside:.3f} s per step inside, {across:.3f} s across"
