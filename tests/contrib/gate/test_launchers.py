"""Launchers: the fleet that a job asks for, and what its command trains."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError

from .test_recipes import AXOLOTL, FACTORY, MEGATRON, TITAN

SBATCH = """#!/bin/bash
#SBATCH --job-name=run
#SBATCH --nodes=2            # hosts
#SBATCH --gres=gpu:h100:8
#SBATCH --ntasks-per-node=1
#SBATCH -t 1-12:00:00
#SBATCH --exclusive

export NCCL_DEBUG=WARN
HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
CONFIG=job.toml
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_endpoint $HEAD:29500 \\
    -m torchtitan.train --job.config_file ./$CONFIG "$@"
"""
JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: run}
spec:
  failurePolicy: {maxRestarts: 3}
  replicatedJobs:
  - name: workers
    replicas: 1
    template:
      spec:
        parallelism: 4
        completions: 4
        backoffLimit: 0
        activeDeadlineSeconds: 7200
        template:
          spec:
            nodeSelector: {cloud.google.com/gke-accelerator: nvidia-h100-mega-80gb}
            containers:
            - name: main
              image: example
              env: [{name: CONFIG, value: job.toml}]
              command: [bash, -c]
              args: ["torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file $CONFIG"]
              resources: {limits: {nvidia.com/gpu: 8}}
"""
TPU = """
apiVersion: batch/v1
kind: Job
metadata: {name: run}
spec:
  parallelism: 4
  completions: 4
  template:
    spec:
      nodeSelector:
        cloud.google.com/gke-tpu-accelerator: tpu-v6e-slice
        cloud.google.com/gke-tpu-topology: 4x4
      containers:
      - name: main
        image: example
        command: [meshwright, train, llama3-8b, --set, schedule.kind=constant]
        args: [--set, batch.sequences=64, --steps, "9"]
        resources: {limits: {google.com/tpu: 4}}
"""
SKY = """
name: tune
resources:
  accelerators: H100:8
  any_of: [{cloud: gcp}, {cloud: aws}]
num_nodes: 2
file_mounts:
  /configs: ./configs
run: |
  FORCE_TORCHRUN=1 NNODES=$SKYPILOT_NUM_NODES llamafactory-cli train /configs/sft.yaml
"""


def test_an_sbatch_script_says_the_fleet_and_its_command_the_recipe(gated):
    made, asked = gated({"run.sbatch": SBATCH, "job.toml": TITAN})
    assert (asked.fleet.name, asked.layout, made.seconds_asked) == ("16xH100", "fsdp=4,tensor=4", 129_600.0)
    assert made.job.launch.seen.ignored["job-name"] == "names, places and messages"


@pytest.mark.parametrize(
    ("options", "fleet"),
    [
        ("--nodes=2 --gpus-per-node=h100:4", "2x4xH100"),
        ("-N 4 -n 4 --gpus-per-task=8 -C h200", "32xH200"),
        ("--gpus=16 --nodes=2 --constraint=ib&a100", "16xA100-80GB"),
        ("--ntasks=16 --ntasks-per-node=8 --gres=gpu:H100:8,nvme:1", "16xH100"),
        ("--gres=gpu:nvidia_h100_80gb_hbm3:2", "2xH100"),
        ("--gpus=h100:32 --gpus-per-node=8", "32xH100"),
        ("--ntasks=12 --ntasks-per-node=8 --gpus-per-node=h100:8", "16xH100"),
    ],
)
def test_each_way_to_ask_slurm_for_devices(gated, options, fleet):
    script = f"#!/bin/bash\n#SBATCH {options}\nmeshwright train bytes-nano --layout data=-1\n"
    _, asked = gated({"run.sh": script})
    assert asked.fleet.name == fleet


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--gres=gpu:8", "asks for 8 devices and does not say of which kind"),
        ("--gres=gpu:a100:4,gpu:h100:4", "devices of several kinds on one host"),
        ("--nodes=2", "does not say how many devices a host has"),
        ("--gpus=3 --nodes=2", "does not share out evenly"),
        ("--nodes=2-4 --gpus-per-node=8", "leaves open how many hosts"),
        ("--nodes=%n% --gpus-per-node=8", "a template that was not filled in"),
        ("--gpus=h100:8 --time=soon", "--time=soon is no time of Slurm's"),
        ("--gpus=h100:8 --array=0-9", "the job runs once for each of them"),
        ("--gpus=h100:8 --wibble=1", "wibble = '1': it is not known here"),
    ],
)
def test_what_slurm_is_asked_for_and_is_not_clear_is_refused(gated, options, words):
    with pytest.raises(InputError) as refused:
        gated({"run.sh": f"#!/bin/bash\n#SBATCH {options}\nmeshwright train bytes-nano\n"})
    assert words in str(refused.value)


