"""Modules of torchvision, timm, transformers and diffusers, weighed on one device and on `fsdp=8`.

Run: python benchmarks/torch_modules.py [NAME ...] [--record]. Each is made from a small configuration on the
meta device, without weights. Modules of libraries that are not installed are left out, and said to be.
What is asked: each works on both, or is refused in words that say what to do next.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _record import write_record

import meshwright as mw
from meshwright.errors import InputError

GIB = 2**30
DEVICE, FLEET, LAYOUT = "1xCPU", "8xH100", "fsdp=8"
LIBRARIES = ("transformers", "torchvision", "timm", "diffusers")
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SMALL = {**TEXT, "vocab_size": 128}
Made = tuple[torch.nn.Module, dict[str, Any]]


def is_installed(library: str) -> bool:
    """Return whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


@contextlib.contextmanager
def _without_compiled_operators() -> Iterator[None]:
    """Import torchvision also where its compiled operators do not load, as beside PyTorch for CPUs.

    Its models are Python, apart from the boxes of detection.
    """
    original = torch.library.register_fake

    def register_fake(name: Any, *given: Any, **options: Any) -> Any:
        library, _, operator = str(name).partition("::")
        if library == "torchvision" and not hasattr(torch.ops.torchvision, operator):
            return lambda function: function
        return original(name, *given, **options)

    torch.library.register_fake = register_fake
    try:
        yield
    finally:
        torch.library.register_fake = original


