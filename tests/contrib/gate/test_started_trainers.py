"""What a job's commands start: scripts with branches, `accelerate launch`, options in place of a file."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError

from .test_recipes import AXOLOTL, FACTORY, MEGATRON

HEAD = "#!/bin/bash\n#SBATCH --gpus=h100:8\n"
ARGUMENTS = " ".join(MEGATRON.split())


def script(before: str, more: str) -> dict[str, str]:
    return {"run.sh": f"{HEAD}{before}\ntorchrun pretrain_gpt.py {ARGUMENTS} {more}\n"}


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("DTYPE=${1:-fp8}\nif [[ $DTYPE == fp8 ]]; then\n  A=(--fp8-format hybrid)\nelse\n  A=()\nfi", "fp8"),
        (
            "DTYPE=bf16\nif [ $DTYPE = fp8 ]; then\nA+=(--fp8-format hybrid)\nelse A=(--log-interval 1); fi",
            "bf16",
        ),
        ("N=8\nif [ $N -gt 4 ] && [ -n x ]; then A=(--fp8-format hybrid); fi", "fp8"),
        (
            "if [ a = b ]; then A=(--x)\nelif [ 1 -eq 1 ] || [ -z $U ]; then "
            "declare -a A=(--fp8-format hybrid); fi",
            "fp8",
        ),
        ("A=()\n[ a = b ] && A=(--wibble)\n[[ ! a = b ]] && A=(--fp8-format hybrid)", "fp8"),
        ("A=()\nif [ -n $WANDB ]; then\n  A+=(--wandb-project x --save $HOME)\nfi", "bf16"),
        (': "${F:=hybrid}"\nmkdir -p x && A=(--fp8-format $F); B=1', "fp8"),
    ],
)
def test_branches_that_compare_what_is_known_are_decided(gated, before, kind):
    _, asked = gated(script(before, '"${A[@]}"'))
    assert asked.config.precision == kind


@pytest.mark.parametrize(
    ("before", "more", "words"),
    [
        (
            "if [ -n $X ]; then A=(--fp8-format hybrid); fi",
            '"${A[@]}"',
            r"\$\{A\[@\]\}.* are set in a branch",
        ),
        ("[ -n $X ] && CP=2", "--context-parallel-size $CP", "is \\$CP, which only a run"),
        ("test -d x || CP=2", "--context-parallel-size $CP", "is \\$CP, which only a run"),
        ("for CP in 1 2; do CP=$CP; done", "--context-parallel-size $CP", "is \\$CP, which only a run"),
        ("CP=$((4 / N))", "--context-parallel-size $CP", "which only a run"),
        ("CP=$((4 ** 9**9))", "--context-parallel-size $CP", "which only a run"),
    ],
)
def test_branches_that_only_a_run_decides_stay_unknown(gated, before, more, words):
    with pytest.raises(InputError, match=words):
        gated(script(before, more))


def test_arithmetic_of_known_numbers_is_done(gated):
    _, asked = gated(script("N=$SLURM_NNODES\nCP=$(( (N * 8) / 2 - 2 ))", "--context-parallel-size $CP"))
    assert "context=2" in asked.layout


@pytest.mark.parametrize(
    "line",
    [
        "srun bash -c 'torchrun $CMD'",  # in single quotes: the inner shell knows what was exported
        'eval "torchrun $CMD"',
        "bash inner.sh hybrid",
    ],
)
def test_commands_in_a_variable_are_read_by_the_shell_that_runs_them(gated, line):
    inner = f"torchrun pretrain_gpt.py {ARGUMENTS} --fp8-format $1\n"
    text = f'{HEAD}export CMD="pretrain_gpt.py {ARGUMENTS}"\n{line}\n'
    _, asked = gated({"run.sh": text, "inner.sh": inner})
    assert asked.config.model.num_layers == 12


FSDP = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: false,
              fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_activation_checkpointing: true}
mixed_precision: bf16
num_processes: 8
"""
ZERO = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
FULL = FACTORY.replace("finetuning_type: lora", "finetuning_type: full")


def started(options: str) -> dict[str, str]:
    return {
        "run.sh": f"{HEAD}accelerate launch {options} src/train.py sft.yaml\n",
        "sft.yaml": "\n".join(
            line for line in FULL.splitlines() if not line.startswith(("deepspeed", "lora", "bf16", "quant"))
        ),
        "fsdp.yaml": FSDP,
        "zero.yaml": ZERO,
    }


