"""The two towers of an OpenCLIP model, with its text projection taken out."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import open_clip
import torch
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.transformer import VisionTransformer, text_global_pool
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from holdfast.data.round import TextRows
from holdfast.errors import UserError
from holdfast.model.compute import active_mode, fast_kernels, own_block_kernels
from holdfast.model.towers import Preprocess, ProjectedTowers

_LENGTH_STEP = 8  # texts are cut to a multiple of this: few shapes, and the same bits for batches of like lengths


class SteadyAttention(nn.MultiheadAttention):
    """Self-attention whose bits do not depend on what is being trained.

    PyTorch's own takes a fused path in eval mode without gradients, and multiplies in another order where the weights
    are frozen. The old model (frozen) and its untrained copy would then disagree at the very start.
    """

    @override
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, attn_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        itself = query is key and key is value and query.dim() == 3
        plain = self.batch_first and self.bias_k is None and not self.add_zero_attn
        plain = plain and (attn_mask is None or attn_mask.dtype != torch.bool)  # True: to be hidden here, seen below
        if not itself or not plain or args or options != {"need_weights": False}:
            return super().forward(query, key, value, *args, attn_mask=attn_mask, **options)
        n, length, width = query.shape
        packed = functional.linear(query, self.in_proj_weight, self.in_proj_bias)
        heads = packed.view(n, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if attn_mask is not None and attn_mask.dim() == 3:  # one for each head of each text, as [n * heads, L, L]
            attn_mask = attn_mask.view(n, self.num_heads, length, length)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=attn_mask)
        return self.out_proj(mixed.transpose(1, 2).reshape(n, length, width)), None

    @classmethod
    def replace_in(cls, model: nn.Module) -> None:
        """Give the attention layers of a model this arithmetic; their weights and names stay."""
        for module in model.modules():
            if type(module) is nn.MultiheadAttention:
                module.__class__ = cls


@functools.lru_cache(maxsize=8)
def _simple_tokenizer(context_length: int) -> Any:
    return open_clip.SimpleTokenizer(context_length=context_length)


class OpenClipTowers(ProjectedTowers):
    """An OpenCLIP model with its text projection taken out, so that each class can have its own."""

    def __init__(self, architecture: str, config: dict[str, Any], preprocess: Preprocess, model: Any = None) -> None:
        super().__init__()
        self.architecture = architecture
        self.config = copy.deepcopy(config)
        self.preprocess = preprocess
        self.model = create_model(config) if model is None else model
        SteadyAttention.replace_in(self.model)
        fast = fast_kernels()
        if fast is not None:
            fast.OpenBlock.replace_in(self.model)
        self.embed_dim = int(config["embed_dim"])
        self._take_projection()
        for parameter in self._unused():
            parameter.requires_grad_(False)
        self._cuts = _cut_is_exact(self._text, self.model)
        self._fast_image = fast is not None and fast.fast_image(self.model.visual)
        self._fast_text = fast is not None and self._cuts and fast.fast_text(self._text)
        self.eval()

    @property
    def _text(self) -> nn.Module:
        """The module that holds the text tower: OpenCLIP's CLIP class is its own."""
        return getattr(self.model, "text", self.model)

    def _take_projection(self) -> None:
        """Move W (and its bias) out of the model; what is left returns the backbone's features."""
        text = self._text
        holder, name = text, "text_projection"
        if hasattr(text, "proj"):  # a text tower from another library: linear, two layers, or nothing
            if isinstance(text.proj, nn.Sequential):
                holder, name = text.proj, str(len(text.proj) - 1)
            else:
                name = "proj"
        found = getattr(holder, name, None)
        self._projection_place = "none"
        self.bias: nn.Parameter | None = None
        if isinstance(found, nn.Linear):
            self._projection_place = "linear"
            self.weight = nn.Parameter(found.weight.detach().T.clone())
            bias = cast("nn.Parameter | None", found.bias)
            if bias is not None:
                self.bias = nn.Parameter(bias.detach().clone())
            setattr(holder, name, nn.Identity() if holder is not text or name == "proj" else None)
        elif isinstance(found, Tensor):
            self._projection_place = "parameter"
            self.weight = nn.Parameter(found.detach().clone())
            setattr(holder, name, None)
        else:
            # No projection: W is the identity, and only the heads change it.
            self.register_buffer("weight", torch.eye(self.embed_dim), persistent=False)
        prefix = next((path for path, module in self.model.named_modules() if module is holder), "")
        self._projection_key = f"{prefix}.{name}" if prefix else name
        self.text_width = self.weight.shape[0]

    def _unused(self) -> list[nn.Parameter]:
        """Parameters that no feature depends on (logit scale, a caption decoder): they are not trained."""
        unused = ("logit_scale", "logit_bias", "text_decoder")
        return [item for name, item in self.model.named_parameters() if name.split(".")[0] in unused]

    @property
    @override
    def has_fast_path(self) -> bool:
        return bool(self._fast_image and self._fast_text)

    @property
    @override
    def records_steps(self) -> bool:
        """Of towers that keep their own modules, those that were looked at (SigLIP's kind)."""
        own = own_block_kernels()
        return self.has_fast_path or (own is not None and own.is_recordable(self.model.visual, self._text))

    @override
    def image_features(self, images: Tensor) -> Tensor:
        mode, fast = active_mode(), fast_kernels()
        if mode is not None and fast is not None and self._fast_image:
            return fast.image_features(self.model.visual, images, mode)
        with _computing_blocks(self.model.visual):
            return self.model.encode_image(images, normalize=False)

    @override
    def project(self, hidden: Tensor) -> Tensor:
        if active_mode() is None or not self._fast_image:
            return super().project(hidden)
        with torch.autocast(hidden.device.type, enabled=False):  # as the fast path does it
            return super().project(hidden)

    @property
    @override
    def image_projection(self) -> Tensor | None:
        """OpenCLIP's own vision transformer ends in one; ResNets and towers of other libraries keep theirs inside."""
        visual = self.model.visual
        return visual.proj if isinstance(visual, VisionTransformer) and not visual.output_tokens else None

    @override
    def image_hidden(self, images: Tensor) -> Tensor:
        # A copy that shares its weights and has no projection hands out what it would have multiplied with it. The
        # tower itself stays as it is: others may be using it.
        visual = copy.copy(self.model.visual)
        visual.__dict__["_parameters"] = {**visual.__dict__["_parameters"], "proj": None}
        mode, fast = active_mode(), fast_kernels()
        if mode is not None and fast is not None and self._fast_image:
            return fast.image_features(visual, images, mode)
        with _computing_blocks(visual):
            return visual(images)

    @override
    def text_backbone(self, tokens: Tensor) -> Tensor:
        # On a GPU the cut would make the host wait for the tokens: whoever puts them there shortens them before.
        tokens = tokens if tokens.is_cuda else self.shorten(tokens)
        mode, fast = active_mode(), fast_kernels()
        if mode is not None and fast is not None and self._fast_text:
            return fast.text_backbone(self._text, tokens, _ends(tokens, self._text), mode)
        with _computing_blocks(self._text):
            return self._own_text_backbone(tokens)

    def _own_text_backbone(self, tokens: Tensor) -> Tensor:
        if self._cuts:
            return causal_backbone(self._text, tokens)
        if isinstance(self.model, CLIP):
            return self.model.encode_text(tokens, normalize=False)
        features = self._text(tokens)
        return features[0] if isinstance(features, tuple) else features

    @override
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        return self._tokenizer(list(texts))

    @override
    def shorten(self, tokens: Tensor) -> Tensor:
        return _cut(tokens, self._text) if self._cuts else tokens

    @override
    def lengths(self, tokens: Tensor) -> Tensor | None:
        return _ends(tokens, self._text) + 1 if self._fast_text else None

    @override
    def text_backbone_in_rows(self, tokens: Tensor, rows: TextRows | None) -> Tensor:
        mode, fast = active_mode(), fast_kernels()
        if mode is None or fast is None or rows is None or not self._fast_text:
            return self.text_backbone(tokens)
        return fast.text_backbone(self._text, tokens, rows, mode)

    @functools.cached_property
    def _tokenizer(self) -> Callable[[list[str]], Tensor]:
        text = self.config["text_cfg"]
        plain = not text.get("hf_tokenizer_name") and not text.get("tokenizer_kwargs")
        if plain and "siglip" not in self.architecture.lower():
            return _simple_tokenizer(text.get("context_length", 77))
        try:
            return cast(Callable[[list[str]], Tensor], open_clip.get_tokenizer(self.architecture))
        except Exception as error:
            raise UserError(
                f"the tokenizer of {self.architecture} could not be loaded",
                found=str(error).splitlines()[0],
                do="it is fetched once from the model hub: check the network, or choose another architecture",
            ) from error

    @override
    def spec(self) -> dict[str, Any]:
        return {
            "kind": "openclip",
            "architecture": self.architecture,
            "config": copy.deepcopy(self.config),
            "preprocess": self.preprocess.to_json(),
        }

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        return self.model.visual.parameters()

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        other = {id(parameter) for parameter in (*self.image_parameters(), *self._unused())}
        return [parameter for parameter in self.parameters() if id(parameter) not in other]

    @override
    def checkpoint_activations(self, enable: bool = True) -> None:
        self.model.set_grad_checkpointing(enable)

    def open_clip_state(self) -> dict[str, Tensor]:
        """The weights under OpenCLIP's own names, projection included: what `open_clip.create_model` loads."""
        state = {name: value.detach() for name, value in self.model.state_dict().items()}
        if self._projection_place == "parameter":
            state[self._projection_key] = self.weight.detach()
        elif self._projection_place == "linear":
            state[f"{self._projection_key}.weight"] = self.weight.detach().T.contiguous()
            if self.bias is not None:
                state[f"{self._projection_key}.bias"] = self.bias.detach()
        return state


