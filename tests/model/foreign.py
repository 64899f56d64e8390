"""Models of other libraries, tiny and with random weights, saved as those libraries save them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

WORDS = ("a", "photo", "of", "the", "zero", "one", "eight", "dog", "much", "longer", "sentence", "about", "weather")
VIEW = {
    "do_resize": True,
    "resample": 2,
    "do_normalize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.25, 0.3],
}


def _tower(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **more}


def _tokenizer(folder: Path, kind: str) -> int:
    """A tokenizer of words; the id of its end token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<start>", "<end>"]
    vocabulary = {word: place for place, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single = "<start> $A <end>" if kind == "clip" else "$A <end>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    names = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<end>" if kind == "clip" else "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return vocabulary["<end>"]


def save_transformers(folder: Path, kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A CLIP or SigLIP folder; returns the model."""
    import transformers

    end = _tokenizer(folder, kind)
    texts = {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": end, "bos_token_id": 2, "pad_token_id": 0}
    sections = {"text_config": _tower(**texts), "vision_config": _tower(image_size=32, patch_size=8)}
    torch.manual_seed(seed)
    if kind == "clip":
        model = transformers.CLIPModel(transformers.CLIPConfig(**sections, projection_dim=24))
        view = {**VIEW, "do_center_crop": True, "size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    else:
        sections["text_config"]["projection_size"] = 32
        model = transformers.SiglipModel(transformers.SiglipConfig(**sections))
        view = {**VIEW, "size": {"height": 32, "width": 32}}
    with torch.no_grad():  # biases begin at 0 in these libraries, and would go unnoticed
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(view))
    return model.float().eval()


def save_timm(folder: Path, classes: list[str], *, name: str = "test_vit", **arguments: Any) -> nn.Module:
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=len(classes), **arguments).eval()
    disturb(model)
    save_for_hf(
        model, str(folder), model_config={"label_names": classes}, model_args=arguments, safe_serialization=True
    )
    return model


def save_torchvision(path: Path, classes: int, *, name: str = "shufflenet_v2_x0_5", prefix: str = "") -> nn.Module:
    import torchvision

    torch.manual_seed(2)
    model = torchvision.models.get_model(name, weights=None, num_classes=classes).eval()
    disturb(model)
    torch.save({prefix + key: value for key, value in model.state_dict().items()}, path)
    return model


def disturb(model: nn.Module) -> None:
    """Statistics and biases that are not what they begin with."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                noise = torch.rand_like(value) if name.endswith("running_var") else torch.randn_like(value)
                value.add_(0.01 * noise)


GERMAN = ("ein", "foto", "von", "einem", "vom", "der", "hund", "wetter", "acht", "Hund", "Wetter", "Foto", "Acht")


def save_text_tower(
    folder: Path,
    *,
    family: str = "distilbert",
    pooling: str = "mean",
    bias: bool = False,
    max_length: int | None = 16,
    lower_case: bool = False,
) -> Path:
    """A folder of Transformer, Pooling and Dense with words of two languages, written by sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    inside = folder.parent / "encoder"
    vocabulary = {word: place for place, word in enumerate(["<pad>", "<unk>", "<start>", "<end>", *WORDS, *GERMAN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<start>", "sep_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=24, **names).save_pretrained(inside)
    sizes = _tower(vocab_size=64, max_position_embeddings=32, pad_token_id=0)
    if family == "distilbert":
        sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, **dict(list(sizes.items())[-3:])}
    torch.manual_seed(3)
    encoder = AutoModel.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    encoder.save_pretrained(inside)
    dense = Dense(32, 24, bias=bias, activation_function=None)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    modules = [
        Transformer(str(inside), max_seq_length=max_length, do_lower_case=lower_case),
        Pooling(32, pooling_mode=pooling),
        dense,
    ]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    shutil.rmtree(inside)
    return folder
