"""Lemma 2 of the paper, in the two forms of method section 5, in float64.

With U Vᵀ = 0, heads do not make λ_min(∇hᵀ∇h) smaller, the amount by which constraint gradients stay independent.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.model.classifier import Classifier
from holdfast.model.openclip import build_towers

M = 4  # protected tasks


def gram(rows: list[Tensor]) -> Tensor:
    stacked = torch.stack(rows)
    return stacked @ stacked.T


def smallest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix)[0])


def flat(value: Tensor, parameters: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).flatten()
            for gradient, parameter in zip(found, parameters, strict=True)
        ]
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", ["U = 0", "V = 0", "U and V of disjoint columns"])
def test_the_form_of_the_proof(seed: int, case: str) -> None:
    """Where h_k sees only W_k = W + U_k V_kᵀ:

    λ_min(with heads) >= λ_min(without) + min_k ‖∇_W h_k V_k‖² + min_k ‖∇_W h_kᵀ U_k‖².
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dim, width, rank, images = 6, 8, 3, 5
    backbone = draw(M, width).requires_grad_()  # stands for the parameters u of the text backbone
    W = draw(dim, width).requires_grad_()
    U, V = torch.zeros(M, dim, rank, dtype=torch.float64), torch.zeros(M, width, rank, dtype=torch.float64)
    if case == "U = 0":
        V = draw(M, width, rank)
    elif case == "V = 0":
        U = draw(M, dim, rank)
    else:
        U[..., :1], V[..., 1:] = draw(M, dim, 1), draw(M, width, rank - 1)
    U.requires_grad_()
    V.requires_grad_()
    assert not bool((U @ V.transpose(1, 2)).any())
    encoded = functional.normalize(draw(M, images, dim), dim=-1)

    def h(k: int, matrix: Tensor) -> Tensor:
        texts = functional.normalize(backbone @ matrix.T, dim=-1)
        return functional.cross_entropy(encoded[k] @ texts.T / 0.2, torch.full((images,), k))

    without = gram([flat(h(k, W), [backbone, W]) for k in range(M)])
    with_heads = gram([flat(h(k, W + U[k] @ V[k].T), [backbone, W, U, V]) for k in range(M)])
    by_matrix = [torch.autograd.grad(h(k, W), W)[0] for k in range(M)]
    gain = min(float((by_matrix[k] @ V[k].detach()).square().sum()) for k in range(M))
    gain += min(float((by_matrix[k].T @ U[k].detach()).square().sum()) for k in range(M))
    assert gain > 1e-6
    assert smallest(with_heads) >= smallest(without) + gain - 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_the_product(seed: int) -> None:
    """On the real classifier h_k sees every head through the softmax:

    λ_min(with heads) >= λ_min(without) + λ_min(Gram of the head gradients).
    """
    torch.manual_seed(seed)
    config = {
        "embed_dim": 12,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "head_width": 8, "layers": 1},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
    }
    view = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    towers = build_towers({"kind": "openclip", "architecture": "small", "config": config, "preprocess": view}).double()
    names = ("clear", "overcast", "snowy", "rainy", "foggy")
    classifier = Classifier(towers, names, [(f"the weather is {name}",) for name in names], 0.05)
    shared = [parameter for parameter in towers.parameters() if parameter.requires_grad]
    images = torch.randn(M, 6, 3, 16, 16, dtype=torch.float64)

    def gradients(parameters: list[Tensor]) -> Tensor:
        return gram(
            [
                flat(functional.cross_entropy(classifier.logits(images[k]), torch.full((6,), k)), parameters)
                for k in range(M)
            ]
        )

    without = gradients(shared)
    added = classifier.begin_round(rank=3, seed=seed)
    with_heads = gradients([*shared, added.U, added.V])
    heads_alone = gradients([added.U, added.V])
    assert smallest(heads_alone) > 1e-6
    assert smallest(with_heads) >= smallest(without) + smallest(heads_alone) - 1e-12
    assert smallest(with_heads) > smallest(without)