def _computing_blocks(tower: nn.Module) -> AbstractContextManager[None]:
    """How the blocks of a tower that is called as it is are computed in the active mode."""
    mode = active_mode()
    own = None if mode is None else own_block_kernels()
    return nullcontext() if own is None else own.computing_blocks(tower, mode)


def create_model(config: dict[str, Any]) -> Any:
    """OpenCLIP's own model with random weights; nothing is fetched."""
    config = copy.deepcopy(config)
    text, vision = config["text_cfg"], config["vision_cfg"]
    if text.get("hf_model_name"):
        text["hf_model_pretrained"] = False
    if vision.get("timm_model_name"):
        vision["timm_model_pretrained"] = False
    custom = config.pop("custom_text", False) or bool(text.get("hf_model_name"))
    if not custom:
        return CLIP(**config)
    return CoCa(**config) if "multimodal_cfg" in config else CustomTextCLIP(**config)


def _cut_is_exact(text: nn.Module, model: nn.Module) -> bool:
    """Whether what stands behind the end-of-text token cannot reach the pooled feature."""
    pool = getattr(text, "text_pool_type", getattr(text, "pool_type", None))
    causal = isinstance(getattr(text, "attn_mask", None), Tensor)
    plain = getattr(text, "cls_emb", None) is None and not getattr(text, "use_pad_mask", False)
    return causal and plain and pool in ("argmax", "eos") and not isinstance(model, CoCa)


