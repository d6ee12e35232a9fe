"""A row of the table of published runs, as tests change it."""

SIZES = {  # of Llama 3 8B
    "n_layers": "32",
    "d_model": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "d_ff": "14336",
    "gated_mlp": "yes",
    "vocab": "128256",
    "seq_len": "8192",
}
LLAMA = {
    "id": "someone-001",
    "model": "Llama-3-8B",
    "params_b": "8.03",
    **SIZES,
    "accelerator": "A100-80GB-SXM",
    "n_devices": "64",
    "devices_per_node": "8",
    "precision": "bf16",
    "sharding": "FSDP2",
    "fsdp": "64",
    "micro_batch_per_device": "1",
    "global_batch_seqs": "64",
    "act_ckpt": "selective(per-op)",
    "tokens_per_s_per_device": "2973",
}
