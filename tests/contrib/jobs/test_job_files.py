"""The job files that a plan emits: read as their schedulers read them, and run by ones played here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.contrib.jobs import KINDS, job_file
from meshwright.errors import InputError
from meshwright.hardware import CATALOG, Fleet
from meshwright.trainer.launch import Place, place_in

# Every option that these files use, as sbatch(1) of Slurm 26.05 lists it, with the form of its value.
SBATCH = {
    "job-name": r"[a-z][a-z0-9-]*",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "exclusive": "",
    "mem": "0",
    "time": r"\d+:00:00",
    "signal": r"TERM@\d{1,4}",
    "requeue": "",
    "open-mode": "append|truncate",
}
GPU_FLEETS = ["8xH100", "16xH100", "2x4xH100", "1xL4", "16xMI300X", "144xGB200"]
TPU_FLEETS = ["v5p-8", "v5p-512", "v5e-16", "v6e-4", "v4-32", "v7x-16"]


def made(kind: str, fleet: str = "16xH100", **given: Any) -> str:
    order: dict[str, Any] = {
        "config_file": "run.toml",
        "name": "first",
        "steps": None,
        "folder": "/runs/first",
    }
    return job_file(kind, fleet=Fleet.parse(fleet), **(order | given))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text('# the winner\n[model]\nkind = "linear"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documents(text: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def pod_of(text: str) -> dict[str, Any]:
    return documents(text)["Job"]["spec"]["template"]["spec"]


# Slurm


@pytest.mark.parametrize("fleet", GPU_FLEETS)
def test_a_file_for_slurm_is_bash_and_its_options_are_those_of_sbatch(fleet):
    text = made("slurm", fleet)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    head, _, body = text.partition("\nset -u\n")
    directives = [line for line in head.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH" not in body
    options = dict(re.fullmatch(r"#SBATCH --([a-z-]+)=?(.*)", line).groups() for line in directives)
    assert len(options) == len(directives)
    for name, value in options.items():
        assert re.fullmatch(SBATCH[name], value), (name, value)
    asked = Fleet.parse(fleet)
    assert options["nodes"] == str(asked.num_hosts)
    assert options["ntasks-per-node"] == options["gpus-per-node"] == str(asked.chips_per_host)
    assert ("exclusive" in options) == (asked.chips_per_host >= asked.chip.chips_per_host)


# Plays srun, scontrol and date: notes their words, and ends as STATUS says.
PLAYED = """#!{python}
import os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["NOTES"], "a") as notes:
    print(name, *sys.argv[1:], sep="\\t", file=notes)
if name == "date":
    print(os.environ["NOW"])