def test_the_chip_alone_or_the_whole_fleet_can_be_named(gated):
    script = SBATCH.replace("gpu:h100:8", "gpu:8")
    _, asked = gated({"run.sh": script, "job.toml": TITAN}, on="H200")
    assert asked.fleet.name == "16xH200"
    _, asked = gated({"run.sh": script, "job.toml": TITAN}, on="4xA100-80GB")
    assert asked.fleet.name == "4xA100-80GB"


def test_options_of_sbatch_count_more_than_its_scripts(gated):
    _, asked = gated({"run.sh": SBATCH, "job.toml": TITAN}, options={"nodes": "4", "argv": ["x"]})
    assert asked.fleet.name == "32xH100"


def test_words_of_the_command_override_the_recipe(gated):
    script = SBATCH.replace('"$@"', "--training.steps 9 --parallelism.tensor_parallel_degree=2")
    _, asked = gated({"run.sh": script, "job.toml": TITAN})
    assert (asked.config.steps, asked.layout) == (9, "fsdp=8,tensor=2")


def test_a_jobset_says_its_pods_their_label_and_a_command_in_a_shell(gated):
    made, asked = gated({"job.yaml": JOBSET, "job.toml": TITAN})
    assert (asked.fleet.name, made.seconds_asked) == ("32xH100", 7200.0)
    assert asked.config.batch.sequence_length == 4096


def test_a_job_on_tpus_asks_for_a_slice_of_its_topology(gated):
    _, asked = gated({"job.yaml": TPU}, overrides=["layout=fsdp=-1"])
    assert (asked.fleet.name, asked.config.batch.sequences, asked.config.steps) == ("v6e-16", 64, 9)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("completions: 4", "completions: 8", "it runs several times"),
        ("backoffLimit: 0", "wibble: 0.5", "job.wibble = 0.5"),
        ("kind: JobSet", "kind: RayJob", "has 0 Jobs, JobSets and PyTorchJobs, among RayJob"),
        ("nvidia.com/gpu: 8", "nvidia.com/gpu: '{{ gpus }}'", "is no whole number"),
    ],
)
def test_what_a_jobset_does_not_make_clear_is_refused(gated, old, new, words):
    with pytest.raises(InputError) as refused:
        gated({"job.yaml": JOBSET.replace(old, new), "job.toml": TITAN})
    assert words in str(refused.value)


def test_a_task_of_skypilot_finds_its_recipe_where_it_is_mounted(gated):
    recipe = FACTORY.replace("deepspeed: ds.json\n", "")
    _, asked = gated({"task.yaml": SKY, "configs/sft.yaml": recipe})
    assert (asked.fleet.name, asked.layout) == ("16xH100", "data=16")


@pytest.mark.parametrize(
    ("accelerators", "fleet"),
    [
        ("{A100: 8}", "16xA100-40GB"),
        ("['L4:2']", "2x2xL4"),
        ("tpu-v5litepod-16", "2xv5e-16"),
        ("H200", "2x1xH200"),
    ],
)
def test_names_of_skypilot_are_chips_of_ours(gated, accelerators, fleet):
    text = (
        SKY.replace("H100:8", accelerators).split("run: |")[0]
        + "run: meshwright train bytes-nano --layout data=-1\n"
    )
    _, asked = gated({"task.yaml": text})
    assert asked.fleet.name == fleet