def _ends(tokens: Tensor, text: nn.Module) -> Tensor:
    """Position of each text's end token."""
    pool = getattr(text, "text_pool_type", getattr(text, "pool_type", None))
    if pool == "argmax":
        return tokens.argmax(dim=-1)
    return (tokens == getattr(text, "text_eos_id", getattr(text, "eos_id", None))).int().argmax(dim=-1)


def _cut(tokens: Tensor, text: nn.Module) -> Tensor:
    """Tokens up to the longest text of the batch, rounded up to a multiple of eight."""
    if len(tokens) == 0:
        return tokens
    longest = int(_ends(tokens, text).max()) + 1
    return tokens[:, : -(-longest // _LENGTH_STEP) * _LENGTH_STEP]


def causal_backbone(text: Any, tokens: Tensor) -> Tensor:
    """OpenCLIP's text tower up to its projection, for any length of tokens: [n, L'] -> [n, text_width].

    Under a causal mask a position sees only what stands before it, so dropping what stands behind the end-of-text
    token changes nothing: Ē2(t[:L']) = Ē2(t).
    """
    length = tokens.shape[1]
    dtype = text.transformer.get_cast_dtype()
    values = text.token_embedding(tokens).to(dtype) + text.positional_embedding[:length].to(dtype)
    values = text.transformer(values, attn_mask=text.attn_mask[:length, :length])
    values = text.ln_final(values)
    pool = getattr(text, "text_pool_type", None) or text.pool_type
    end = getattr(text, "text_eos_id", getattr(text, "eos_id", None))
    return text_global_pool(values, tokens, pool, eos_token_id=end)