def library_of(name: str) -> Any:
    """The library, imported; torchvision first, which transformers and timm import too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        if is_installed("torchvision"):
            with _without_compiled_operators():
                importlib.import_module("torchvision")
        return importlib.import_module(name)


def ids(*shape: int) -> torch.Tensor:
    """Token ids of a shape, (2, 32) by default."""
    return torch.zeros(*(shape or (2, 32)), dtype=torch.long)


def image(size: int = 64, channels: int = 3) -> torch.Tensor:
    """Two square images."""
    return torch.zeros(2, channels, size, size)


def _text(config: str, model: str, **settings: Any) -> Made:
    return _of_transformers(config, model, lambda: {"input_ids": ids(), "labels": ids()}, **settings)


def _of_transformers(config: str, model: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Made:
    library = library_of("transformers")
    return getattr(library, model)(getattr(library, config)(**settings)), inputs()


def _of_torchvision(name: str, size: int = 64, **settings: Any) -> Made:
    place = library_of("torchvision").models
    for part in name.split(".")[:-1]:
        place = getattr(place, part)
    module = getattr(place, name.split(".")[-1])(weights=None, **settings)
    return module, {"x": image(size)}


def _detector() -> Made:
    models = library_of("torchvision").models
    module = models.detection.fasterrcnn_mobilenet_v3_large_fpn(weights=None, weights_backbone=None)
    targets = [{"boxes": torch.zeros(1, 4), "labels": torch.ones(1, dtype=torch.long)}]
    return module, {"images": [torch.zeros(3, 64, 64)], "targets": targets}


def _of_timm(name: str, size: int = 224, **settings: Any) -> Made:
    module = library_of("timm").create_model(name, pretrained=False, **settings)
    return module, {"x": image(size)}


def _of_diffusers(model: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Made:
    return getattr(library_of("diffusers"), model)(**settings), inputs()


def _steps() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.long)


VISION = {**TEXT, "image_size": 64, "patch_size": 16}
BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 32}
CASES: dict[str, Callable[[], Made]] = {
    "transformers.llama": partial(_text, "LlamaConfig", "LlamaForCausalLM", **SMALL, num_key_value_heads=2),
    "transformers.qwen3": partial(
        _text, "Qwen3Config", "Qwen3ForCausalLM", **SMALL, num_key_value_heads=2, head_dim=16
    ),
    "transformers.gpt2": partial(
        _text, "GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=128
    ),
    "transformers.bert": partial(_text, "BertConfig", "BertForMaskedLM", **SMALL),
    "transformers.mixtral": partial(
        _text, "MixtralConfig", "MixtralForCausalLM", **SMALL, num_key_value_heads=2, num_local_experts=4
    ),
    "transformers.mamba": partial(
        _text, "MambaConfig", "MambaForCausalLM", hidden_size=64, num_hidden_layers=2, vocab_size=128
    ),
    "transformers.t5": partial(
        _text, "T5Config", "T5ForConditionalGeneration", d_model=64, d_ff=128, d_kv=16, num_layers=2,
        num_heads=4, vocab_size=128, decoder_start_token_id=0, pad_token_id=0,
    ),
    "transformers.whisper": partial(
        _of_transformers, "WhisperConfig", "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.zeros(2, 80, 3000), "decoder_input_ids": ids()},
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
    ),
    "transformers.opt": partial(
        _text, "OPTConfig", "OPTForCausalLM", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=128, vocab_size=128, word_embed_proj_dim=64,
    ),
    "transformers.gpt_neox": partial(_text, "GPTNeoXConfig", "GPTNeoXForCausalLM", **SMALL),
    "transformers.gemma2": partial(
        _text, "Gemma2Config", "Gemma2ForCausalLM", **SMALL, num_key_value_heads=2, head_dim=16,
        pad_token_id=0,
    ),
    "transformers.bart": partial(
        _text, "BartConfig", "BartForConditionalGeneration", d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        vocab_size=128, pad_token_id=0, decoder_start_token_id=0,
    ),
    "transformers.deberta_v2": partial(_text, "DebertaV2Config", "DebertaV2ForMaskedLM", **SMALL),
    "transformers.wav2vec2": partial(
        _of_transformers, "Wav2Vec2Config", "Wav2Vec2Model", lambda: {"input_values": torch.zeros(2, 4000)},
        **TEXT, conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embedding_groups=4, num_conv_pos_embeddings=16,
        mask_time_prob=0.0, layerdrop=0.0,
    ),
    "transformers.resnet": partial(
        _of_transformers, "ResNetConfig", "ResNetModel", lambda: {"pixel_values": image()},
        embedding_size=16, hidden_sizes=(16, 32), depths=(2, 2),
    ),
    "transformers.swin": partial(
        _of_transformers, "SwinConfig", "SwinModel", lambda: {"pixel_values": image()}, image_size=64,
        embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, drop_path_rate=0.0,
    ),
    "transformers.vit": partial(
        _of_transformers, "ViTConfig", "ViTModel", lambda: {"pixel_values": image()}, **VISION
    ),
    "transformers.clip": partial(
        _of_transformers, "CLIPConfig", "CLIPModel",
        lambda: {"input_ids": ids(), "pixel_values": image()}, text_config=SMALL, vision_config=VISION,
    ),
    "transformers.mistral": partial(
        _text, "MistralConfig", "MistralForCausalLM", **SMALL, num_key_value_heads=2, sliding_window=16
    ),
    "transformers.phi3": partial(
        _text, "Phi3Config", "Phi3ForCausalLM", **SMALL, num_key_value_heads=2, pad_token_id=0
    ),
    "transformers.distilbert": partial(
        _text, "DistilBertConfig", "DistilBertForMaskedLM", dim=64, hidden_dim=128, n_layers=2, n_heads=4,
        vocab_size=128,
    ),
    "transformers.convnext": partial(
        _of_transformers, "ConvNextConfig", "ConvNextModel", lambda: {"pixel_values": image()},
        hidden_sizes=(16, 32, 48, 64), depths=(1, 1, 1, 1),
    ),
    "torchvision.resnet50": partial(_of_torchvision, "resnet50"),
    "torchvision.mobilenet_v3_small": partial(_of_torchvision, "mobilenet_v3_small"),
    "torchvision.convnext_tiny": partial(_of_torchvision, "convnext_tiny"),
    "torchvision.swin_t": partial(_of_torchvision, "swin_t"),
    "torchvision.vit_b_16": partial(_of_torchvision, "vit_b_16", 224),
    "torchvision.fcn_resnet50": partial(
        _of_torchvision, "segmentation.fcn_resnet50", weights_backbone=None
    ),
    "torchvision.fasterrcnn": _detector,
    "timm.vit_tiny_patch16_224": partial(_of_timm, "vit_tiny_patch16_224"),
    "timm.convnext_atto": partial(_of_timm, "convnext_atto", 64),
    "timm.mixer_s32_224": partial(_of_timm, "mixer_s32_224"),
    "timm.swin_tiny_patch4_window7_224": partial(_of_timm, "swin_tiny_patch4_window7_224"),
    "diffusers.unet": partial(
        _of_diffusers, "UNet2DModel", lambda: {"sample": image(32), "timestep": _steps()}, **BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers.unet_with_text": partial(
        _of_diffusers, "UNet2DConditionModel",
        lambda: {
            "sample": image(32, 4), "timestep": _steps(), "encoder_hidden_states": torch.zeros(2, 16, 64)
        }, **BLOCKS, cross_attention_dim=64, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers.autoencoder_kl": partial(
        _of_diffusers, "AutoencoderKL", lambda: {"sample": image(32)}, block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    ),
    "diffusers.dit": partial(
        _of_diffusers, "DiTTransformer2DModel",
        lambda: {"hidden_states": image(16, 4), "timestep": _steps(), "class_labels": _steps()},
        num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16, patch_size=2,
    ),
    "diffusers.sd3": partial(
        _of_diffusers, "SD3Transformer2DModel",
        lambda: {
            "hidden_states": image(16, 4), "timestep": _steps(),
            "encoder_hidden_states": torch.zeros(2, 16, 64), "pooled_projections": torch.zeros(2, 64),
        },
        num_layers=2, num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
        sample_size=16, patch_size=2, joint_attention_dim=64, caption_projection_dim=64,
        pooled_projection_dim=64, pos_embed_max_size=16,
    ),
}  # fmt: skip


def made(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The module of a case on the meta device, in training mode, and its inputs by name."""
    library_of(name.partition(".")[0])
    with torch.device("meta"):
        module, inputs = CASES[name]()
    return module.train(), inputs