def test_several_accelerators_to_choose_from_are_refused(gated):
    with pytest.raises(InputError, match="which one it will be is open"):
        gated({"task.yaml": SKY.replace("H100:8", "[H100:8, A100:8]"), "configs/sft.yaml": FACTORY})


SCRIPT = """
TP=${TP:-2}
MODEL=(
    --num-layers 12   # a comment
    --hidden-size 768
)
train() {
  torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL[@]} --tensor-model-parallel-size $TP %s
}
train
"""


def _script(extra: str = "") -> str:
    rest = MEGATRON.replace("\n", " ").replace("--num-layers 12 --hidden-size 768", "")
    return SCRIPT % (rest.replace("--tensor-model-parallel-size 2", "") + extra)


def test_a_script_of_megatron_is_read_with_its_own_variables(gated):
    _, asked = gated({"train.sh": _script()}, on="8xH100")
    assert (asked.config.model.num_layers, asked.layout) == (12, "data=4,tensor=2")


def test_arguments_that_only_a_run_knows_are_refused_where_they_matter(gated):
    gated({"train.sh": _script(" --save $1 --data-path $(ls)")}, on="8xH100")
    with pytest.raises(InputError, match=r"--context-parallel-size is \$CP, which only a run"):
        gated({"train.sh": _script(" --context-parallel-size $CP")}, on="8xH100")
    branch = "if [ -n $X ]; then EXTRA=(--fp8-format hybrid); fi\n" + _script(" ${EXTRA[@]}")
    with pytest.raises(InputError, match=r"\$\{EXTRA\[@\]\} are set in a branch"):
        gated({"train.sh": branch}, on="8xH100")
    gated({"train.sh": branch}, on="8xH100", ignore=("$EXTRA",))


def test_scripts_that_a_command_names_are_read(gated):
    outer = "#!/bin/bash\n#SBATCH --gpus=h100:8\nsrun bash train.sh\n"
    _, asked = gated({"run.sh": outer, "train.sh": _script()})
    assert asked.config.model.num_layers == 12


@pytest.mark.parametrize(
    "command",
    [
        "axolotl train lora.yaml",
        "accelerate launch -m axolotl.cli.train lora.yaml",
        "srun bash -c 'cd /x && axolotl train lora.yaml --launcher torchrun'",
        "F=lora; axolotl preprocess $F.yaml && axolotl train ${F}.yaml",
    ],
)
def test_each_way_to_start_axolotl(gated, command):
    script = f"#!/bin/bash\n#SBATCH --gpus=h100:4\n{command}\n"
    _, asked = gated({"run.sh": script, "lora.yaml": AXOLOTL})
    assert asked.config.lora.rank == 32


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py", "starts nothing that is read here"),
        ("axolotl train a.yaml; axolotl train b.yaml", "starts 2 programs"),
        ("axolotl train $1", "trains by $1, which is no file here"),
        ("axolotl train lora.yaml --micro-batch-size 8", "the command overrides keys by"),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b", "without --job.config_file"),
        ("meshwright train llama3-8b --wibble 3", "is no option that is read before a launch"),
    ],
)
def test_a_command_that_is_not_understood_is_refused(gated, command, words):
    with pytest.raises(InputError) as refused:
        gated({"run.sh": f"#!/bin/bash\n#SBATCH --gpus=h100:4\n{command}\n", "lora.yaml": AXOLOTL})
    assert words in str(refused.value)


def test_the_caller_can_say_what_it_trains(gated):
    script = "#!/bin/bash\n#SBATCH --gpus=h100:4\npython train.py\n"
    words = ("llama3-8b", "--set", "batch.sequences=64", "--layout", "fsdp=4")
    _, asked = gated({"run.sh": script}, program=words)
    assert (asked.config.name, asked.config.batch.sequences, asked.layout) == ("llama3-8b", 64, "fsdp=4")