@pytest.mark.parametrize(
    ("options", "layout", "kind", "offload", "master"),
    [
        ("", "data=8", "fp32", "none", "none"),
        ("--config_file fsdp.yaml --num_processes 8", "fsdp=8", "bf16", "none", "none"),
        ("--config_file=fsdp.yaml --mixed_precision=no", "fsdp=8", "fp32", "none", "none"),
        ("--config-file zero.yaml --mixed_precision bf16", "data=8", "bf16", "optimizer", "fp32"),
        ("--use_fsdp --fsdp_offload_params true", "fsdp=8", "fp32", "state", "none"),
        ("--use_deepspeed --zero_stage 3 --multi_gpu", "fsdp=8", "fp32", "none", "none"),
    ],
)
def test_accelerate_says_how_a_recipe_is_split(gated, options, layout, kind, offload, master):
    made, asked = gated(started(options))
    state = asked.config.state
    assert (asked.layout, asked.config.precision, asked.config.offload) == (layout, kind, offload)
    assert (state.master or "none") == master
    assert asked.config.zero1 == ("zero.yaml" in options)
    assert any("neither DeepSpeed nor FSDP" in note for note in made.notes) == (not options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--config_file absent.yaml", "absent.yaml, which is no file here"),
        ("--config_file $CONFIG", r"\$CONFIG, which is no file here"),
        ("--use_fsdp --fsdp_sharding_strategy HYBRID_SHARD", "cannot be weighed"),
        ("--use_tp", "use_tp = True: it changes what is split"),
        ("--wibble 3", "wibble = '3': it is not known here"),
        ("--use_deepspeed --zero_stage $STAGE", r"zero_stage is \$STAGE, which only a run"),
    ],
)
def test_what_accelerate_is_asked_for_and_is_not_understood_is_refused(gated, options, words):
    with pytest.raises(InputError, match=words):
        gated(started(options))


def test_adapters_on_zero_2_keep_their_moments_whole_with_a_note(gated):
    lora = "deepspeed: z2.json\n" + AXOLOTL
    made, asked = gated({"a.yaml": lora, "z2.json": '{"zero_optimization": {"stage": 2}}'}, on="8xH100")
    assert not asked.config.zero1
    assert any(note.startswith("the moments of adapters") for note in made.notes)


OPTIONS = """--model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size=2 --bf16 --max_steps 9
--gradient_accumulation_steps 4 --max_seq_length 1024 --gradient_checkpointing true --output_dir $OUT"""


@pytest.mark.parametrize(
    "command",
    [
        f"torchrun --nproc_per_node 8 run_clm.py {OPTIONS}",
        f"deepspeed run_clm.py {OPTIONS} --fsdp full_shard auto_wrap",
        f"srun python -m torch.distributed.run sft.py {OPTIONS} --report_to wandb tensorboard",
    ],
)
def test_options_of_training_arguments_are_a_recipe(gated, command):
    _, asked = gated({"run.sh": HEAD + command.replace("\n", " ") + "\n"})
    batch = asked.config.batch
    assert (batch.sequences, batch.microbatch_sequences, batch.sequence_length) == (64, 2, 1024)
    assert (asked.config.steps, asked.config.remat) == (9, "full")
    assert asked.layout == ("fsdp=8" if "fsdp" in command else "data=8")


def test_an_option_whose_value_only_a_run_knows_is_refused(gated):
    line = OPTIONS.replace("--max_steps 9", "--max_steps $STEPS").replace("\n", " ")
    with pytest.raises(InputError, match=r"max_steps is \$STEPS, which only a run"):
        gated({"run.sh": f"{HEAD}python run_clm.py {line}\n"})


def test_a_file_of_arguments_after_a_script_is_its_recipe(gated):
    file = (
        '{"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 2, '
        '"max_length": 512}'
    )
    _, asked = gated({"run.sh": f"{HEAD}python sft.py args.json\n", "args.json": file})
    assert asked.config.batch.sequence_length == 512


def test_a_recipe_that_only_predicts_is_refused(gated):
    with pytest.raises(InputError, match="predicts or evaluates, and does not train"):
        gated({"a.yaml": FULL.replace("do_train: true", "") + "\ndo_predict: true\n"}, on="8xH100")


PYTORCH = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: run, labels: {kueue.x-k8s.io/queue-name: team}}
spec:
  runPolicy: {cleanPodPolicy: None, activeDeadlineSeconds: 600}
  pytorchReplicaSpecs:
    Master: &pods
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
          containers:
          - name: pytorch
            image: example
            command: [meshwright, train, bytes-nano, --layout, data=-1]
            resources: {limits: {nvidia.com/gpu: 8}}
    Worker: {<<: *pods, replicas: 3}
"""


def test_a_pytorchjob_asks_for_its_master_and_its_workers(gated):
    made, asked = gated({"job.yaml": PYTORCH})
    assert (asked.fleet.name, made.seconds_asked) == ("32xH100", 600.0)


def test_a_pytorchjob_of_unlike_replicas_is_refused(gated):
    worker = "Worker: {replicas: 3, template: {spec: {containers: [{name: a, image: b, command: [c]}]}}}"
    with pytest.raises(InputError, match="the replicas Master, Worker have different devices or commands"):
        gated({"job.yaml": PYTORCH.replace("Worker: {<<: *pods, replicas: 3}", worker)})


def test_a_debug_flavor_of_torchtitan_has_not_the_sizes_of_the_model_it_imitates(gated):
    job = (
        '[model]\nname = "transformers_modeling_backend"\nflavor = "{}"\n'
        '[hf_transformers]\nmodel = "Qwen/Qwen3-4B"\n[training]\nsteps = 3\n'
    )
    _, asked = gated({"a.toml": job.format("full")}, on="8xH100")
    assert asked.config.model.num_layers == 36
    with pytest.raises(InputError, match="'debugmodel', whose sizes are not known"):
        gated({"a.toml": job.format("debugmodel")}, on="8xH100")