sys.exit(int(os.environ["STATUS"]) if name == "srun" else 0)
"""


def ended(folder: Path, status: int, *, now: int, text: str) -> tuple[int, list[list[str]]]:
    """The exit status of the script, and the commands of the scheduler that it gave."""
    for name in ("srun", "scontrol", "date"):
        (folder / name).write_text(PLAYED.format(python=sys.executable))
        (folder / name).chmod(0o755)
    notes = folder / "notes"
    notes.write_text("")
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "10000", "SLURM_CPUS_PER_TASK": "8"}
    told |= {"NOTES": str(notes), "NOW": str(now), "STATUS": str(status)}
    environment = {**os.environ, **told, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True)
    said = [line.split("\t") for line in notes.read_text().splitlines()]
    return done.returncode, [words for words in said if words[0] != "date"]


@pytest.mark.parametrize(
    ("status", "now", "attempts", "again"),
    [
        (0, 5000, 1, False),
        (2, 9990, 1, False),  # a message for the user, also near the end
        (143, 5000, 1, False),  # somebody asked it to end
        (4, 5000, 4, False),
        (137, 5000, 4, False),
        (143, 9640, 1, True),  # the time limit's signal, which may come a minute early
        (137, 9990, 1, True),
    ],
)
def test_a_run_on_slurm_is_tried_again_and_queued_again_only_at_the_time_limit(
    here, status, now, attempts, again
):
    code, said = ended(here, status, now=now, text=made("slurm"))
    assert code == status
    assert [words[0] for words in said].count("srun") == attempts
    assert (["scontrol", "requeue", "Incomplete", "7"] in said) == again


@given(
    name=st.text(min_size=1), folder=st.text(min_size=1), config=st.text(min_size=1), steps=st.integers(1, 9)
)
def test_whatever_text_is_given_the_shell_passes_it_on_unchanged(name, folder, config, steps):
    try:
        text = made("slurm", "2x4xH100", name=name, folder=folder, config_file=config, steps=steps)
    except InputError:
        return
    assert all(line.startswith("#") or "SBATCH" not in line for line in text.splitlines())
    (line,) = [line for line in text.splitlines() if line.startswith("    srun")]
    words = shlex.split(line)
    assert words[words.index("meshwright") :] == [
        *("meshwright", "train", config, "--folder", folder, "--resume", "--steps", str(steps))
    ]


# Kubernetes


@pytest.mark.parametrize("fleet", [*GPU_FLEETS, *TPU_FLEETS])
def test_a_file_for_kubernetes_fits_the_schemas_of_kubernetes(fleet):
    schemas = pytest.importorskip("kubernetes_validate", reason="the dev extra brings it")
    text = made("k8s", fleet)
    for document in yaml.safe_load_all(text):
        for version in ("1.31", schemas.latest_version()):
            schemas.validate(document, version, strict=True)
    job = documents(text)["Job"]["spec"]
    assert job["completions"] == job["parallelism"] == Fleet.parse(fleet).num_hosts


def test_the_pods_know_their_places_as_meshwright_reads_them():
    text = made("k8s", "24xH100", name="A run: No. 7")
    made_of, pod = documents(text), pod_of(text)
    job, service = made_of["Job"], made_of["Service"]
    assert job["metadata"]["name"] == service["metadata"]["name"] == pod["subdomain"] == "a-run-no-7"
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": "a-run-no-7"},
    }
    assert job["spec"]["completionMode"] == "Indexed"
    told = {each["name"]: each for each in pod["containers"][0]["env"]}
    index = told.pop("MESHWRIGHT_PROCESS")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environment = {name: each["value"] for name, each in told.items()} | {"MESHWRIGHT_PROCESS": "2"}
    place = place_in(environment | {"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "2"})
    assert place == Place(launcher="meshwright", index=2, count=3, coordinator="a-run-no-7-0.a-run-no-7:7717")


def test_one_host_is_one_pod_without_a_service_or_a_place():
    text = made("k8s", "8xH100")
    assert "Service" not in documents(text)
    assert "env" not in pod_of(text)["containers"][0]
    assert "completionMode" not in documents(text)["Job"]["spec"]


def test_the_configuration_is_part_of_a_file_for_kubernetes(here):
    text = (here / "run.toml").read_text()
    file = made("k8s", steps=30)
    assert documents(file)["ConfigMap"]["data"] == {"run.toml": text}
    container = pod_of(file)["containers"][0]
    assert container["command"] == [
        *("meshwright", "train", "/etc/meshwright/run.toml", "--folder", "/runs/first", "--resume"),
        *("--steps", "30"),
    ]
    assert {"name": "config", "mountPath": "/etc/meshwright", "readOnly": True} in container["volumeMounts"]
    assert "    [model]\n" in file  # readable, not escaped


@pytest.mark.parametrize(
    ("fleet", "accelerator", "topology", "chips", "hosts"),
    [
        ("v5p-512", "tpu-v5p-slice", "4x8x8", 4, 64),
        ("v5e-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v6e-1", "tpu-v6e-slice", "1x1", 1, 1),
        ("v7x-16", "tpu7x", "2x2x2", 4, 2),
    ],
)
def test_a_tpu_slice_on_gke_is_asked_for_by_its_labels(fleet, accelerator, topology, chips, hosts):
    text = made("k8s", fleet)
    pod = pod_of(text)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert documents(text)["Job"]["spec"]["completions"] == hosts


def test_the_pods_of_a_tpu_slice_take_their_places_from_gke():
    container = pod_of(made("k8s", "v5e-16", folder="/runs/$(HOME) a"))["containers"][0]
    # Kubernetes reads $$ as $, and replaces $(NAME).
    command = [word.replace("$$", "$") for word in container["command"]]
    shell = command.index("meshwright")
    told = {each["name"]: each["value"] for each in container["env"]}
    told |= {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "first.svc,second.svc"}
    tried = [*command[:shell], "env"]
    said = subprocess.run(
        tried, env={**os.environ, **told}, capture_output=True, text=True, check=True
    ).stdout
    place = place_in(dict(line.split("=", 1) for line in said.splitlines() if line.startswith("MESHWRIGHT_")))
    assert place == Place(launcher="meshwright", index=3, count=4, coordinator="first.svc:7717")
    assert command[shell:][3:5] == ["--folder", "/runs/$(HOME) a"]


# SkyPilot

# The keys of a task that these files use, with their types in the schemas of SkyPilot 0.14.1
# (sky/utils/schemas.py). SkyPilot itself is too large a package to test with.
SKY_TASK = {
    "name": str,
    "num_nodes": int,
    "resources": dict,
    "file_mounts": dict,
    "volumes": dict,
    "setup": str,
    "run": str,
}


@pytest.mark.parametrize("fleet", ["8xH100", "16xH100", "2x4xA100-80GB", "v6e-4", "v5p-8"])
def test_a_file_for_skypilot_has_the_keys_of_its_schema(fleet):
    task = yaml.safe_load(made("skypilot", fleet))
    assert {key: type(value) for key, value in task.items()}.items() <= SKY_TASK.items()
    assert task["num_nodes"] == Fleet.parse(fleet).num_hosts
    assert set(task["resources"]) == {"accelerators"}
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


SKY_CHIPS = {
    *("V100-16GB", "V100-32GB", "T4", "A100-40GB", "A100-80GB", "A10", "A10G", "A6000", "L4", "L40S"),
    *("RTX-3090", "RTX-4090", "RTX-5090", "RTX-PRO-6000", "H100", "H100-NVL", "H200", "GH200", "B200"),
    *("B300", "MI300X"),
}


def test_accelerators_have_skypilots_names():
    assert yaml.safe_load(made("skypilot", "16xH100"))["resources"]["accelerators"] == "H100:8"
    assert yaml.safe_load(made("skypilot", "2x4xA100-80GB"))["resources"]["accelerators"] == "A100-80GB:4"
    assert yaml.safe_load(made("skypilot", "v5e-4"))["resources"]["accelerators"] == "tpu-v5litepod-4"
    assert "is a PCIe card on some clouds" in made("skypilot", "8xH100")


def test_the_hosts_of_skypilot_know_their_places_and_try_again(here):
    task = yaml.safe_load(made("skypilot", "24xH100", name="first"))
    assert task["file_mounts"] == {"/tmp/first.toml": "run.toml"}
    assert task["volumes"] == {"/runs": "runs"}
    (here / "meshwright").write_text('#!/bin/bash\nenv >> said\necho "$@" >> words\nexit $STATUS\n')
    (here / "meshwright").chmod(0o755)
    told = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NUM_NODES": "3"}
    told |= {"SKYPILOT_NODE_RANK": "1", "PATH": f"{here}:{os.environ['PATH']}"}
    for status, attempts in ((0, 1), (2, 1), (143, 1), (4, 4)):
        (here / "words").write_text("")
        environment = {**os.environ, **told, "STATUS": str(status)}
        done = subprocess.run(["bash", "-e", "-c", task["run"]], env=environment, capture_output=True)
        assert done.returncode == status
        words = (here / "words").read_text().splitlines()
        assert words == ["train /tmp/first.toml --folder /runs/first --resume"] * attempts
    said = [line for line in (here / "said").read_text().splitlines() if line.startswith("MESHWRIGHT_")]
    place = place_in(dict(line.split("=", 1) for line in said))
    assert place == Place(launcher="meshwright", index=1, count=3, coordinator="10.0.0.1:7717")


# All kinds


@given(
    name=st.text(min_size=1),
    config=st.text(),
    folder=st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1),
)
def test_whatever_text_is_given_yaml_holds_it_unchanged(tmp_path_factory, name, config, folder):
    file = tmp_path_factory.mktemp("config") / "run.toml"
    try:
        file.write_text(config, encoding="utf-8", newline="")
    except UnicodeEncodeError:
        return
    folder = f"/runs/{folder.strip('/')}"
    try:
        text = made("k8s", name=name, config_file=str(file), folder=folder)
    except InputError:
        return
    job_name = documents(text)["Job"]["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", job_name)
    assert documents(text)["ConfigMap"]["data"]["run.toml"] == file.read_text(encoding="utf-8")
    command = pod_of(text)["containers"][0]["command"]
    assert command[command.index("--folder") + 1].replace("$$", "$") == folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", [chip for chip in CATALOG.values() if chip.slices is None])
def test_every_gpu_has_a_file_or_words_that_say_why_not(kind, chip):
    fleet = Fleet.parse(f"{2 * chip.chips_per_host}x{chip.name}")
    order = {"config_file": "run.toml", "fleet": fleet, "name": "x", "steps": 1, "folder": "/runs/x"}
    if chip.platform == "cpu" or (kind == "skypilot" and chip.name not in SKY_CHIPS):
        with pytest.raises(InputError, match=fleet.name):
            job_file(kind, **order)
    else:
        assert f"Trains on {fleet.name}" in job_file(kind, **order)


@pytest.mark.parametrize(
    ("kind", "given", "message", "hint"),
    [
        ("slrum", {}, "no job file is of the kind 'slrum'", "did you mean 'slurm'?"),
        (
            "slurm",
            {"fleet": "8xCPU"},
            "8xCPU is one machine's simulated",
            "meshwright train CONFIG --on 8xCPU",
        ),
        ("slurm", {"fleet": "v5p-512"}, "no job file for Slurm: v5p comes in", "use the kind k8s"),
        ("k8s", {"fleet": "v3-32"}, "on v3-32: no label of such nodes", "v4, v5e, v5p"),
        ("k8s", {"fleet": "2xv5e-16"}, "on 2xv5e-16: a Job cannot place its pods slice by slice", "JobSet"),
        ("skypilot", {"fleet": "2xv5e-4"}, "the 2 hosts of 2xv5e-4: it mounts no volume", "use the kind k8s"),
        (
            "skypilot",
            {"fleet": "v5p-512"},
            "the 64 hosts of v5p-512: it mounts no volume",
            "use the kind k8s",
        ),
        ("skypilot", {"fleet": "8xMI355X"}, "its catalog has no name for MI355X", "slurm or k8s"),
        ("skypilot", {"fleet": "v7x-8"}, "its catalog has no v7x", "use the kind k8s"),
        ("slurm", {"steps": 0}, "the number of steps is 0", "at least 1"),
        ("slurm", {"hours": 0}, "the time limit in hours is 0", "at least 1"),
        ("slurm", {"folder": "a\nb"}, "the path of the run's folder is 'a\\nb'", "printable characters"),
        ("slurm", {"config_file": "-x"}, "'-x', reads as an option", "write ./-x"),
        ("slurm", {"name": "..."}, "nothing in the name '...' is allowed", "a letter from a to z"),
        ("k8s", {"folder": "runs/a"}, "'runs/a' does not lie in a folder", "/runs/first: the volume 'runs'"),
        ("k8s", {"folder": "/a"}, "'/a' does not lie in a folder", "/runs/first"),
        ("k8s", {"folder": "/a/../b"}, "does not lie in a folder", "/runs/first"),
        ("k8s", {"image": "a b"}, "'a b' cannot be the name of the image", "use letters"),
        ("k8s", {"volume": "a\nb"}, "'a\\nb' cannot be the name of the volume", "use letters"),
        ("k8s", {"config_file": "none.toml"}, "'none.toml' cannot be read", "meshwright init FILE.toml"),
        ("skypilot", {"config_file": "$a.toml"}, "would read a variable", "without a dollar sign"),
        ("skypilot", {"folder": "/$a/b"}, "would read a variable", "without a dollar sign"),
    ],
)
def test_what_a_scheduler_cannot_have_is_refused_in_words(kind, given, message, hint):
    with pytest.raises(InputError) as refused:
        made(kind, **given)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_a_configuration_larger_than_a_config_map_is_refused(here):
    (here / "run.toml").write_text("# long\n" * 200_000)
    with pytest.raises(InputError, match="exceeds 1048576 bytes"):
        made("k8s")