def weigh_both(name: str) -> dict[str, Any]:
    """What a module takes on one device and on eight, or the words of the refusal."""
    module, inputs = made(name)
    row: dict[str, Any] = {"module": name, "num_parameters": sum(p.numel() for p in module.parameters())}
    step = mw.torch_step(module, **inputs, optimizer=torch.optim.AdamW)
    try:
        (alone,) = mw.weigh(step, on=DEVICE).account.ranks
        row["one_device_gib"] = round(alone.peak_bytes / GIB, 4)
        row["forward_flops"] = alone.flops_by_phase["forward"]
    except InputError as refused:
        row["one_device_refused"], row["one_device_next"] = _words(refused), refused.hint or ""
    try:
        (rank, *_) = mw.weigh(step, on=FLEET, layout=LAYOUT).account.ranks
        row["fsdp_8_gib"] = round(rank.peak_bytes / GIB, 4)
        row["fsdp_8_forward_flops"] = rank.flops_by_phase["forward"]
        row["fsdp_8_parameters_bytes"] = rank.parameters_bytes
    except InputError as refused:
        row["fsdp_8_refused"], row["fsdp_8_next"] = _words(refused), refused.hint or ""
    return row


def _words(refused: InputError) -> str:
    """The message, with files named from where libraries are installed."""
    words = refused.message
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        words = words.replace(f"{folder}/", "")
    return words


def main() -> None:
    """Weigh the named modules, or all, print what came of them, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these modules alone")
    parser.add_argument("--record", action="store_true", help="write records/DATE_torch_modules.toml")
    given = parser.parse_args()
    rows = []
    for name in given.names or CASES:
        library = name.partition(".")[0]
        if not is_installed(library):
            print(f"{name:36}{library} is not installed")
            continue
        row = weigh_both(name)
        rows.append(row)
        print(f"{name:36}{row['num_parameters']:>14,}", end="")
        for key in ("one_device", "fsdp_8"):
            words = row.get(f"{key}_refused")
            print(f"{row[f'{key}_gib']:>12.4f} GiB" if words is None else f"  refused: {words}", end="")
        print(flush=True)
    if given.record:
        packages = ["meshwright", "torch", *(name for name in LIBRARIES if is_installed(name))]
        works = sum("one_device_gib" in row and "fsdp_8_gib" in row for row in rows)
        facts = {"fleet": FLEET, "layout": LAYOUT, "modules": len(rows), "work_on_both": works}
        command = "python benchmarks/torch_modules.py --record"
        print(write_record("torch_modules", command, packages, facts, {"module": rows}))


if __name__ == "__main__":
    main()
